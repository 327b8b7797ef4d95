"""What lasts from transfer to transfer between the GPUs of a domain: memory, streams, counts, and the rounds in flight."""

from __future__ import annotations

from collections import deque
from ctypes import c_uint32
from dataclasses import dataclass
from typing import Any

from lightning_freescale.comm.transports.cuda_driver import CudaDriver
from lightning_freescale.comm.transports.peer.symmetric_buffer import SymmetricBuffer

_AHEAD = 4
"""Rounds that are on the streams, so that a rank which is late or has died leaves few behind that must be drained."""
_WORD = 4
"""Bytes of a word; aligned as these are, a copy engine writes them at once."""


@dataclass
class Chunks:
    """At most one chunk to, or from, every peer.

    Attributes:
        peers: ranks in the buffer.
        places: pointers to where each comes from, or goes to.
        lengths: bytes of each, at least 1.
    """

    peers: list[int]
    places: list[Any]
    lengths: list[int]


@dataclass
class _Direction:
    """One way of the chunks.

    Attributes:
        counts: chunks so far, for every peer.
        lead: how far the peer must have counted before a chunk may be copied, beyond the number of chunks before it.
        awaited: by peer, the address of this rank's word in which the peer counts.
        counted: by peer, a pointer to the peer's word in which this rank counts.
        slots: by peer, pointers to those of even and of odd chunks.
    """

    stream: Any
    counts: list[int]
    lead: int
    awaited: dict[int, int]
    counted: dict[int, Any]
    slots: dict[int, list[Any]]


