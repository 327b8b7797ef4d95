"""A CUDA device as the transports use it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.comm.transports.gpu.driver import WRAP, Event
from lightning_freescale.comm.transports.station import cuda_bindings


class CudaDriver:
    """The device of this process, by cuda-bindings. Not tested on GPU.

    Streams are made here, because torch hands out the same 32 streams again and again, and one that waits for a word would
    hold up whoever shares it. Copies go through ``cuMemcpyBatchAsync``, whose flag asks for a copy engine also within a
    device, where a plain copy may be a kernel; without it (CUDA driver or cuda-bindings below 12.8) a warning says so once.

    Args:
        device: a CUDA device with an index.
        cuda: the module ``cuda.bindings.driver``.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self.device = device
        self._cuda = cuda or cuda_bindings()
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device.index))
        self._handles: list[Any] = []
        self._batch = self._batch_attributes()
        if self._batch is None:
            warnings.warn(
                "copies within a GPU may occupy streaming multiprocessors: for copy engines, update the CUDA driver and "
                "cuda-bindings to 12.8",
                stacklevel=2,
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the device and its context current."""
        with torch.cuda.device(self.device):
            self._call("cuCtxSetCurrent", self._context)  # torch makes a device current lazily, the driver does not
            yield

    def stream(self, urgent: bool = False) -> Any:
        """A new stream."""
        priorities = self._call("cuCtxGetStreamPriorityRange")
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = self._call("cuStreamCreateWithPriority", flags, priorities[1 if urgent else 0])
        self._handles.append(handle)
        return torch.cuda.ExternalStream(int(handle), device=self.device)

    def after(self, stream: Any, issued: Any) -> None:
        """Order a stream after an event."""
        if issued is not None:
            stream.wait_event(issued)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Copy bytes."""
        if self._batch is None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            return
        pointer, length = self._cuda.CUdeviceptr, source.numel() * source.element_size()
        ends = [pointer(target.data_ptr())], [pointer(source.data_ptr())]
        self._call("cuMemcpyBatchAsync", *ends, [length], 1, [self._batch], [0], 1, self._handle(stream))

    def write(self, stream: Any, word: Tensor, value: int) -> None:
        """Store a word; the default flag fences what was written before."""
        flag = self._cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        self._call("cuStreamWriteValue32", self._handle(stream), word.data_ptr(), value % WRAP, int(flag))

    def wait(self, stream: Any, word: Tensor, value: int) -> None:
        """Wait for a word."""
        flag = self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call("cuStreamWaitValue32", self._handle(stream), word.data_ptr(), value % WRAP, int(flag))

    def event(self, stream: Any) -> Event:
        """Record an event."""
        return stream.record_event()

    def pinned(self, length: int) -> Tensor:
        """Page-locked memory."""
        return torch.empty(length, dtype=torch.int32, pin_memory=True)

    def close(self) -> None:
        """Destroy the streams; CUDA lets what is on them finish."""
        while self._handles:
            self._call("cuStreamDestroy", self._handles.pop())

    def _handle(self, stream: Any) -> Any:
        return self._cuda.CUstream(stream.cuda_stream)

    def _batch_attributes(self) -> Any:
        """What asks for a copy engine; None if it cannot be asked for."""
        if not hasattr(self._cuda, "cuMemcpyBatchAsync") or self._call("cuDriverGetVersion") < 12080:
            return None
        attributes = self._cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = self._cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes.flags = int(self._cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        return attributes

    def _call(self, name: str, *args: Any) -> Any:
        """Of the driver's results the ones after the error code: none, one, or a tuple."""
        error, *results = getattr(self._cuda, name)(*args)
        if int(error) != 0:
            raise RuntimeError(f"{name} failed on {self.device}: {error.name}")
        return results[0] if len(results) == 1 else tuple(results)
