"""One transfer between GPUs that write each other's memory."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.gpu.driver import WRAP, Event
from lightning_freescale.comm.transports.peer.link import Link

_AHEAD = 4
"""Rounds that are on the streams, so that a rank which is late or has died leaves few behind that must be drained."""


class TransferProgress:
    """The chunks of one transfer, in rounds of at most one to and one from every peer.

    The receives of a round wait for its sends, and its sends for receives two rounds earlier, so uneven parts cannot make ranks
    wait for each other in a circle. That is the order of the calls, too: it holds even if the GPU runs both streams as one.
    """

    def __init__(self, link: Link, transfer: Transfer) -> None:
        self._link, self._sent, self._taken = link, list(link.sent), list(link.taken)
        self._outgoing = {peer: self._chunks(transfer.outgoing[link.ranks[peer]]) for peer in link.peers}
        self._incoming = {peer: self._chunks(transfer.incoming[link.ranks[peer]]) for peer in reversed(link.peers)}
        own = link.ranks[link.slab.place]
        self._own = list(zip(self._chunks(transfer.outgoing[own]), self._chunks(transfer.incoming[own])))
        self._rounds = max(len(self._own), *(len(each) for way in (self._outgoing, self._incoming) for each in way.values()), 0)
        self._begun = 0
        self._ends: deque[tuple[Event, Event]] = deque()
        for stream in (link.sending, link.receiving):
            link.driver.after(stream, transfer.issued)

    @property
    def done(self) -> bool:
        """Whether all bytes are where they belong."""
        return self._begun == self._rounds and not self._ends

    def advance(self) -> bool:
        """Enqueue rounds as earlier ones end, without waiting; whether any has ended or begun."""
        ended, begun = self.settle(), self._begun
        while self._begun < self._rounds and len(self._ends) < _AHEAD:
            self._enqueue(self._begun)
            self._begun += 1
        return ended or self._begun > begun

    def settle(self) -> bool:
        """Forget the rounds that have ended; whether there are any."""
        before = len(self._ends)
        while self._ends and all(event.query() for event in self._ends[0]):
            self._ends.popleft()
        return len(self._ends) < before

    @property
    def drained(self) -> bool:
        """Whether nothing of it is left on the streams."""
        self.settle()
        return not self._ends

    def seal(self) -> None:
        """End a round, also one that could be enqueued only in part."""
        self._ends.append((self._link.driver.event(self._link.sending), self._link.driver.event(self._link.receiving)))

    def late(self, words: list[int]) -> list[int]:
        """The ranks that keep this one waiting, from the words of its slab; if any, only those of which nothing is seen."""
        link, arrived, taken = self._link, words, words[len(self._link.ranks) :]
        behind = [
            peer
            for peer in link.peers
            if _ahead(link.taken[peer], arrived[peer]) > 0 or _ahead(link.sent[peer] - 2, taken[peer]) > 0
        ]
        unseen = [
            peer
            for peer in behind
            if _ahead(arrived[peer], self._taken[peer]) <= 0 and _ahead(taken[peer], self._sent[peer]) <= 0
        ]
        return sorted(link.ranks[peer] for peer in unseen or behind)

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
                link.take(peer, chunk)
        self.seal()

    def _chunks(self, part: Tensor) -> list[Tensor]:
        return list(part.split(self._link.slab.chunk)) if len(part) else []


def _ahead(one: int, other: int) -> int:
    """Cyclic difference of two counts."""
    return (one - other + WRAP // 2) % WRAP - WRAP // 2
