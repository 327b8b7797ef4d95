"""What can be seen of the CUDA side without a GPU: names, arguments, errors."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import LaneOptions
from lightning_freescale.comm.transports import topology
from lightning_freescale.comm.transports.cuda_driver import CudaDriver
from lightning_freescale.comm.transports.selection import build_transport

_DEVICE = torch.device("cuda", 0)
_STREAM = SimpleNamespace(cuda_stream=7)
_WORD = torch.zeros(1, dtype=torch.int32)


class _Code(int):
    name = "CUDA_ERROR_INVALID_CONTEXT"


class _Cuda:
    """Of the module ``cuda.bindings.driver``; keeps what is called."""

    def __init__(self, version: int = 12080, failing: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._version, self._failing = version, failing
        self.CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        self.CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
        self.CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)
        self.CUmemcpyFlags = SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1)
        self.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
        self.CUmemcpyAttributes, self.CUstream, self.CUdeviceptr = SimpleNamespace, int, int

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, *args))
        if name == self._failing:
            return (_Code(201),)
        return {
            "cuDriverGetVersion": (_Code(0), self._version),
            "cuDeviceGet": (_Code(0), 3),
            "cuDevicePrimaryCtxRetain": (_Code(0), "context"),
            "cuMemcpyBatchAsync": (_Code(0), None),  # as before 13.0, with the index of a copy that failed
        }.get(name, (_Code(0),))


def test_waits_and_writes_are_taken_modulo_two_to_the_32() -> None:
    cuda = _Cuda()
    driver = CudaDriver(_DEVICE, cuda)
    driver.wait_word(_STREAM, _WORD, -1)
    driver.write_word(_STREAM, _WORD, 2**32 + 5)
    address = _WORD.data_ptr()
    assert cuda.calls[-2:] == [
        ("cuStreamWaitValue32", 7, address, 2**32 - 1, 0),
        ("cuStreamWriteValue32", 7, address, 5, 0),
    ]


def test_copies_ask_for_a_copy_engine() -> None:
    cuda = _Cuda()
    target, source = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    CudaDriver(_DEVICE, cuda).copy(_STREAM, target, source)
    name, targets, sources, lengths, count, attributes, first, kinds, stream = cuda.calls[-1]
    assert name == "cuMemcpyBatchAsync"
    assert (targets, sources, lengths, count) == ([target.data_ptr()], [source.data_ptr()], [20], 1)
    assert (first, kinds, stream) == ([0], 1, 7)
    assert (attributes[0].flags, attributes[0].srcAccessOrder) == (1, 1)


def test_an_old_driver_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"may occupy streaming multiprocessors: .* update the CUDA driver"):
        CudaDriver(_DEVICE, _Cuda(version=12060))


def test_an_error_names_the_call() -> None:
    driver = CudaDriver(_DEVICE, _Cuda(failing="cuStreamWaitValue32"))
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 failed on cuda:0: CUDA_ERROR_INVALID_CONTEXT"):
        driver.wait_word(_STREAM, _WORD, 1)


def test_the_real_bindings_take_these_arguments() -> None:
    """Up to where they look for the driver's library."""
    cuda = pytest.importorskip("cuda.bindings.driver")
    if torch.cuda.is_available():
        pytest.skip("would be executed")
    driver = object.__new__(CudaDriver)
    driver.device, driver._cuda = _DEVICE, cuda

    def call(name: str, *args: Any) -> Any:
        if name == "cuDriverGetVersion":
            return 12080
        with pytest.raises(RuntimeError, match="dlopen"):
            getattr(cuda, name)(*args)
        return None

    driver._call = call
    driver._batch = driver._batch_attributes()
    driver.wait_word(_STREAM, _WORD, -1)
    driver.write_word(_STREAM, _WORD, 2**32 + 1)
    driver.copy(_STREAM, _WORD, _WORD)
    call("cuDevicePrimaryCtxRetain", cuda.CUdevice(0))
    call("cuCtxSetCurrent", cuda.CUcontext(0))
    call("cuCtxGetStreamPriorityRange")
    call("cuStreamCreateWithPriority", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
    call("cuStreamDestroy", cuda.CUstream(0))
    call("cuDeviceGet", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they may be had")
@pytest.mark.parametrize("kind", ["peer", "two-level", "nccl-zero-cta"])
def test_what_cannot_be_set_up_is_told_not_raised(kind: str) -> None:
    p2p: Any = SimpleNamespace(rank=0, size=1, ranks=[0])
    host: Any = None
    made, reason = build_transport(kind, LaneOptions(), p2p, host, [0], dist.HashStore(), timedelta(seconds=1))
    assert made is None
    assert reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it may be seen")
def test_without_nvml_no_nvlink_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    assert topology._linked_devices(0) == []
    assert "NVLink could not be looked for" in caplog.text


def test_torch_has_the_names_that_are_private_or_new() -> None:
    from torch._C import _distributed_c10d as c10d

    for name in ("set_group_info", "empty_strided_p2p", "rendezvous", "get_backend", "get_buffer"):
        assert hasattr(c10d._SymmetricMemory, name)
    for name in ("_register_process_group", "_unregister_process_group", "_detect_dma_connectivity"):
        assert hasattr(c10d, name)
    assert hasattr(c10d.Backend, "eager_connect_single_device") and hasattr(c10d.Backend, "mem_allocator")
    assert hasattr(torch.cuda, "ExternalStream") and hasattr(torch.cuda, "MemPool") and hasattr(torch.cuda, "use_mem_pool")
