"""How a transfer is cut into rounds of chunks, and how far it has come."""

from __future__ import annotations

from torch import Tensor

from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.cuda_driver import WRAP
from lightning_freescale.comm.transports.peer.link import Chunks, Direction, Link, Peers


class TransferProgress:
    """The rounds of one transfer."""

    def __init__(self, link: Link, transfer: Transfer) -> None:
        self._link = link
        self._transfer = transfer  # its memory
        self._sent_before, self._received_before = list(link.sent), list(link.received)
        self._outgoing = _PeerParts(link, link.sending, transfer.outgoing)
        self._incoming = _PeerParts(link, link.receiving, transfer.incoming)
        own = link.ranks[link.buffer.rank]
        source, target = transfer.outgoing[own].data_ptr(), transfer.incoming[own].data_ptr()
        self._own = source, target, len(transfer.outgoing[own]) if source != target else 0
        largest = max(self._outgoing.largest, self._incoming.largest, self._own[2])
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
        chunk, pointer = self._link.buffer.chunk, self._link.driver.pointer
        begin = number * chunk
        source, target, length = self._own
        own = None
        if length > begin:
            own = pointer(source + begin), pointer(target + begin), min(chunk, length - begin)
        outgoing, incoming = self._outgoing.cut(begin), self._incoming.cut(begin)
        self._link.enqueue_round(outgoing, own, incoming, is_last=number == self._rounds - 1)


class _PeerParts:
    """The parts of a transfer in one direction, as addresses: to slice a tensor for every chunk would cost too much."""

    def __init__(self, link: Link, direction: Direction, parts: list[Tensor]) -> None:
        self._chunk, self._pointer, self._direction = link.buffer.chunk, link.driver.pointer, direction
        of_peers = ((peer, parts[link.ranks[peer]]) for peer in link.peers)
        self._left = [(peer, part.data_ptr(), len(part)) for peer, part in of_peers]
        self.largest = max((length for *_, length in self._left), default=0)
        self._alike_until = 0

    def cut(self, begin: int) -> Chunks:
        """Return the chunks from byte ``begin`` of each part on; call it in their order."""
        if begin >= self._alike_until:  # the chunks are not those of the round before, a chunk further on
            self._left = [part for part in self._left if part[2] > begin]
            self._peers = Peers(self._direction, [peer for peer, _, _ in self._left])
            self._addresses = [address for _, address, _ in self._left]
            self._lengths = [min(self._chunk, length - begin) for _, _, length in self._left]
            shortest = min((length for _, _, length in self._left), default=0)
            self._alike_until = max(begin + self._chunk, shortest // self._chunk * self._chunk)
        pointer = self._pointer
        return Chunks(self._peers, [pointer(address + begin) for address in self._addresses], self._lengths)


def _ahead(one: int, other: int) -> int:
    """Return the cyclic difference of two counts."""
    return (one - other + WRAP // 2) % WRAP - WRAP // 2
