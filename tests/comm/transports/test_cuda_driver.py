"""What can be seen of the CUDA side without a GPU: names, arguments, errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
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
_ROOT = Path(__file__).parents[3]


class _Code(int):
    name = "CUDA_ERROR_INVALID_CONTEXT"


class _Cuda:
    """Of the module ``cuda.bindings.driver``; keeps what is called."""

    def __init__(self, version: int = 12080, failing: str = "", bindings: int = 12080) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._version, self._failing, self.CUDA_VERSION = version, failing, bindings
        self.CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        self.CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
        self.CUstreamBatchMemOpType = SimpleNamespace(CU_STREAM_MEM_OP_WAIT_VALUE_32=1)
        self.CUmemcpyFlags = SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1)
        self.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
        self.CUmemcpyAttributes, self.CUdeviceptr = SimpleNamespace, int
        self.CUstreamBatchMemOpParams = lambda: SimpleNamespace(waitValue=SimpleNamespace())

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
            "cuCtxGetStreamPriorityRange": (_Code(0), 0, -5),
            "cuStreamCreateWithPriority": (_Code(0), 7),
            "cuMemcpyBatchAsync": (_Code(0), None),  # as before 13.0, with the index of a copy that failed
        }.get(name, (_Code(0),))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Callable[[CudaDriver], Any]:
    """Makes a stream, which a torch without CUDA has not."""
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle))
    return CudaDriver.create_stream


def test_waits_and_copies_are_one_call_each_and_nothing_is_none(stream: Callable[[CudaDriver], Any]) -> None:
    """Values are taken modulo two to the 32; a copy asks for a copy engine."""
    cuda = _Cuda()
    driver = CudaDriver(_DEVICE, cuda)
    made, words = stream(driver), [driver.word(400), driver.word(404)]
    driver.wait_words(made, words, [-1, 2**32 + 5])
    name, handle, count, waits, flags = cuda.calls[-1]
    assert (name, handle, count, flags) == ("cuStreamBatchMemOp", 7, 2, 0)
    assert [(wait.operation, wait.waitValue.flags) for wait in waits] == [(1, 0)] * 2
    assert [(wait.waitValue.address, wait.waitValue.value) for wait in waits] == [(400, 2**32 - 1), (404, 5)]
    driver.copy(made, [100, 200], [300, 400], [20, 30])
    name, targets, sources, lengths, count, attributes, first, kinds, handle = cuda.calls[-1]
    assert (name, count, first, kinds, handle) == ("cuMemcpyBatchAsync", 2, [0], 1, 7)
    assert (targets, sources, lengths) == ([100, 200], [300, 400], [20, 30])
    assert (attributes[0].flags, attributes[0].srcAccessOrder) == (1, 1)
    before = len(cuda.calls)
    driver.copy(made, [], [], [])
    driver.wait_words(made, [], [])
    assert len(cuda.calls) == before


@pytest.mark.parametrize(("version", "bindings"), [(12060, 12080), (12090, 13000)])
def test_without_batches_there_is_a_warning_and_a_copy_is_a_call(
    version: int, bindings: int, stream: Callable[[CudaDriver], Any]
) -> None:
    cuda = _Cuda(version, bindings=bindings)
    with pytest.warns(UserWarning, match=r"CUDA driver"):
        driver = CudaDriver(_DEVICE, cuda)
    driver.copy(stream(driver), [100, 200], [300, 400], [20, 30])
    assert cuda.calls[-2:] == [("cuMemcpyAsync", 100, 300, 20, 7), ("cuMemcpyAsync", 200, 400, 30, 7)]


def test_an_error_names_the_call(stream: Callable[[CudaDriver], Any]) -> None:
    driver = CudaDriver(_DEVICE, _Cuda(failing="cuStreamBatchMemOp"))
    with pytest.raises(RuntimeError, match=r"cuStreamBatchMemOp .*cuda:0.*CUDA_ERROR_INVALID_CONTEXT"):
        driver.wait_words(stream(driver), [driver.word(400)], [1])


_OVER_STUB = """
import json, torch
from contextlib import nullcontext
from types import SimpleNamespace
from cuda.bindings import driver as cuda
from lightning_freescale.comm.transports.cuda_driver import CudaDriver

called = set()

class Driver(CudaDriver):
    def _call(self, name, *args):
        called.add(name)
        return super()._call(name, *args)

torch.cuda.device = lambda device: nullcontext()
torch.cuda.ExternalStream = lambda handle, device: SimpleNamespace(cuda_stream=handle)
driver = Driver(torch.device("cuda", 0))
sources, word = torch.arange(100), torch.tensor([2], dtype=torch.int32)
targets = torch.zeros_like(sources)
at, to = ([driver.pointer(tensor.data_ptr() + offset) for offset in (0, 160)] for tensor in (sources, targets))
with driver.active():
    stream = driver.create_stream()
    driver.wait_words(stream, [driver.word(word.data_ptr())], [3 - 2**32])
    driver.copy(stream, to, at, [160, 640])
    _, event = cuda.cuEventCreate(0)
    cuda.cuEventRecord(event, stream.cuda_stream)
    early = int(cuda.cuEventQuery(event)[0]), int(targets.sum())
    word += 1
    while int(cuda.cuEventQuery(event)[0]):
        pass
    driver.destroy_streams()
print(json.dumps([bool(early[0]), early[1], targets.tolist() == sources.tolist(), sorted(called)]))
"""


@pytest.mark.parametrize(("version", "copy"), [(13000, "cuMemcpyBatchAsync"), (12060, "cuMemcpyAsync")])
def test_the_real_bindings_take_what_they_are_given(version: int, copy: str, tmp_path: Path) -> None:
    """Over a libcuda whose device is the host."""
    pytest.importorskip("cuda.bindings.driver")
    if torch.cuda.is_available():
        pytest.skip("torch would find the stub instead of the driver")
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")
    source = _ROOT / "tests" / "helpers" / "stub_libcuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source, "-ldl", "-lpthread"], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "STUB_CUDA_VERSION": str(version)}
    command = [sys.executable, "-W", "ignore", "-c", _OVER_STUB]
    ended = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    waited, early, right, called = json.loads(ended.stdout)
    assert waited and early == 0 and right, "the copy waits for the word"
    assert {name for name in called if "Memcpy" in name or "Stream" in name} == {
        *(copy, "cuStreamBatchMemOp", "cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority", "cuStreamDestroy")
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they may be had")
def test_what_cannot_be_set_up_is_told_not_raised_and_no_nvlink_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    p2p: Any = SimpleNamespace(rank=0, size=1, ranks=[0])
    host: Any = None
    for kind in ("peer", "two-level", "nccl-zero-cta"):
        made, reason = build_transport(kind, LaneOptions(), p2p, host, [0], dist.HashStore(), timedelta(seconds=1))
        assert made is None and reason, kind
    assert topology._linked_devices(0) == [] and "NVLink" in caplog.text


def test_torch_has_the_names_that_are_private_or_new() -> None:
    from torch._C import _distributed_c10d as c10d

    for name in ("set_group_info", "empty_strided_p2p", "rendezvous", "get_backend", "get_buffer"):
        assert hasattr(c10d._SymmetricMemory, name)
    for name in ("_register_process_group", "_unregister_process_group", "_detect_dma_connectivity"):
        assert hasattr(c10d, name)
    assert hasattr(c10d.Backend, "eager_connect_single_device") and hasattr(c10d.Backend, "mem_allocator")
    assert hasattr(torch.cuda, "ExternalStream") and hasattr(torch.cuda, "MemPool") and hasattr(torch.cuda, "use_mem_pool")
