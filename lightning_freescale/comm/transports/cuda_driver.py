"""The driver calls of the transports for a CUDA device: streams, copies by copy engines, and waits for words in memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

WRAP = 2**32
"""Words count modulo this number. A wait compares cyclically, so that counters may wrap around."""


class CudaDriver:
    """The device of this process, through cuda-bindings. Tested between processes on one GPU, not between GPUs.

    Copies and waits are asynchronous and launch no kernel. One call takes many of them, because a call costs microseconds. They
    take addresses instead of tensors, because a slice of a tensor costs as much again.

    The driver creates its own streams. torch reuses the same 32 streams, and a stream that waits for a word would block every
    user. Copies use ``cuMemcpyBatchAsync``, whose flag requests a copy engine even within a device, where a plain copy may be a
    kernel. If it is missing (CUDA driver or cuda-bindings below 12.8, or cuda-bindings 13 with driver 12), a warning is issued.

    ``pointer`` converts an address for :meth:`copy`. Keep the result for an address that is used often.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self.device = device
        self._cuda = cuda or import_cuda_bindings()
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device.index))
        self.pointer: Callable[[int], Any] = self._cuda.CUdeviceptr
        self._handles: dict[int, Any] = {}
        self._batch = self._batch_attributes()
        if self._batch is None:
            warnings.warn(
                "copies within a GPU may occupy streaming multiprocessors. To use copy engines, update the CUDA driver and "
                "cuda-bindings to 12.8, or with cuda-bindings 13 the driver to 13.0",
                stacklevel=2,
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the device and its context current for the calling thread."""
        with torch.cuda.device(self.device):
            self._call("cuCtxSetCurrent", self._context)  # torch makes a device current lazily, the driver does not
            yield

    def create_stream(self, urgent: bool = False) -> Any:
        """Return a new stream. An urgent stream makes progress while others are blocked."""
        priorities = self._call("cuCtxGetStreamPriorityRange")
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = self._call("cuStreamCreateWithPriority", flags, priorities[1 if urgent else 0])
        self._handles[int(handle)] = handle
        return torch.cuda.ExternalStream(int(handle), device=self.device)

    def wait_event(self, stream: Any, event: Any) -> None:
        """Make later work on ``stream`` wait for an event of another stream, unless ``event`` is None."""
        if event is not None:
            stream.wait_event(event)

    def copy(self, stream: Any, targets: list[Any], sources: list[Any], lengths: list[int]) -> None:
        """Enqueue copies of ``lengths`` bytes within the device, or to or from peers and pinned memory, **in any order**.

        Use a later call for a copy that must follow another one. Sources are read when the stream reaches the copies.
        """
        if not lengths:
            return
        handle = self._handles[stream.cuda_stream]
        if self._batch is None:
            for target, source, length in zip(targets, sources, lengths):
                self._call("cuMemcpyAsync", target, source, length, handle)
            return
        self._call("cuMemcpyBatchAsync", targets, sources, lengths, len(lengths), self._batch, [0], 1, handle)

    def word(self, address: int) -> Any:
        """Return the 32-bit word at an address of this device, for :meth:`wait_words`. Keep it if it is used often."""
        word = self._cuda.CUstreamBatchMemOpParams()
        word.operation = self._cuda.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        word.waitValue.address = self._cuda.CUdeviceptr(address)
        word.waitValue.flags = int(self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        return word

    def wait_words(self, stream: Any, words: list[Any], values: list[int]) -> None:
        """Block the stream until all words, at most 255, have reached ``values`` in cyclic order."""
        if not words:
            return
        for word, value in zip(words, values):
            word.waitValue.value = value % WRAP  # CUDA copies it in the call
        self._call("cuStreamBatchMemOp", self._handles[stream.cuda_stream], len(words), words, 0)

    def count_kernels_and_copies(self, stream: Any, enqueue: Callable[[], object]) -> tuple[int, int]:
        """Return how many kernels and copies ``enqueue`` enqueues on the stream. A graph captures them, and they do not run."""
        handle = self._handles[stream.cuda_stream]
        # only this mode allows the calls of other threads, and NCCL's own
        self._call("cuStreamBeginCapture", handle, self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            enqueue()
        except BaseException:
            with suppress(RuntimeError):  # the first error matters
                self._call("cuGraphDestroy", self._call("cuStreamEndCapture", handle))
            raise
        graph = self._call("cuStreamEndCapture", handle)
        try:
            _, count = self._call("cuGraphGetNodes", graph, 0)
            nodes, _ = self._call("cuGraphGetNodes", graph, count)
            kinds = [self._call("cuGraphNodeGetType", node).name for node in nodes]
        finally:
            self._call("cuGraphDestroy", graph)
        # a driver of CUDA 13 also has nodes for a batch of copies
        return kinds.count("CU_GRAPH_NODE_TYPE_KERNEL"), sum("MEMCPY" in kind for kind in kinds)

    def allocate_pinned(self, length: int) -> Tensor:
        """Return pinned host memory for ``length`` words, int32."""
        return torch.empty(length, dtype=torch.int32, pin_memory=True)

    def destroy_streams(self) -> None:
        """Destroy the streams. CUDA finishes the work that is on them."""
        while self._handles:
            self._call("cuStreamDestroy", self._handles.popitem()[1])

    def _batch_attributes(self) -> list[Any] | None:
        """Return the attributes that request a copy engine; None if the driver does not support them."""
        if not hasattr(self._cuda, "cuMemcpyBatchAsync"):
            return None
        needed = 12080 if self._cuda.CUDA_VERSION < 13000 else 13000  # CUDA 13 has changed its arguments
        if self._call("cuDriverGetVersion") < needed:
            return None
        attributes = self._cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = self._cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes.flags = int(self._cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        return [attributes]

    def _call(self, name: str, *args: Any) -> Any:
        """Return the results of a driver function without the error code: one result or a tuple."""
        answer = getattr(self._cuda, name)(*args)
        if answer[0] != 0:
            raise RuntimeError(f"{name} failed on {self.device}: {answer[0].name}")
        return answer[1] if len(answer) == 2 else answer[1:]


def import_cuda_bindings() -> Any:
    """Return the module ``cuda.bindings.driver`` of the package cuda-bindings; None if it cannot be imported."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError:
        return None


def align(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def nap(waited: float) -> None:
    """Sleep before the next poll, for a tenth of the seconds waited so far, so that long waits use little CPU time."""
    time.sleep(min(1e-3, 2e-5 + waited / 10))
