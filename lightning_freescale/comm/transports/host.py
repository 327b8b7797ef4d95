"""The transport through host memory and the network card. The CPU drives it, and it launches no kernel.

This is FreeScale's SM-free communication (arXiv 2604.24073). It has three stages, which work on different chunks at the same
time: device to pinned memory, network, pinned memory to device. CPU tensors use the second stage only. Chunks go directly to
their rank instead of around a ring; each rank sends the same number of bytes either way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.options import MAX_CHUNK_BYTES, ProcessGroupFreeScaleOptions
from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.transports.priority import PRIORITY_GATE
from lightning_freescale.comm.transports.transport import Transfer


@dataclass
class HostCopy:
    """A copy of a chunk from a GPU to host memory that may be under way."""

    memory: Tensor  # uint8, at least as long as the chunk
    length: int
    event: Any

    @property
    def is_ready(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> Tensor:
        self.event.synchronize()
        return self.memory[: self.length]


Allocate = Callable[[int], Tensor]
"""A function that allocates host memory of the given number of bytes."""
_allocate_pinned = partial(torch.empty, dtype=torch.uint8, pin_memory=True)


class DeviceStaging:
    """The pinned memory and the streams for tensors on a GPU, one stream per direction.

    All copies are of contiguous bytes between device and pinned memory. The driver gives such copies to a copy engine and
    launches no kernel. Not tested on ROCm, whose streams and events have the same names in torch.

    ``pinned_bytes`` limits the pinned memory, half of it for each direction, in buffers for a chunk of at most ``chunk_bytes``.
    ``api`` has the streams of ``torch.cuda``.
    """

    def __init__(
        self,
        device: torch.device,
        chunk_bytes: int,
        pinned_bytes: int,
        api: Any = torch.cuda,
        allocate: Allocate = _allocate_pinned,
    ) -> None:
        self._api = api
        most = pinned_bytes // (2 * chunk_bytes)
        self._outgoing, self._incoming = (PinnedPool(chunk_bytes, most, allocate) for _ in range(2))
        self._to_host_stream, self._to_device_stream = api.Stream(device), api.Stream(device)
        self._to_device: deque[tuple[Any, Tensor, PinnedPool]] = deque()

    def wait_event(self, issued: Any) -> None:
        self._to_host_stream.wait_event(issued)
        self._to_device_stream.wait_event(issued)

    def copy_to_host(self, chunk: Tensor) -> HostCopy:
        memory = self._acquire(self._outgoing)
        with self._api.stream(self._to_host_stream):
            memory[: len(chunk)].copy_(chunk, non_blocking=True)
            return HostCopy(memory, len(chunk), self._to_host_stream.record_event())

    def release(self, copy: HostCopy) -> None:
        """Return the memory of a sent chunk to the pool."""
        self._outgoing.free.append(copy.memory)

    def allocate(self) -> Tensor:
        return self._acquire(self._incoming)

    def copy_local(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy a chunk within the device through the host, because a copy within a device may be a kernel."""
        copy = self.copy_to_host(source)
        copy.wait()
        self.copy_to_device(copy.memory, target, self._outgoing)

    def synchronize(self) -> None:
        while self._to_device:
            self._reclaim()

    def close(self) -> None:
        """Wait for all copies, including those of a failed transfer."""
        self._to_host_stream.synchronize()
        self._to_device_stream.synchronize()

    def copy_to_device(self, memory: Tensor, chunk: Tensor, pool: PinnedPool | None = None) -> None:
        """Begin to copy from the memory of :meth:`allocate`, or of another pool, to the device."""
        with self._api.stream(self._to_device_stream):
            chunk.copy_(memory[: len(chunk)], non_blocking=True)
            self._to_device.append((self._to_device_stream.record_event(), memory, pool or self._incoming))

    def _acquire(self, pool: PinnedPool) -> Tensor:
        while (memory := pool.acquire()) is None:
            self._reclaim()
        return memory

    def _reclaim(self) -> None:
        event, memory, pool = self._to_device.popleft()
        event.synchronize()
        pool.free.append(memory)