class Link:
    """Copies chunks in rounds of at most one to and one from every peer. Not tested on GPU.

    In either direction a round is one call for all waits, one for all chunks and one for all counts, however many peers there
    are. Counts are 4-byte copies out of pinned memory, as NCCL's flags are since 2.29.2. A copy reads its source when the
    stream comes to it, so every round in flight has words of its own, which are written again when it has been seen to be done.

    The receives of a round wait for its sends, and its sends for receives two rounds earlier, so uneven parts cannot make ranks
    wait for each other in a circle. That is the order of the calls, too: it holds even if the GPU runs both streams as one.

    ``ranks`` are those of the group, in the order of their ranks in the buffer. All counters begin at ``start``, as the words
    of the buffer do.

    Attributes:
        peers: ranks of the others in the buffer, each rank's in another order, so that not all write to the same at once.
        sent, received: chunks for and of every peer so far.
    """

    def __init__(self, driver: CudaDriver, buffer: SymmetricBuffer, ranks: list[int], start: int = 0) -> None:
        self.driver, self.buffer, self.ranks = driver, buffer, ranks
        here, size, pointer = buffer.rank, len(ranks), driver.pointer
        self.peers = [(here + shift) % size for shift in range(1, size)]
        self.sent, self.received = [start] * size, [start] * size

        def slots(at: int, source: int) -> list[Any]:
            return [pointer(buffer.slot(at, source, number).data_ptr()) for number in range(2)]

        self._sending = _Direction(
            driver.create_stream(),
            self.sent,
            -1,  # of two slots one may be in use
            {peer: buffer.consumed(here, peer).data_ptr() for peer in self.peers},
            {peer: pointer(buffer.arrived(peer, here).data_ptr()) for peer in self.peers},
            {peer: slots(peer, here) for peer in self.peers},
        )
        self._receiving = _Direction(
            driver.create_stream(),
            self.received,
            1,
            {peer: buffer.arrived(here, peer).data_ptr() for peer in self.peers},
            {peer: pointer(buffer.consumed(peer, here).data_ptr()) for peer in self.peers},
            {peer: slots(here, peer) for peer in self.peers},
        )
        self._urgent: Any = driver.create_stream(urgent=True)  # never waits for a peer
        self._rounds = 0
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._events: list[tuple[Any, Any]] = [(None, None)] * _AHEAD
        # Words, for every peer of each round in flight one per direction; then, never in use by a round that is stuck, those
        # that release the streams, a 1, and at last a copy of the word that says whether a peer has given up.
        length = 2 * size * (_AHEAD + 1) + 2
        self._pinned, self.signals = driver.allocate_pinned(length), driver.allocate_pinned(len(buffer.signal_pad(here)))
        self._words = (c_uint32 * length).from_address(self._pinned.data_ptr())  # written many times faster than a tensor
        self._sources = [pointer(self._pinned.data_ptr() + _WORD * place) for place in range(length)]
        self._words[-2:] = [1, 0]
        self._failed = pointer(buffer.failed(here).data_ptr())

    @property
    def is_full(self) -> bool:
        """Return whether no further round may be enqueued."""
        return len(self._in_flight) >= _AHEAD

    @property
    def is_idle(self) -> bool:
        """Return whether all rounds have been seen to be done."""
        return not self._in_flight

    @property
    def has_seen_failure(self) -> bool:
        """Return whether a peer had given up before the last transfer had copied all that arrived."""
        return bool(self._words[-1])

    def wait_event(self, event: Any) -> None:
        """Let what comes next wait for an event of the caller's stream."""
        for way in (self._sending, self._receiving):
            self.driver.wait_event(way.stream, event)

    def enqueue_round(self, outgoing: Chunks, own: tuple[Any, Any, int] | None, incoming: Chunks, is_last: bool) -> None:
        """Enqueue a round, where :attr:`is_full` is not set; ``is_last`` says whether it ends a transfer.

        ``own`` are pointers to where this rank's own chunk goes and comes from, and its bytes.
        """
        place = self._rounds % _AHEAD
        self._rounds += 1
        first, size, copy = 2 * len(self.ranks) * place, len(self.ranks), self.driver.copy
        slots = self._wait(self._sending, outgoing, first)
        copy(self._sending.stream, slots, outgoing.places, outgoing.lengths)
        self._count(self._sending, outgoing, first)
        if own is not None:  # before the wait, as nobody else has part in it
            copy(self._receiving.stream, [own[0]], [own[1]], [own[2]])
        slots = self._wait(self._receiving, incoming, first + size)
        copy(self._receiving.stream, incoming.places, slots, incoming.lengths)
        self._count(self._receiving, incoming, first + size)
        if is_last and self.peers:  # behind the copies: who gives up tells it before it spoils what is in the slots
            copy(self._receiving.stream, [self._sources[-1]], [self._failed], [_WORD])
        self._events[place] = self._mark_end(*self._events[place])

    def mark_failed_round(self) -> None:
        """Mark the end of a round that could be enqueued only in part."""
        self._mark_end(None, None)

    def forget_ended(self) -> bool:
        """Return whether any round has been seen to end."""
        before = len(self._in_flight)
        while self._in_flight and all(event.query() for event in self._in_flight[0]):
            self._in_flight.popleft()
        return len(self._in_flight) < before

    def copy_signals(self) -> Any:
        """Enqueue a copy of this rank's signal pad to ``signals``, in host memory, and return the event of its end."""
        pad, pointer = self.buffer.signal_pad(self.buffer.rank), self.driver.pointer
        self.driver.copy(self._urgent, [pointer(self.signals.data_ptr())], [pointer(pad.data_ptr())], [_WORD * len(pad)])
        return self._urgent.record_event()

    def signal_failure(self) -> None:
        """Tell the peers that this rank gives up; no round is enqueued any more."""
        failed = [self.driver.pointer(self.buffer.failed(peer).data_ptr()) for peer in self.peers]
        self.driver.copy(self._urgent, failed, [self._sources[-2]] * len(failed), [_WORD] * len(failed))

    def release_streams(self) -> Any:
        """Write the counts that the streams wait for, and return the event of it.

        Again and again, because a peer that comes late writes lower ones.
        """
        first = 2 * len(self.ranks) * _AHEAD
        for way in (self._sending, self._receiving):
            for peer in self.peers:
                self._words[first + peer] = way.counts[peer]  # what it has been from the first time on
            targets = [self.driver.pointer(way.awaited[peer]) for peer in self.peers]
            sources = [self._sources[first + peer] for peer in self.peers]
            self.driver.copy(self._urgent, targets, sources, [_WORD] * len(targets))
            first += len(self.ranks)
        return self._urgent.record_event()

    def _wait(self, way: _Direction, chunks: Chunks, first: int) -> list[Any]:
        """Hold the stream until the slots of ``chunks`` may be used, and return them; count the chunks in the words."""
        numbers = [way.counts[peer] for peer in chunks.peers]
        for peer, number in zip(chunks.peers, numbers):
            way.counts[peer] = self._words[first + peer] = (
                number + 1
            )  # before the calls: a release is not below what they await
        words = [way.awaited[peer] for peer in chunks.peers]
        self.driver.wait_words(way.stream, words, [number + way.lead for number in numbers])
        return [way.slots[peer][number % 2] for peer, number in zip(chunks.peers, numbers)]

    def _count(self, way: _Direction, chunks: Chunks, first: int) -> None:
        """Tell the peers that ``chunks`` have been copied; a call of its own, as copies of one call have no order."""
        targets = [way.counted[peer] for peer in chunks.peers]
        sources = [self._sources[first + peer] for peer in chunks.peers]
        self.driver.copy(way.stream, targets, sources, [_WORD] * len(targets))

    def _mark_end(self, *events: Any) -> tuple[Any, Any]:
        sending, receiving = events
        ends = self._sending.stream.record_event(sending), self._receiving.stream.record_event(receiving)
        self._in_flight.append(ends)
        return ends
