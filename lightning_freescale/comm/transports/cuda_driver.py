"""A CUDA device as the transports use it: streams, copies by copy engines, and waits for and writes of a word in memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

WRAP = 2**32
"""Words count modulo this; a wait compares cyclically, so that counters may wrap around."""


class CudaDriver:
    """The device of this process, by cuda-bindings. Not tested on GPU.

    All methods but :meth:`active` and :meth:`allocate_pinned` only enqueue, and none launches a kernel.

    Streams are made here, because torch hands out the same 32 streams again and again, and one that waits for a word would
    hold up whoever shares it. Copies go through ``cuMemcpyBatchAsync``, whose flag asks for a copy engine also within a
    device, where a plain copy may be a kernel; without it (CUDA driver or cuda-bindings below 12.8) a warning says so once.

    Args:
        device: a CUDA device with an index.
        cuda: the module ``cuda.bindings.driver``.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self.device = device
        self._cuda = cuda or import_cuda_bindings()
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
        """Let the calling thread use the device: it and its context are current in the block."""
        with torch.cuda.device(self.device):
            self._call("cuCtxSetCurrent", self._context)  # torch makes a device current lazily, the driver does not
            yield

    def create_stream(self, urgent: bool = False) -> Any:
        """Return a stream that nobody else uses; an urgent one gets on although others are stuck."""
        priorities = self._call("cuCtxGetStreamPriorityRange")
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = self._call("cuStreamCreateWithPriority", flags, priorities[1 if urgent else 0])
        self._handles.append(handle)
        return torch.cuda.ExternalStream(int(handle), device=self.device)

    def wait_event(self, stream: Any, event: Any) -> None:
        """Let what comes next on ``stream`` wait for an event of another stream, if there is one."""
        if event is not None:
            stream.wait_event(event)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Copy contiguous bytes, within the device, to or from a peer or pinned memory."""
        if self._batch is None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            return
        pointer, length = self._cuda.CUdeviceptr, source.numel() * source.element_size()
        ends = [pointer(target.data_ptr())], [pointer(source.data_ptr())]
        self._call("cuMemcpyBatchAsync", *ends, [length], 1, [self._batch], [0], 1, self._handle(stream))

    def write_word(self, stream: Any, word: Tensor, value: int) -> None:
        """Store ``value`` in a word of 32 bits, of this device or a peer, after all that is before it on the stream."""
        flag = self._cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT  # fences what was written before
        self._call("cuStreamWriteValue32", self._handle(stream), word.data_ptr(), value % WRAP, int(flag))

    def wait_word(self, stream: Any, word: Tensor, value: int) -> None:
        """Hold the stream until a word of this device has reached ``value``: the cyclic difference is not negative."""
        flag = self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call("cuStreamWaitValue32", self._handle(stream), word.data_ptr(), value % WRAP, int(flag))

    def allocate_pinned(self, length: int) -> Tensor:
        """Return host memory for ``length`` words, int32, that copy engines can reach."""
        return torch.empty(length, dtype=torch.int32, pin_memory=True)

    def destroy_streams(self) -> None:
        """Destroy the streams; CUDA lets what is on them finish."""
        while self._handles:
            self._call("cuStreamDestroy", self._handles.pop())

    def _handle(self, stream: Any) -> Any:
        return self._cuda.CUstream(stream.cuda_stream)

    def _batch_attributes(self) -> Any:
        """Return what asks for a copy engine; None if it cannot be asked for."""
        if not hasattr(self._cuda, "cuMemcpyBatchAsync") or self._call("cuDriverGetVersion") < 12080:
            return None
        attributes = self._cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = self._cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes.flags = int(self._cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        return attributes

    def _call(self, name: str, *args: Any) -> Any:
        """Return of the driver's results the ones after the error code: none, one, or a tuple."""
        error, *results = getattr(self._cuda, name)(*args)
        if int(error) != 0:
            raise RuntimeError(f"{name} failed on {self.device}: {error.name}")
        return results[0] if len(results) == 1 else tuple(results)


def import_cuda_bindings() -> Any:
    """Return the module ``cuda.bindings.driver`` of the package cuda-bindings; None if it cannot be imported."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError:
        return None


def align(length: int, unit: int) -> int:
    """Return ``length``, rounded up to a multiple of ``unit``."""
    return -(-length // unit) * unit


def nap(waited: float) -> None:
    """Sleep before looking again, a tenth of the seconds waited so far, so that long waits leave the CPU to others."""
    time.sleep(min(1e-3, 2e-5 + waited / 10))