class PinnedPool:
    """At most ``most`` page-locked buffers of one size, kept for reuse because pinning is slow. Not thread-safe."""

    def __init__(self, size: int, most: int, allocate: Allocate) -> None:
        self.made = 0  # number of buffers
        self.free: list[Tensor] = []
        self._size, self._most, self._allocate = size, most, allocate

    def acquire(self) -> Tensor | None:
        """Return a buffer, or None if another one must be released first."""
        if self.free:
            return self.free.pop()
        if self.made == self._most:
            return None
        self.made += 1
        return self._allocate(self._size)


MIN_PINNED_CHUNKS = 8
"""The number of chunks that the pinned memory must hold: two in flight and two more to arrive, in each of two directions."""
PINNED_BYTES = MIN_PINNED_CHUNKS * MAX_CHUNK_BYTES
"""The maximum host memory that a lane pins for CUDA tensors."""
_TAGGED_BYTES = 2**20
"""The chunk size up to which every size has its own tag."""


class HostTransport:
    """A :class:`.Transport` for CPU and CUDA tensors over a :class:`GlooP2P`."""

    def __init__(self, p2p: GlooP2P, options: ProcessGroupFreeScaleOptions, pinned_bytes: int = PINNED_BYTES) -> None:
        self.p2p, self.options, self.pinned_bytes = p2p, options, pinned_bytes
        self._stagings: dict[torch.device, DeviceStaging] = {}

    def start_transfer(self, transfer: Transfer, ranks: Collection[int] | None = None) -> Callable[[Callable[[], None]], None]:
        """Post the first chunks, even before the ranks have agreed, and return a function for the rest of :meth:`move`."""
        schedule = P2PSchedule(self, transfer, range(self.p2p.size) if ranks is None else ranks)
        schedule.start()
        return schedule.complete

    def move(self, transfer: Transfer, pause: Callable[[], None], ranks: Collection[int] | None = None) -> None:
        """Move a transfer as :class:`.Transport` specifies, only the parts for and from ``ranks`` if they are given."""
        self.start_transfer(transfer, ranks)(pause)

    def close(self) -> None:
        """Wait for all copies, because the caller may free its tensors afterwards, and release pinned memory and streams."""
        for staging in self._stagings.values():
            staging.close()
        self._stagings.clear()

    def staging(self, device: torch.device) -> DeviceStaging | None:
        if device.type == "cpu":
            return None
        if device not in self._stagings:
            self._stagings[device] = DeviceStaging(device, self.options.chunk_bytes, self.pinned_bytes)
        return self._stagings[device]


@dataclass
class _Round:
    """At most one chunk to a rank, and at most one from a rank."""

    target: int
    source: int
    outgoing: Tensor | None
    incoming: Tensor | None
    copy: Any = None  # the HostCopy of an outgoing chunk on a GPU
    send: dist.Work | None = None
    memory: Any = None  # the host memory in which the incoming chunk arrives
    receive: dist.Work | None = None


