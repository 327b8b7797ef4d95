"""The CUDA driver calls without a GPU, with a libcuda whose device is the host."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.transports import topology
from lightning_freescale.comm.transports.cuda_driver import CudaDriver
from lightning_freescale.comm.transports.selection import build_transport
from lightning_freescale.testing import run_distributed

_DEVICE = torch.device("cuda", 0)
_STUB = Path(__file__).parents[2] / "helpers" / "stub_libcuda.c"


class _Driver(CudaDriver):
    def __init__(self) -> None:
        self.called: set[str] = set()
        self.failing = ""
        with warnings.catch_warnings(record=True) as self.warned:
            warnings.simplefilter("always")
            super().__init__(_DEVICE)

    def _call(self, name: str, *args: Any) -> Any:
        self.called.add(name)
        if name == self.failing:
            raise RuntimeError(name)
        return super()._call(name, *args)


def _enqueue(driver: _Driver, stream: Any, to: list[Any], at: list[Any], words: list[Any], kernels: int) -> None:
    """Enqueue a copy, a wait that would never end, and kernels."""
    driver.copy(stream, to, at, [160, 640])
    driver.wait_words(stream, words, [100])
    for _ in range(kernels):
        driver._call("cuLaunchKernel", 1, 1, 1, 1, 1, 1, 1, 0, stream.cuda_stream, 0, 0)


def _over_stub(library: Path, version: int) -> tuple[set[str], list[bool]]:
    """Return the calls that moved the bytes, and whether there was a warning."""
    os.environ["STUB_CUDA_VERSION"] = str(version)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from cuda.bindings import driver as cuda

    torch.cuda.device = lambda device: nullcontext()
    waited: list[str] = []
    torch.cuda.ExternalStream = lambda handle, device: SimpleNamespace(cuda_stream=handle, wait_event=waited.append)
    driver = _Driver()
    sources, word = torch.arange(100), torch.tensor([2], dtype=torch.int32)
    targets = torch.zeros_like(sources)
    at, to = ([driver.pointer(tensor.data_ptr() + offset) for offset in (0, 160)] for tensor in (sources, targets))
    stream, words = driver.create_stream(), [driver.word(word.data_ptr())]
    with pytest.raises(RuntimeError, match=r"cuStreamBatchMemOp .*cuda:0.*CUDA_ERROR_INVALID_CONTEXT"):
        driver.wait_words(stream, words, [1])
    with driver.active():
        enqueues: list[Any] = [partial(_enqueue, driver, stream, to, at, words, count) for count in (0, 2)]
        kernels, copies = zip(*(driver.count_kernels_and_copies(stream, enqueue) for enqueue in (*enqueues, list)))
        for enqueue, driver.failing, error in ((list, "cuGraphGetNodes", RuntimeError), ({}.popitem, "", KeyError)):
            driver.called.clear()
            with pytest.raises(error):
                driver.count_kernels_and_copies(stream, enqueue)
            assert "cuGraphDestroy" in driver.called, "the graph would leak"
    driver.called.clear()
    driver.copy(stream, [], [], [])
    driver.wait_words(stream, [], [])
    for event in (None, "event"):
        driver.wait_event(stream, event)
    assert not driver.called and waited == ["event"]
    with driver.active():
        driver.wait_words(stream, words, [3 - 2**32])
        driver.copy(stream, to, at, [160, 640])
        _, event = cuda.cuEventCreate(0)
        cuda.cuEventRecord(event, stream.cuda_stream)
        assert int(cuda.cuEventQuery(event)[0]) and not targets.any(), "the copy waits for the word"
        word += 1
        while int(cuda.cuEventQuery(event)[0]):
            pass
        driver.destroy_streams()
    assert torch.equal(targets, sources)
    called, warned = driver.called, []
    assert kernels == (0, 2, 0) and min(copies[:2]) > 0 and copies[2] == 0
    for cuda.CUDA_VERSION in (12080, 13000):
        warned.append(any("CUDA driver" in str(each.message) for each in _Driver().warned))
    return called, warned


@pytest.mark.parametrize(
    ("version", "copy", "warned"),
    [
        (13000, "cuMemcpyBatchAsync", [False, False]),
        (12080, "cuMemcpyAsync", [False, True]),
        (12060, "cuMemcpyAsync", [True, True]),
    ],
)
def test_copies_wait_for_words_and_are_batches_where_there_are(
    version: int, copy: str, warned: list[bool], tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.driver")
    if torch.cuda.is_available():
        pytest.skip("the driver is there")
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "libcuda.so.1"
    named = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, _STUB, "-ldl", "-lpthread"]
    subprocess.run(named, check=True)
    called = {"cuCtxSetCurrent", "cuStreamBatchMemOp", copy, "cuStreamDestroy"}
    assert run_distributed(_over_stub, 1, library, version, init=False) == [(called, warned)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they may be had")
def test_without_cuda_no_transport_is_built_and_no_nvlink_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    p2p = SimpleNamespace(rank=0, size=1, ranks=[0])
    host: Any = SimpleNamespace(p2p=p2p, options=ProcessGroupFreeScaleOptions())
    for kind in ("peer", "two-level", "nccl-zero-cta"):
        with pytest.raises((RuntimeError, AssertionError)):
            build_transport(kind, host, [0], dist.HashStore(), timedelta(seconds=1))
    assert topology._linked_devices(0) == [] and "NVLink" in caplog.text


def test_torch_has_the_names_that_are_private_or_new() -> None:
    from torch._C import _distributed_c10d as c10d

    for name in ("set_group_info", "empty_strided_p2p", "rendezvous", "get_backend", "get_buffer"):
        assert hasattr(c10d._SymmetricMemory, name)
    for name in ("_register_process_group", "_unregister_process_group", "_detect_dma_connectivity"):
        assert hasattr(c10d, name)
    assert hasattr(c10d.Backend, "eager_connect_single_device") and hasattr(c10d.Backend, "mem_allocator")
    assert hasattr(torch.cuda, "ExternalStream") and hasattr(torch.cuda, "MemPool") and hasattr(torch.cuda, "use_mem_pool")
