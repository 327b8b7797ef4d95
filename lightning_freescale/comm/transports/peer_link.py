"""The memory and the copies between the GPUs of one NVLink domain. Streams and counts persist from transfer to transfer."""

from __future__ import annotations

from collections import deque
from ctypes import c_uint32
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transports.cuda_driver import CudaDriver, align

PEER_BYTES = 256 * 1024 * 1024
"""The memory for chunks that ``"peer"``, ``"two-level"`` and ``"nccl-zero-cta"`` use on every GPU for each lane. A rank sends
half of it in one round, after which the lane may pause."""
_ALIGN = 256
"""The alignment that suits copy engines, in bytes."""
_AHEAD = 4
"""The number of rounds in flight. It is small, because the rounds in flight must be drained if a rank is late or has ended."""
_WORD = 4
"""The size of a word in bytes. A copy engine writes an aligned word at once."""
_group_numbers = count()


@dataclass
class SymmetricBuffer:
    """The buffers of all ranks of an NVLink domain, which are equal in size and mapped in this process.

    Ranks are those of the domain. A buffer contains:

    - a signal pad of ``2 * size + 1`` words of 32 bits: for each rank the number of chunks that have arrived from it; for each
      rank the number of chunks sent to it that it has consumed; 1 if a peer has given up;
    - two slots of a chunk for every other rank.

    The counts are never reset between transfers.
    """

    rank: int
    buffers: list[Tensor]  # one per rank, uint8 of shape [SymmetricBuffer.size_bytes(...)]
    chunk: int  # bytes of a slot
    mapping: Any = None  # keeps the peers' buffers mapped

    @staticmethod
    def size_bytes(size: int, chunk: int) -> int:
        return align(4 * (2 * size + 1), _ALIGN) + 2 * (size - 1) * align(chunk, _ALIGN)

    @staticmethod
    def largest_chunk(size: int, slot_bytes: int = PEER_BYTES) -> int:
        """Return the chunk size, a multiple of 256 bytes, at which the slots for ``size`` ranks take ``slot_bytes``."""
        return max(slot_bytes // (2 * max(size - 1, 1)) // _ALIGN, 1) * _ALIGN

    @property
    def size(self) -> int:
        return len(self.buffers)

    def signal_pad(self, at: int) -> Tensor:
        """Return all words in the buffer of rank ``at``, int32."""
        return self.buffers[at][: 4 * (2 * self.size + 1)].view(torch.int32)

    def arrived(self, at: int, source: int) -> Tensor:
        """Return the word at ``at`` in which ``source`` counts the chunks that it has written there."""
        return self.signal_pad(at)[source : source + 1]

    def consumed(self, at: int, target: int) -> Tensor:
        """Return the word at ``at`` in which ``target`` counts the chunks of ``at`` that it has read."""
        return self.signal_pad(at)[self.size + target : self.size + target + 1]

    def failed(self, at: int) -> Tensor:
        return self.signal_pad(at)[2 * self.size :]

    def slot(self, at: int, source: int, number: int) -> Tensor:
        """Return the bytes at ``at`` for chunk ``number`` of ``source``, which is another rank."""
        place = (source - at - 1) % self.size
        begin = align(4 * (2 * self.size + 1), _ALIGN) + (2 * place + number % 2) * align(self.chunk, _ALIGN)
        return self.buffers[at][begin : begin + self.chunk]


def allocate_symmetric_buffer(rank: int, size: int, chunk: int, device: torch.device, store: dist.Store) -> SymmetricBuffer:
    """Allocate and map the buffers of ``size`` ranks with slots of ``chunk`` bytes. Collective.

    Only these ranks use the store. Tested between two processes on one GPU, not between GPUs.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

    length = SymmetricBuffer.size_bytes(size, chunk)
    if size == 1:
        return SymmetricBuffer(0, [torch.zeros(length, dtype=torch.uint8, device=device)], chunk)
    backend = _SymmetricMemory.get_backend(device)
    if backend != "CUDA":
        raise RuntimeError(
            f"symmetric memory has backend {backend!r}: call torch's symm_mem.set_backend('CUDA'), or remove the call"
        )
    # torch's symmetric memory finds the ranks by the name of a group. Depending on its version, it searches the process groups
    # or a separate table. A plain group without backends is therefore registered in both.
    name, group = f"freescale-{next(_group_numbers)}", dist.ProcessGroup(store, rank, size)
    _register_process_group(name, group)  # type: ignore[arg-type]
    try:
        _SymmetricMemory.set_group_info(name, rank, size, store)
        mine = _SymmetricMemory.empty_strided_p2p((length,), (1,), torch.uint8, device, name)
        mine.zero_()
        torch.cuda.synchronize(device)  # no peer writes before the rendezvous, which comes after this on every rank
        handle = _SymmetricMemory.rendezvous(mine, name)
        buffers = [mine if at == rank else handle.get_buffer(at, (length,), torch.uint8) for at in range(size)]
        return SymmetricBuffer(rank, buffers, chunk, handle)
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]


@dataclass
class Direction:
    """The state of the chunks that this rank sends, or of those that it receives. Dicts are by peer."""

    stream: Any  # of the copies
    counts: list[int]  # chunks so far, for every peer
    lead: int  # a chunk may be copied once the peer has counted this many chunks more than precede the chunk
    words: dict[int, Any]  # this rank's word in which the peer counts
    counted: dict[int, Any]  # a pointer to the peer's word in which this rank counts
    slots: dict[int, list[Any]]  # pointers to the slots of even and of odd chunks


class PeerChunks:
    """The addresses of the chunks of a round in one direction, for the peers that have chunks left.

    Addresses replace tensors, because slices are too expensive. The values of the peers are looked up once for many rounds.
    """

    def __init__(self, link: Link, direction: Direction, parts: list[Tensor]) -> None:
        self._direction, self._chunk, self._pointer = direction, link.buffer.chunk, link.driver.pointer
        of_peers = ((peer, parts[link.ranks[peer]]) for peer in link.peers)
        self._left = [(peer, part.data_ptr(), len(part)) for peer, part in of_peers]
        self._alike_until = 0
        self.largest = max((length for *_, length in self._left), default=0)

    def advance_to(self, begin: int) -> None:
        """Move to the chunks that start at byte ``begin`` of each part, where ``begin`` increases from call to call."""
        if begin >= self._alike_until:  # the peers or the lengths differ from those of the previous round
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
    """The link of a GPU to the other GPUs of its NVLink domain. Tested on one GPU, not between GPUs.

    It copies chunks in rounds of at most one chunk to and one from every peer. In each direction, a round takes one call for
    all waits, one for all chunks and one for all counts. Counts are 4-byte copies from pinned memory, as NCCL's flags are
    since 2.29.2. A copy reads its source when the stream reaches it. Every round in flight therefore has separate words, which
    are reused once the round has ended.

    The receives of a round wait for its sends, and its sends for the receives two rounds earlier. Uneven parts therefore cannot
    cause a deadlock. The calls have the same order, so this also holds if the GPU runs both streams as one.

    The arguments are those of :class:`.PeerTransport`. All words in the buffer begin with ``start``, as the counters.
    """

    def __init__(self, driver: CudaDriver, buffer: SymmetricBuffer, ranks: list[int], start: int = 0) -> None:
        self.driver, self.buffer, self.ranks = driver, buffer, ranks
        here, size, pointer = buffer.rank, len(ranks), driver.pointer
        self.peers = [(here + shift) % size for shift in range(1, size)]  # not all write to the same rank at once
        self.sent, self.received = [start] * size, [start] * size  # chunks so far to and from every peer

        def slots(at: int, source: int) -> list[Any]:
            return [pointer(buffer.slot(at, source, number).data_ptr()) for number in range(2)]

        self.sending = Direction(
            driver.create_stream(),
            self.sent,
            -1,  # one of two slots may be in use
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
        # For each round in flight, a word per peer and direction. Blocked rounds do not use the words after them: those that
        # release the streams, a 1, and a copy of the word that is 1 if a peer has given up.
        length = 2 * size * (_AHEAD + 1) + 2
        self._pinned, self.signals = driver.allocate_pinned(length), driver.allocate_pinned(len(buffer.signal_pad(here)))
        self._words: Any = (c_uint32 * length).from_address(self._pinned.data_ptr())  # faster to write than a tensor
        self._sources = [pointer(self._pinned.data_ptr() + _WORD * place) for place in range(length)]
        self._words[-2:] = [1, 0]
        self._failed = pointer(buffer.failed(here).data_ptr())

    @property
    def is_full(self) -> bool:
        return len(self._in_flight) >= _AHEAD

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    @property
    def has_seen_failure(self) -> bool:
        """Whether a peer had given up before the last transfer had copied all arrived chunks."""
        return bool(self._words[-1])

    def wait_event(self, event: Any) -> None:
        for direction in (self.sending, self.receiving):
            self.driver.wait_event(direction.stream, event)

    def enqueue_round(self, sends: PeerChunks, own: tuple[Any, Any, int] | None, receives: PeerChunks, is_last: bool) -> None:
        """Enqueue a round; :attr:`is_full` must be False. ``is_last`` marks the last round of a transfer.

        ``own`` contains pointers to the source and the target of this rank's own chunk, and its length.
        """
        place = self._rounds % _AHEAD
        self._rounds += 1
        first, size, copy = 2 * len(self.ranks) * place, len(self.ranks), self.driver.copy
        slots = self._wait(self.sending, sends, first)
        copy(self.sending.stream, slots, sends.places, sends.lengths)
        self._count(self.sending, sends, first)
        if own is not None:  # before the wait, because it involves no other rank
            copy(self.receiving.stream, [own[1]], [own[0]], [own[2]])
        slots = self._wait(self.receiving, receives, first + size)
        copy(self.receiving.stream, receives.places, slots, receives.lengths)
        self._count(self.receiving, receives, first + size)
        if is_last and self.peers:  # after the copies: a peer that gives up signals it before it overwrites slots
            copy(self.receiving.stream, [self._sources[-1]], [self._failed], [_WORD])
        self._events[place] = self.mark_end(*self._events[place])

    def forget_ended(self) -> bool:
        """Forget the rounds that have ended, and return whether there were any."""
        before = len(self._in_flight)
        while self._in_flight and all(event.query() for event in self._in_flight[0]):
            self._in_flight.popleft()
        return len(self._in_flight) < before

    def copy_signals(self) -> Any:
        """Enqueue a copy of this rank's signal pad to ``signals`` in host memory, and return the event of its end."""
        pad, pointer = self.buffer.signal_pad(self.buffer.rank), self.driver.pointer
        self.driver.copy(self._urgent, [pointer(self.signals.data_ptr())], [pointer(pad.data_ptr())], [_WORD * len(pad)])
        return self._urgent.record_event()

    def signal_failure(self) -> None:
        """Signal to the peers that this rank gives up. No round may be enqueued afterwards."""
        failed = [self.driver.pointer(self.buffer.failed(peer).data_ptr()) for peer in self.peers]
        self.driver.copy(self._urgent, failed, [self._sources[-2]] * len(failed), [_WORD] * len(failed))

    def release_streams(self) -> Any:
        """Write the counts for which the streams wait, and return the event of the writes.

        Repeat this until the streams have ended, because a late peer writes lower counts.
        """
        buffer, first = self.buffer, 2 * len(self.ranks) * _AHEAD
        for word, counts in ((buffer.consumed, self.sent), (buffer.arrived, self.received)):
            targets = [self.driver.pointer(word(buffer.rank, peer).data_ptr()) for peer in self.peers]
            self._words[first : first + len(targets)] = [counts[peer] for peer in self.peers]
            self.driver.copy(self._urgent, targets, self._sources[first : first + len(targets)], [_WORD] * len(targets))
            first += len(self.ranks)
        return self._urgent.record_event()

    def _wait(self, direction: Direction, peers: PeerChunks, first: int) -> list[Any]:
        """Make the stream wait for the next slots, put their counts into the words from ``first`` on, and return the slots."""
        counts, lead = direction.counts, direction.lead
        numbers = [counts[rank] for rank in peers.ranks]
        after = [number + 1 for number in numbers]
        for rank, number in zip(peers.ranks, after):
            counts[rank] = number  # before the calls: release_streams must write no less than the awaited counts
        self._words[first : first + len(after)] = after
        self.driver.wait_words(direction.stream, peers.words, [number + lead for number in numbers])
        return [slots[number & 1] for slots, number in zip(peers.slots, numbers)]

    def _count(self, direction: Direction, peers: PeerChunks, first: int) -> None:
        """Count the copied chunks at the peers, in a separate call, because copies of one call are unordered."""
        words = self._sources[first : first + len(peers.ranks)]
        self.driver.copy(direction.stream, peers.counted, words, peers.word_lengths)

    def mark_end(self, sending: Any = None, receiving: Any = None) -> tuple[Any, Any]:
        """Count a round as in flight until both streams have reached this point, and return the events."""
        ends = self.sending.stream.record_event(sending), self.receiving.stream.record_event(receiving)
        self._in_flight.append(ends)
        return ends
