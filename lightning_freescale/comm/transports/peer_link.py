"""The link of a GPU to the others of its NVLink domain: streams, counts and rounds in flight last from transfer to transfer."""

from __future__ import annotations

from collections import deque
from ctypes import c_uint32
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_freescale.comm.transports.cuda_driver import CudaDriver
from lightning_freescale.comm.transports.symmetric_buffer import SymmetricBuffer

_AHEAD = 4
"""Rounds that are on the streams, so that a rank which is late or has died leaves few behind that must be drained."""
_WORD = 4
"""Bytes of a word; aligned as these are, a copy engine writes them at once."""


@dataclass
class Direction:
    """The chunks that this rank sends, or those that it receives. Dicts are by peer."""

    stream: Any  # of the copies
    counts: list[int]  # chunks so far, for every peer
    lead: int  # how far the peer must have counted before a chunk may be copied, beyond the number of chunks before it
    words: dict[int, Any]  # this rank's word in which the peer counts
    counted: dict[int, Any]  # a pointer to the peer's word in which this rank counts
    slots: dict[int, list[Any]]  # pointers to the slots of even and of odd chunks


class PeerChunks:
    """The chunks of a round in one direction, of the peers that have any left, as addresses.

    To slice a tensor for every chunk would cost too much. What belongs to the peers is looked up once for many rounds.
    """

    def __init__(self, link: Link, direction: Direction, parts: list[Tensor]) -> None:
        self._direction, self._chunk, self._pointer = direction, link.buffer.chunk, link.driver.pointer
        of_peers = ((peer, parts[link.ranks[peer]]) for peer in link.peers)
        self._left = [(peer, part.data_ptr(), len(part)) for peer, part in of_peers]
        self._alike_until = 0
        self.largest = max((length for *_, length in self._left), default=0)

    def advance_to(self, begin: int) -> None:
        """Take the chunks from byte ``begin`` of each part on; call it in their order."""
        if begin >= self._alike_until:  # the chunks are not those of the round before, a chunk further on
            self._left = [part for part in self._left if part[2] > begin]
            self.ranks = [peer for peer, _, _ in self._left]
            self.words = [self._direction.words[rank] for rank in self.ranks]
            self.counted = [self._direction.counted[rank] for rank in self.ranks]
            self.slots = [self._direction.slots[rank] for rank in self.ranks]
            self.word_lengths = [_WORD] * len(self.ranks)
            self.lengths = [min(self._chunk, length - begin) for _, _, length in self._left]  # at least 1
            shortest = min((length for _, _, length in self._left), default=0)
            self._alike_until = max(begin + self._chunk, shortest // self._chunk * self._chunk)
        pointer = self._pointer
        self.places = [pointer(address + begin) for _, address, _ in self._left]


class Link:
    """Copies chunks in rounds of at most one to and one from every peer. Tested on one GPU, not between GPUs.

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
        sending, receiving: what belongs to each direction.
    """

    def __init__(self, driver: CudaDriver, buffer: SymmetricBuffer, ranks: list[int], start: int = 0) -> None:
        self.driver, self.buffer, self.ranks = driver, buffer, ranks
        here, size, pointer = buffer.rank, len(ranks), driver.pointer
        self.peers = [(here + shift) % size for shift in range(1, size)]
        self.sent, self.received = [start] * size, [start] * size

        def slots(at: int, source: int) -> list[Any]:
            return [pointer(buffer.slot(at, source, number).data_ptr()) for number in range(2)]

        self.sending = Direction(
            driver.create_stream(),
            self.sent,
            -1,  # of two slots one may be in use
            {peer: driver.word(buffer.consumed(here, peer).data_ptr()) for peer in self.peers},
            {peer: pointer(buffer.arrived(peer, here).data_ptr()) for peer in self.peers},
            {peer: slots(peer, here) for peer in self.peers},
        )
        self.receiving = Direction(
            driver.create_stream(),
            self.received,
            1,
            {peer: driver.word(buffer.arrived(here, peer).data_ptr()) for peer in self.peers},
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
        self._words: Any = (c_uint32 * length).from_address(self._pinned.data_ptr())  # written much faster than a tensor
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
        for direction in (self.sending, self.receiving):
            self.driver.wait_event(direction.stream, event)

    def enqueue_round(self, sends: PeerChunks, own: tuple[Any, Any, int] | None, receives: PeerChunks, is_last: bool) -> None:
        """Enqueue a round, where :attr:`is_full` is not set; ``is_last`` says whether it ends a transfer.

        ``own`` are pointers to where this rank's own chunk comes from and goes to, and its bytes.
        """
        place = self._rounds % _AHEAD
        self._rounds += 1
        first, size, copy = 2 * len(self.ranks) * place, len(self.ranks), self.driver.copy
        slots = self._wait(self.sending, sends, first)
        copy(self.sending.stream, slots, sends.places, sends.lengths)
        self._count(self.sending, sends, first)
        if own is not None:  # before the wait, because no other rank has part in it
            copy(self.receiving.stream, [own[1]], [own[0]], [own[2]])
        slots = self._wait(self.receiving, receives, first + size)
        copy(self.receiving.stream, receives.places, slots, receives.lengths)
        self._count(self.receiving, receives, first + size)
        if is_last and self.peers:  # behind the copies: a peer that gives up signals that before it spoils the slots
            copy(self.receiving.stream, [self._sources[-1]], [self._failed], [_WORD])
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
        """Signal to the peers that this rank gives up; no round may be enqueued any more."""
        failed = [self.driver.pointer(self.buffer.failed(peer).data_ptr()) for peer in self.peers]
        self.driver.copy(self._urgent, failed, [self._sources[-2]] * len(failed), [_WORD] * len(failed))

    def release_streams(self) -> Any:
        """Write the counts that the streams wait for, and return the event of it.

        Again and again, because a peer that comes late writes lower ones.
        """
        buffer, first = self.buffer, 2 * len(self.ranks) * _AHEAD
        for word, counts in ((buffer.consumed, self.sent), (buffer.arrived, self.received)):
            targets = [self.driver.pointer(word(buffer.rank, peer).data_ptr()) for peer in self.peers]
            self._words[first : first + len(targets)] = [counts[peer] for peer in self.peers]  # as at the first time
            self.driver.copy(self._urgent, targets, self._sources[first : first + len(targets)], [_WORD] * len(targets))
            first += len(self.ranks)
        return self._urgent.record_event()

    def _wait(self, direction: Direction, peers: PeerChunks, first: int) -> list[Any]:
        """Hold the stream until the next slots may be used, and return them; put their counts into words from ``first`` on."""
        counts, lead = direction.counts, direction.lead
        numbers = [counts[rank] for rank in peers.ranks]
        after = [number + 1 for number in numbers]
        for rank, number in zip(peers.ranks, after):
            counts[rank] = number  # before the calls, for what is released must not be below what is awaited
        self._words[first : first + len(after)] = after
        self.driver.wait_words(direction.stream, peers.words, [number + lead for number in numbers])
        return [slots[number & 1] for slots, number in zip(peers.slots, numbers)]

    def _count(self, direction: Direction, peers: PeerChunks, first: int) -> None:
        """Count the copied chunks at the peers, in a call of its own, because copies of one call have no order."""
        words = self._sources[first : first + len(peers.ranks)]
        self.driver.copy(direction.stream, peers.counted, words, peers.word_lengths)

    def _mark_end(self, *events: Any) -> tuple[Any, Any]:
        sending, receiving = events
        ends = self.sending.stream.record_event(sending), self.receiving.stream.record_event(receiving)
        self._in_flight.append(ends)
        return ends
