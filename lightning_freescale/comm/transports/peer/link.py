"""Chunks from GPU to GPU, counted in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_freescale.comm.transports.gpu.driver import Driver
from lightning_freescale.comm.transports.peer.symmetric_buffer import SymmetricBuffer


@dataclass
class Link:
    """What lasts from transfer to transfer: memory, streams, and how many chunks have gone each way.

    Attributes:
        driver: of the device.
        slab: the memory.
        ranks: of the group, in the order of their places in the slab.
        start: of all counters, which the words of the slab hold at first.
        sending: stream of the copies to peers.
        receiving: stream of the copies out of the slab.
        rescue: stream that never waits for a peer.
        sent: chunks for every peer so far.
        taken: chunks of every peer so far.
    """

    driver: Driver
    slab: SymmetricBuffer
    ranks: list[int]
    start: int = 0
    sending: Any = field(init=False)
    receiving: Any = field(init=False)
    rescue: Any = field(init=False)
    sent: list[int] = field(init=False)
    taken: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sending, self.receiving = self.driver.stream(), self.driver.stream()
        self.rescue = self.driver.stream(urgent=True)
        self.sent, self.taken = ([self.start] * len(self.ranks) for _ in range(2))

    @property
    def peers(self) -> list[int]:
        """Places of the others, each rank's in another order, so that not all write to the same at once."""
        size, own = len(self.ranks), self.slab.place
        return [(own + shift) % size for shift in range(1, size)]

    def send(self, peer: int, chunk: Tensor) -> None:
        """Copy a chunk into the peer's memory once its slot there is free, and count it there."""
        slab, driver, number = self.slab, self.driver, self.sent[peer]
        self.sent[peer] = number + 1
        driver.wait(self.sending, slab.taken(slab.place, peer), number - 1)  # all but one of those before it
        driver.copy(self.sending, slab.slot(peer, slab.place, number, len(chunk)), chunk)
        driver.write(self.sending, slab.arrived(peer, slab.place), number + 1)

    def take(self, peer: int, chunk: Tensor) -> None:
        """Copy a chunk out of its slot once it is there, and tell the peer."""
        slab, driver, number = self.slab, self.driver, self.taken[peer]
        self.taken[peer] = number + 1  # at once, for what is awaited is not above it if a call fails
        driver.wait(self.receiving, slab.arrived(slab.place, peer), number + 1)
        driver.copy(self.receiving, chunk, slab.slot(slab.place, peer, number, len(chunk)))
        driver.write(self.receiving, slab.taken(peer, slab.place), number + 1)

    def give_up(self) -> None:
        """Tell the peers."""
        for peer in self.peers:
            self.driver.write(self.rescue, self.slab.failed(peer), 1)

    def count_for_peers(self) -> None:
        """Write the counts that the streams wait for; again and again, because a peer that comes late writes lower ones."""
        for peer in self.peers:
            self.driver.write(self.rescue, self.slab.taken(self.slab.place, peer), self.sent[peer])
            self.driver.write(self.rescue, self.slab.arrived(self.slab.place, peer), self.taken[peer])
