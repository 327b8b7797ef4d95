"""How chunks come from the device to host memory and back."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_freescale.comm.transports.host.pinned_pool import PinnedPool


class Staging(Protocol):
    """Host memory for the chunks of a transfer."""

    def begin(self, issued: Any) -> None:
        """Nothing is to be touched before ``issued``, an event of the caller's stream."""

    def lift(self, chunk: Tensor) -> Lifted:
        """Begin to copy a chunk to the host."""

    def drop(self, lifted: Lifted) -> None:
        """A lifted chunk has been sent."""

    def room(self, chunk: Tensor) -> Tensor:
        """Host memory that a chunk can be received in."""

    def lower(self, arrived: Tensor, chunk: Tensor) -> None:
        """Begin to copy what came into :meth:`room` to its place."""

    def bounce(self, lifted: Lifted, chunk: Tensor) -> None:
        """Begin to copy a lifted chunk to another place on the same device."""

    def finish(self) -> None:
        """Wait until all is in its place."""

    def close(self) -> None:
        """Wait for all copies, also those of a transfer that has failed."""


class Lifted:
    """A chunk on its way to the host."""

    def __init__(self, memory: Tensor, length: int, event: Any = None) -> None:
        self.memory, self._length, self._event = memory, length, event

    @property
    def is_ready(self) -> bool:
        """Whether the chunk is there."""
        return self._event is None or bool(self._event.query())

    def ready(self) -> Tensor:
        """The chunk on the host, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self.memory[: self._length]


class HostStaging:
    """For tensors that are on the host: nothing is copied but a rank's own part."""

    def begin(self, issued: Any) -> None:
        """Nothing to wait for."""

    def lift(self, chunk: Tensor) -> Lifted:
        """The chunk itself."""
        return Lifted(chunk, len(chunk))

    def drop(self, lifted: Lifted) -> None:
        """Nothing to give back."""

    def room(self, chunk: Tensor) -> Tensor:
        """The chunk itself."""
        return chunk

    def lower(self, arrived: Tensor, chunk: Tensor) -> None:
        """It is in its place."""

    def bounce(self, lifted: Lifted, chunk: Tensor) -> None:
        """Copy it, unless it is given and taken in the same memory."""
        if lifted.memory.data_ptr() != chunk.data_ptr():
            chunk.copy_(lifted.memory)

    def finish(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to wait for."""


class DeviceStaging:
    """For tensors on a GPU: copy engines move them to and from pinned memory, each direction on a stream of its own.

    All copies are of contiguous bytes between device and pinned memory, which the driver gives to a copy engine: no kernel is
    launched. A rank's own part takes the same way, because a copy within a device may be a kernel.

    Not tested on GPU, nor on ROCm, whose streams and events have the same names in torch.

    Args:
        device: of the tensors.
        pinned_bytes: bound of the pinned memory, half of it for each direction.
        api: streams and events as in ``torch.cuda``.
        allocate: makes pinned memory; ``torch.empty(..., pin_memory=True)`` by default.
    """

    def __init__(self, device: torch.device, pinned_bytes: int, api: Any = torch.cuda, **allocate: Any) -> None:
        self._api, self._device = api, device
        self._outgoing, self._incoming = (PinnedPool(pinned_bytes // 2, **allocate) for _ in range(2))
        self._down, self._up = api.Stream(device), api.Stream(device)
        self._lowering: deque[tuple[Any, Tensor, PinnedPool]] = deque()

    @property
    def pinned_in_use(self) -> int:
        """Bytes of pinned memory that a chunk is in."""
        return self._outgoing.in_use + self._incoming.in_use

    def begin(self, issued: Any) -> None:
        """Order both streams after an event of the caller's stream."""
        self._down.wait_event(issued)
        self._up.wait_event(issued)

    def lift(self, chunk: Tensor) -> Lifted:
        """Begin to copy a chunk to pinned memory."""
        memory = self._take(self._outgoing, len(chunk))
        with self._api.stream(self._down):
            memory[: len(chunk)].copy_(chunk, non_blocking=True)
            return Lifted(memory, len(chunk), self._down.record_event())

    def drop(self, lifted: Lifted) -> None:
        """Give the memory of a chunk that was sent back."""
        self._outgoing.give(lifted.memory)

    def room(self, chunk: Tensor) -> Tensor:
        """Pinned memory that a chunk can be received in."""
        return self._take(self._incoming, len(chunk))

    def lower(self, arrived: Tensor, chunk: Tensor) -> None:
        """Begin to copy a chunk to the device."""
        self._copy_up(arrived, chunk, self._incoming)

    def bounce(self, lifted: Lifted, chunk: Tensor) -> None:
        """Begin to copy a lifted chunk to the device."""
        lifted.ready()
        self._copy_up(lifted.memory, chunk, self._outgoing)

    def finish(self) -> None:
        """Wait until all that was lowered is on the device."""
        while self._lowering:
            self._reclaim()

    def close(self) -> None:
        """Wait for all copies, also those of a transfer that has failed."""
        self._down.synchronize()
        self._up.synchronize()

    def _copy_up(self, memory: Tensor, chunk: Tensor, pool: PinnedPool) -> None:
        with self._api.stream(self._up):
            chunk.copy_(memory[: len(chunk)], non_blocking=True)
            self._lowering.append((self._up.record_event(), memory, pool))

    def _take(self, pool: PinnedPool, length: int) -> Tensor:
        """Pinned memory; waits for chunks on their way to the device where the bound asks for it."""
        memory = pool.take(length)
        while memory is None:
            self._reclaim()
            memory = pool.take(length)
        return memory

    def _reclaim(self) -> None:
        event, memory, pool = self._lowering.popleft()
        event.synchronize()
        pool.give(memory)
