"""Chunks from GPU to GPU, counted in memory, and how far a transfer of them has come."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.cuda_driver import WRAP, CudaDriver
from lightning_freescale.comm.transports.peer.symmetric_buffer import SymmetricBuffer

_AHEAD = 4
"""Rounds that are on the streams, so that a rank which is late or has died leaves few behind that must be drained."""


class Link:
    """What lasts from transfer to transfer: memory, streams, and how many chunks have gone each way.

    ``ranks`` are those of the group, in the order of their ranks in the buffer. All counters begin at ``start``, as the words
    of the buffer do.

    Attributes:
        sending: stream of the copies to peers.
        receiving: stream of the copies out of the buffer.
        abort_stream: stream that never waits for a peer.
        sent, received: chunks for and of every peer so far.
        peers: ranks of the others in the buffer, each rank's in another order, so that not all write to the same at once.
    """

    def __init__(self, driver: CudaDriver, buffer: SymmetricBuffer, ranks: list[int], start: int = 0) -> None:
        self.driver, self.buffer, self.ranks = driver, buffer, ranks
        self.sending: Any = driver.create_stream()
        self.receiving: Any = driver.create_stream()
        self.abort_stream: Any = driver.create_stream(urgent=True)
        self.sent = [start] * len(ranks)
        self.received = [start] * len(ranks)
        self.peers = [(buffer.rank + shift) % len(ranks) for shift in range(1, len(ranks))]

    def send(self, peer: int, chunk: Tensor) -> None:
        """Copy a chunk into the peer's memory once its slot there is free, and count it there."""
        buffer, driver, number = self.buffer, self.driver, self.sent[peer]
        self.sent[peer] = number + 1
        driver.wait_word(self.sending, buffer.consumed(buffer.rank, peer), number - 1)  # all but one of those before it
        driver.copy(self.sending, buffer.slot(peer, buffer.rank, number, len(chunk)), chunk)
        driver.write_word(self.sending, buffer.arrived(peer, buffer.rank), number + 1)

    def receive(self, peer: int, chunk: Tensor) -> None:
        """Copy a chunk out of its slot once it is there, and tell the peer."""
        buffer, driver, number = self.buffer, self.driver, self.received[peer]
        self.received[peer] = number + 1  # at once, for what is awaited is not above it if a call fails
        driver.wait_word(self.receiving, buffer.arrived(buffer.rank, peer), number + 1)
        driver.copy(self.receiving, chunk, buffer.slot(buffer.rank, peer, number, len(chunk)))
        driver.write_word(self.receiving, buffer.consumed(peer, buffer.rank), number + 1)

    def signal_failure(self) -> None:
        """Tell the peers that this rank gives up."""
        for peer in self.peers:
            self.driver.write_word(self.abort_stream, self.buffer.failed(peer), 1)

    def release_streams(self) -> None:
        """Write the counts that the streams wait for; again and again, because a peer that comes late writes lower ones."""
        buffer = self.buffer
        for peer in self.peers:
            self.driver.write_word(self.abort_stream, buffer.consumed(buffer.rank, peer), self.sent[peer])
            self.driver.write_word(self.abort_stream, buffer.arrived(buffer.rank, peer), self.received[peer])


class TransferProgress:
    """The chunks of one transfer, in rounds of at most one to and one from every peer.

    The receives of a round wait for its sends, and its sends for receives two rounds earlier, so uneven parts cannot make ranks
    wait for each other in a circle. That is the order of the calls, too: it holds even if the GPU runs both streams as one.
    """

    def __init__(self, link: Link, transfer: Transfer) -> None:
        self._link = link
        self._sent_before, self._received_before = list(link.sent), list(link.received)
        self._outgoing = {peer: self._split(transfer.outgoing[link.ranks[peer]]) for peer in link.peers}
        self._incoming = {peer: self._split(transfer.incoming[link.ranks[peer]]) for peer in reversed(link.peers)}
        own = link.ranks[link.buffer.rank]
        self._own = list(zip(self._split(transfer.outgoing[own]), self._split(transfer.incoming[own])))
        self._rounds = max(len(self._own), *(len(each) for way in (self._outgoing, self._incoming) for each in way.values()), 0)
        self._started = 0
        self._ends: deque[tuple[Any, Any]] = deque()
        for stream in (link.sending, link.receiving):
            link.driver.wait_event(stream, transfer.issued)

    @property
    def is_done(self) -> bool:
        """Return whether all bytes are where they belong."""
        return self._started == self._rounds and not self._ends

    @property
    def is_drained(self) -> bool:
        """Return whether nothing of it is left on the streams."""
        self._forget_ended()
        return not self._ends

    def advance(self) -> bool:
        """Enqueue rounds as earlier ones end, without waiting; return whether any has ended or started."""
        ended, started = self._forget_ended(), self._started
        while self._started < self._rounds and len(self._ends) < _AHEAD:
            self._enqueue(self._started)
            self._started += 1
        return ended or self._started > started

    def mark_end(self) -> None:
        """Mark the end of a round on the streams, also of one that could be enqueued only in part."""
        self._ends.append((self._link.sending.record_event(), self._link.receiving.record_event()))

    def late_ranks(self, signals: list[int]) -> list[int]:
        """Return the ranks that, by this one's signal pad, keep it waiting; if any, only those of which nothing is seen."""
        link, arrived, consumed = self._link, signals, signals[len(self._link.ranks) :]
        behind = [
            peer
            for peer in link.peers
            if _ahead(link.received[peer], arrived[peer]) > 0 or _ahead(link.sent[peer] - 2, consumed[peer]) > 0
        ]
        unseen = [
            peer
            for peer in behind
            if _ahead(arrived[peer], self._received_before[peer]) <= 0 and _ahead(consumed[peer], self._sent_before[peer]) <= 0
        ]
        return sorted(link.ranks[peer] for peer in unseen or behind)

    def _forget_ended(self) -> bool:
        before = len(self._ends)
        while self._ends and all(event.query() for event in self._ends[0]):
            self._ends.popleft()
        return len(self._ends) < before

    def _enqueue(self, number: int) -> None:
        link = self._link
        for peer, chunks in self._outgoing.items():
            for chunk in chunks[number : number + 1]:
                link.send(peer, chunk)
        for source, target in self._own[number : number + 1]:
            if source.data_ptr() != target.data_ptr():
                link.driver.copy(link.receiving, target, source)
        for peer, chunks in self._incoming.items():
            for chunk in chunks[number : number + 1]:
                link.receive(peer, chunk)
        self.mark_end()

    def _split(self, part: Tensor) -> list[Tensor]:
        return list(part.split(self._link.buffer.chunk)) if len(part) else []


def _ahead(one: int, other: int) -> int:
    """Return the cyclic difference of two counts."""
    return (one - other + WRAP // 2) % WRAP - WRAP // 2