class P2PSchedule:
    """One transfer in rounds. In a round, every rank sends a chunk to one rank and receives one from another.

    A link carries one chunk per direction at a time, and no rank receives from many ranks at once. All ranks run the rounds in
    the same order and wait for rounds instead of chunks. A rank waits only for a round that all ranks have posted, or will post
    without waiting for a later one. Uneven parts therefore cannot cause a deadlock. Receives are posted ahead of sends.

    The number of rounds in flight is chosen so that they take a fixed time. With more of them, a rank that the system suspends
    for some milliseconds delays the others less. With fewer, a higher lane gets the link sooner, because its messages queue
    behind these in the network.
    """

    def __init__(self, host: HostTransport, transfer: Transfer, ranks: Collection[int]) -> None:
        p2p, options = host.p2p, host.options
        self._p2p, self._staging, self._transfer = p2p, host.staging(transfer.device), transfer
        self._chunk = options.chunk_bytes
        # On shaped links with 8 ranks, two rounds of 1 MiB took 1.3 times the ideal time, six took 1.06 to 1.1 times.
        self._in_flight_seconds, fewest = (0.002, 2) if PRIORITY_GATE.has_higher_lane(options.priority) else (0.02, 6)
        self._most = min(64, host.pinned_bytes // (MIN_PINNED_CHUNKS // 2 * self._chunk))
        self._fewest = min(fewest, self._most)
        self._includes_self = p2p.rank in ranks
        outgoing, incoming = (
            [self._split(part) if rank in ranks else () for rank, part in enumerate(parts)]
            for parts in (transfer.outgoing, transfer.incoming)
        )
        by_pair = [
            [_Round(target, source, *chunks) for chunks in zip_longest(outgoing[target], incoming[source])]
            for target, source in zip(p2p.peers, p2p.sources)
        ]
        self._rounds = [each for in_a_row in zip_longest(*by_pair) for each in in_a_row if each is not None]
        self._started = dict.fromkeys((self._receive, self._copy_to_host, self._send), 0)

    def start(self) -> None:
        """Post the first rounds before the ranks have agreed, if messages of different sizes have different tags."""
        if self._staging is not None:
            self._staging.wait_event(self._transfer.issued)
        if self._chunk <= _TAGGED_BYTES:
            self._look_ahead(0, self._fewest)

    def complete(self, pause: Callable[[], None]) -> None:
        start, window = time.monotonic(), self._fewest
        for number, current in enumerate(self._rounds):
            pause()
            self._look_ahead(number, window)
            self._complete_round(current)
            per_round = max((time.monotonic() - start) / (number + 1), 1e-9)
            window = min(max(self._fewest, int(self._in_flight_seconds / per_round)), self._most)
        if self._includes_self:
            self._copy_own_part()
        if self._staging is not None:
            self._staging.synchronize()

    def _look_ahead(self, number: int, window: int) -> None:
        """Start the rounds from ``number`` on: ``window`` sends, one more copy, and twice as many receives."""
        for start, last in ((self._receive, 2 * window), (self._copy_to_host, window + 1), (self._send, window)):
            while (index := self._started[start]) < min(number + last, len(self._rounds)):
                copy = self._rounds[index].copy
                if start == self._send and index > number and copy is not None and not copy.is_ready:
                    break  # receive meanwhile instead of waiting for the copy
                start(self._rounds[index])
                self._started[start] += 1

    def _receive(self, ahead: _Round) -> None:
        if ahead.incoming is not None:
            ahead.memory = ahead.incoming if self._staging is None else self._staging.allocate()
            memory, tag = ahead.memory[: len(ahead.incoming)], self._tag(ahead.incoming)
            ahead.receive = self._p2p.receive(memory, ahead.source, tag)

    def _copy_to_host(self, ahead: _Round) -> None:
        if self._staging is not None and ahead.outgoing is not None:
            ahead.copy = self._staging.copy_to_host(ahead.outgoing)

    def _send(self, ahead: _Round) -> None:
        if ahead.outgoing is not None:
            message = ahead.outgoing if ahead.copy is None else ahead.copy.wait()
            ahead.send = self._p2p.send(message, ahead.target, self._tag(ahead.outgoing))

    def _complete_round(self, current: _Round) -> None:
        if current.receive is not None and current.incoming is not None:
            self._p2p.wait(current.receive, current.source, self._transfer.timeout)
            if self._staging is not None:
                self._staging.copy_to_device(current.memory, current.incoming)
        if current.send is not None:
            self._p2p.wait(current.send, current.target, self._transfer.timeout)
            if self._staging is not None:
                self._staging.release(current.copy)
        current.receive = current.send = current.memory = current.copy = None

    def _split(self, part: Tensor) -> tuple[Tensor, ...]:
        return part.split(self._chunk) if len(part) and not self._transfer.fits_in_header(part) else ()

    def _copy_own_part(self) -> None:
        source, target = self._transfer.outgoing[self._p2p.rank], self._transfer.incoming[self._p2p.rank]
        if not len(source) or source.data_ptr() == target.data_ptr():
            return
        if self._staging is None:
            target.copy_(source)
            return
        for chunk, place in zip(source.split(self._chunk), target.split(self._chunk)):
            self._staging.copy_local(chunk, place)

    def _tag(self, chunk: Tensor) -> int:
        if self._transfer.chunk_tag is not None:
            return self._transfer.chunk_tag
        # odd, and different for each size: gloo ends the process if a message is larger than its receive
        return 2 * ((self._transfer.sequence_number & 0x3FF) << 20 | (len(chunk) - 1) % _TAGGED_BYTES) + 1
