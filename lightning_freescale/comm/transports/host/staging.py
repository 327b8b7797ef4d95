"""How chunks come from the device to host memory and back."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass
class HostCopy:
    """A chunk on its way to the host, in ``memory`` at least as long, uint8; there at once without ``event``."""

    memory: Tensor
    length: int
    event: Any = None

    @property
    def is_ready(self) -> bool:
        """Return whether the chunk is there."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> Tensor:
        """Return the chunk on the host, once it is there."""
        if self.event is not None:
            self.event.synchronize()
        return self.memory[: self.length]


class HostStaging:
    """For tensors that are on the host: nothing is copied but a rank's own part."""

    def wait_event(self, issued: Any) -> None:
        """Return at once: the caller's writes are done."""

    def copy_to_host(self, chunk: Tensor) -> HostCopy:
        """Return the chunk itself, which is there."""
        return HostCopy(chunk, len(chunk))

    def release(self, copy: HostCopy) -> None:
        """Keep the memory, which is the caller's."""

    def allocate(self, chunk: Tensor) -> Tensor:
        """Return the chunk itself, to be received in."""
        return chunk

    def copy_to_device(self, arrived: Tensor, chunk: Tensor) -> None:
        """Leave what has arrived, which is in its place."""

    def copy_local(self, source: Tensor, target: Tensor) -> None:
        """Copy a chunk to another place."""
        target.copy_(source)

    def synchronize(self) -> None:
        """Return at once: all is in its place."""


Allocate = Callable[[int], Tensor]
"""Makes host memory of so many bytes."""
_allocate_pinned = partial(torch.empty, dtype=torch.uint8, pin_memory=True)


class DeviceStaging:
    """For tensors on a GPU: copy engines move them to and from pinned memory, each direction on a stream of its own.

    All copies are of contiguous bytes between device and pinned memory, which the driver gives to a copy engine: no kernel is
    launched.

    Not tested on ROCm, whose streams and events have the same names in torch. ``api`` has them as ``torch.cuda``,
    ``pinned_bytes`` is the bound of the pinned memory, half of it for each direction.
    """

    def __init__(
        self, device: torch.device, pinned_bytes: int, api: Any = torch.cuda, allocate: Allocate = _allocate_pinned
    ) -> None:
        self._api = api
        self._outgoing, self._incoming = (PinnedPool(pinned_bytes // 2, allocate) for _ in range(2))
        self._to_host_stream, self._to_device_stream = api.Stream(device), api.Stream(device)
        self._to_device: deque[tuple[Any, Tensor, PinnedPool]] = deque()

    def wait_event(self, issued: Any) -> None:
        """Order both streams after an event of the caller's stream."""
        self._to_host_stream.wait_event(issued)
        self._to_device_stream.wait_event(issued)

    def copy_to_host(self, chunk: Tensor) -> HostCopy:
        """Begin to copy a chunk to pinned memory."""
        memory = self._acquire(self._outgoing, len(chunk))
        with self._api.stream(self._to_host_stream):
            memory[: len(chunk)].copy_(chunk, non_blocking=True)
            return HostCopy(memory, len(chunk), self._to_host_stream.record_event())

    def release(self, copy: HostCopy) -> None:
        """Give the memory of a chunk that was sent back."""
        self._outgoing.release(copy.memory)

    def allocate(self, chunk: Tensor) -> Tensor:
        """Return pinned memory that a chunk can be received in."""
        return self._acquire(self._incoming, len(chunk))

    def copy_to_device(self, arrived: Tensor, chunk: Tensor) -> None:
        """Begin to copy what was received in :meth:`allocate`'s memory to its place."""
        self._begin_to_device(arrived, chunk, self._incoming)

    def copy_local(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy a chunk to another place on the device, by way of the host: within a device a copy may be a kernel."""
        copy = self.copy_to_host(source)
        copy.wait()
        self._begin_to_device(copy.memory, target, self._outgoing)

    def synchronize(self) -> None:
        """Wait until all that was copied to the device is there."""
        while self._to_device:
            self._reclaim()

    def close(self) -> None:
        """Wait for all copies, also those of a transfer that has failed."""
        self._to_host_stream.synchronize()
        self._to_device_stream.synchronize()

    def _begin_to_device(self, memory: Tensor, chunk: Tensor, pool: PinnedPool) -> None:
        with self._api.stream(self._to_device_stream):
            chunk.copy_(memory[: len(chunk)], non_blocking=True)
            self._to_device.append((self._to_device_stream.record_event(), memory, pool))

    def _acquire(self, pool: PinnedPool, length: int) -> Tensor:
        """Return pinned memory; waits for chunks on their way to the device where the bound asks for it."""
        while (memory := pool.acquire(length)) is None:
            self._reclaim()
        return memory

    def _reclaim(self) -> None:
        event, memory, pool = self._to_device.popleft()
        event.synchronize()
        pool.release(memory)


Staging = HostStaging | DeviceStaging


class PinnedPool:
    """Page-locked buffers, kept for reuse because pinning is slow; ``held`` bytes, never more than ``bound``.

    Their sizes are powers of two, and ``in_use`` bytes are out of the pool. Used by one thread at a time.
    """

    def __init__(self, bound: int, allocate: Allocate) -> None:
        self.bound = bound
        self.held = 0
        self.in_use = 0
        self._allocate = allocate
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def acquire(self, length: int) -> Tensor | None:
        """Return a buffer of at least ``length`` bytes; None if others must be released first."""
        size = 1 << max(0, length - 1).bit_length()
        if not self._free[size]:
            for other in sorted(self._free, reverse=True):  # the largest go first
                while self._free[other] and self.held + size > self.bound:
                    self._free[other].pop()
                    self.held -= other
            if self.held + size > self.bound:
                return None
            self._free[size].append(self._allocate(size))
            self.held += size
        self.in_use += size
        return self._free[size].pop()

    def release(self, buffer: Tensor) -> None:
        """Keep a buffer for the next that needs its size."""
        self.in_use -= len(buffer)
        self._free[len(buffer)].append(buffer)
