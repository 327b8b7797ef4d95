"""Through host memory and the network card, driven by the CPU: no kernel is launched.

The way of FreeScale's SM-free communication (arXiv 2604.24073): device to pinned memory, chunk by chunk over the network,
pinned memory to device, the three stages at work on different chunks at the same time. CPU tensors take the middle stage only.
Chunks go directly to their rank, not around a ring: the bytes that leave each rank are the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.staging import DeviceStaging, HostStaging, Lifted, Staging
from lightning_freescale.comm.wire import Wire

_FEWEST, _MOST, _SECONDS = 2, 16, 0.002
"""Rounds under way: as many as take two milliseconds, so that a higher lane need not wait for more, within these."""
_COPIES = 16
"""Of a chunk per peer that the bound of pinned memory must hold, for the fewest rounds under way: as many again may arrive,
size classes are powers of two, and there are two directions."""


class HostTransport:
    """Moves CPU and CUDA tensors over a :class:`Wire`."""

    name = "host"

    def __init__(self, wire: Wire, options: LaneOptions) -> None:
        self._wire, self._options = wire, options
        self._stagings: dict[torch.device, DeviceStaging] = {}

    def move(self, transfer: Transfer, pause: Callable[[], None], ranks: Collection[int] | None = None) -> None:
        """Fill ``transfer.incoming``, that of ``ranks`` only, if given. ``pause`` is called between chunks."""
        chunk, most = self._sizes(transfer.device)
        Flow(self._wire, self._staging(transfer.device), transfer, chunk, most, ranks).run(pause)

    def close(self) -> None:
        """Let go of pinned memory and streams."""
        self._stagings.clear()

    @property
    def pinned_in_use(self) -> int:
        """Bytes of pinned memory that a chunk is in."""
        return sum(staging.pinned_in_use for staging in self._stagings.values())

    def _sizes(self, device: torch.device) -> tuple[int, int]:
        """Bytes of a chunk, the same on all ranks, and the most rounds under way."""
        chunk = self._options.chunk_bytes
        if device.type == "cpu":
            return chunk, _MOST
        fits = self._options.pinned_bytes // (_COPIES * self._wire.size)
        chunk = max(1, min(chunk, fits))
        return chunk, max(_FEWEST, min(_MOST, _FEWEST * fits // chunk))

    def _staging(self, device: torch.device) -> Staging:
        if device.type == "cpu":
            return HostStaging()
        if device not in self._stagings:
            self._stagings[device] = DeviceStaging(device, self._options.pinned_bytes)
        return self._stagings[device]


@dataclass
class _Round:
    """The chunks of one round: at most one to and one from every rank."""

    outgoing: list[tuple[int, Tensor]] = field(default_factory=list)
    incoming: list[tuple[int, Tensor]] = field(default_factory=list)
    lifted: list[Lifted] = field(default_factory=list)
    sends: list[dist.Work] = field(default_factory=list)
    receives: list[tuple[dist.Work, Tensor]] = field(default_factory=list)


class Flow:
    """One transfer, in rounds of a chunk per rank.

    Receives are posted ahead of sends. A rank waits only for chunks of a round of which all ranks have posted their part, or
    will without waiting for a later one; so uneven parts cannot make ranks wait for each other in a circle.
    """

    def __init__(
        self, wire: Wire, staging: Staging, transfer: Transfer, chunk: int, most: int, ranks: Collection[int] | None
    ) -> None:
        self._wire, self._staging, self._transfer = wire, staging, transfer
        self._tag = 2 * transfer.number + 1
        served = range(wire.size) if ranks is None else ranks
        self._own = transfer.incoming[wire.rank] if wire.rank in served else None
        self._chunk, self._most = chunk, most
        self._begun: Counter[str] = Counter()
        outgoing = {peer: transfer.outgoing[peer] for peer in wire.peers if peer in served}
        incoming = {peer: transfer.incoming[peer] for peer in wire.sources if peer in served}
        longest = max(map(len, [*outgoing.values(), *incoming.values()]), default=0)
        self._rounds = [_Round() for _ in range(-(-longest // chunk))]
        for peer, part in outgoing.items():
            for number, piece in enumerate(part.split(chunk) if len(part) else ()):
                self._rounds[number].outgoing.append((peer, piece))
        for peer, part in incoming.items():
            for number, piece in enumerate(part.split(chunk) if len(part) else ()):
                self._rounds[number].incoming.append((peer, piece))

    def run(self, pause: Callable[[], None]) -> None:
        """Move everything."""
        self._staging.begin(self._transfer.issued)
        start, window = time.monotonic(), _FEWEST
        for number, current in enumerate(self._rounds):
            pause()
            self._look_ahead(number, window)
            self._complete(current)
            pace = (time.monotonic() - start) / (number + 1)
            window = min(max(_FEWEST, int(_SECONDS / pace)), self._most)
        self._copy_own()
        self._staging.finish()

    def _look_ahead(self, number: int, window: int) -> None:
        """Post what belongs to the rounds from ``number`` on: twice as many receives as sends, and one more copy."""
        for begin, last in ((self._receive, 2 * window), (self._lift, window + 1), (self._send, window)):
            for index in range(self._begun[begin.__name__], min(number + last, len(self._rounds))):
                begin(self._rounds[index])
                self._begun[begin.__name__] = index + 1

    def _receive(self, ahead: _Round) -> None:
        for peer, chunk in ahead.incoming:
            memory = self._staging.room(chunk)
            ahead.receives.append((self._wire.receive(memory[: len(chunk)], peer, self._tag), memory))

    def _lift(self, ahead: _Round) -> None:
        ahead.lifted = [self._staging.lift(chunk) for _, chunk in ahead.outgoing]

    def _send(self, ahead: _Round) -> None:
        ahead.sends = [
            self._wire.send(lifted.ready(), peer, self._tag) for (peer, _), lifted in zip(ahead.outgoing, ahead.lifted)
        ]

    def _complete(self, current: _Round) -> None:
        for (peer, chunk), (work, memory) in zip(current.incoming, current.receives):
            self._wire.wait(work, peer, self._transfer.timeout)
            self._staging.lower(memory, chunk)
        for (peer, _), work, lifted in zip(current.outgoing, current.sends, current.lifted):
            self._wire.wait(work, peer, self._transfer.timeout)
            self._staging.drop(lifted)
        current.receives, current.sends, current.lifted = [], [], []

    def _copy_own(self) -> None:
        if self._own is None:
            return
        own = self._transfer.outgoing[self._wire.rank]
        for source, target in zip(own.split(self._chunk), self._own.split(self._chunk)):
            self._staging.bounce(self._staging.lift(source), target)
