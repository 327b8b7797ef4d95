"""How a transfer is cut into rounds of chunks, and how far it has come."""

from __future__ import annotations

from torch import Tensor

from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.cuda_driver import WRAP
from lightning_freescale.comm.transports.peer.link import Chunks, Link


class TransferProgress:
    """The rounds of one transfer. Parts are addresses and lengths: to slice a tensor for every chunk costs too much."""

    def __init__(self, link: Link, transfer: Transfer) -> None:
        self._link = link
        self._transfer = transfer  # its memory
        self._sent_before, self._received_before = list(link.sent), list(link.received)
        self._outgoing = [(peer, *_extent(transfer.outgoing, link.ranks[peer])) for peer in link.peers]
        self._incoming = [(peer, *_extent(transfer.incoming, link.ranks[peer])) for peer in link.peers]
        (source, length), (target, _) = (
            _extent(way, link.ranks[link.buffer.rank]) for way in (transfer.outgoing, transfer.incoming)
        )
        self._own = target, source, 0 if target == source else length
        largest = max(self._own[2], *(length for way in (self._outgoing, self._incoming) for _, _, length in way), 0)
        self._rounds = -(-largest // link.buffer.chunk)
        self._started = 0
        link.wait_event(transfer.issued)

    @property
    def is_done(self) -> bool:
        """Return whether all bytes are where they belong."""
        return self._started == self._rounds and self._link.is_idle

    def advance(self) -> bool:
        """Enqueue rounds as earlier ones end, without waiting; return whether any has ended or started."""
        ended, started = self._link.forget_ended(), self._started
        while self._started < self._rounds and not self._link.is_full:
            self._enqueue(self._started)
            self._started += 1
        return ended or self._started > started

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

    def _enqueue(self, number: int) -> None:
        begin, pointer = number * self._link.buffer.chunk, self._link.driver.pointer
        target, source, length = self._own
        length = min(length - begin, self._link.buffer.chunk)
        own = (pointer(target + begin), pointer(source + begin), length) if length > 0 else None
        is_last = number == self._rounds - 1
        self._link.enqueue_round(self._cut(self._outgoing, begin), own, self._cut(self._incoming, begin), is_last)

    def _cut(self, parts: list[tuple[int, int, int]], begin: int) -> Chunks:
        """Return the chunks that begin at byte ``begin`` of each part."""
        chunk, pointer = self._link.buffer.chunk, self._link.driver.pointer
        there = [part for part in parts if part[2] > begin]
        return Chunks(
            [peer for peer, _, _ in there],
            [pointer(address + begin) for _, address, _ in there],
            [min(chunk, length - begin) for _, _, length in there],
        )


def _extent(parts: list[Tensor], rank: int) -> tuple[int, int]:
    """Return where a rank's part begins and its bytes."""
    return parts[rank].data_ptr(), len(parts[rank])


def _ahead(one: int, other: int) -> int:
    """Return the cyclic difference of two counts."""
    return (one - other + WRAP // 2) % WRAP - WRAP // 2
