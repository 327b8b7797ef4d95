"""The NCCL transport between GPUs. Threads stand in for the devices."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transports import nccl as nccl_transport
from lightning_freescale.comm.transports import selection
from lightning_freescale.comm.transports.nccl import ZeroCtaTransport
from tests.helpers.fake_gpu import FakeDriver, FakeStream, keep, on_ranks
from tests.helpers.gpu_transfers import lengths, moved, transfer


class FakeNccl:
    """The collective: equal parts in each rank's window, and no access to buffers before all ranks have arrived."""

    def __init__(self, size: int, slot: int) -> None:
        self.windows = [keep(torch.zeros(2, size * slot, dtype=torch.uint8)) for _ in range(size)]
        self.calls: list[list[int]] = [[] for _ in range(size)]
        self.aborted = [0] * size
        self._size, self._barrier = size, threading.Barrier(size)
        self._inputs: dict[int, Tensor] = {}

    def transport(self, rank: int) -> ZeroCtaTransport:
        def all_to_all(stream: FakeStream, output: Tensor, input: Tensor) -> None:
            for tensor, half in ((input, self.windows[rank][0]), (output, self.windows[rank][1])):
                assert tensor.is_contiguous() and tensor.data_ptr() == half.data_ptr() and len(tensor) % self._size == 0
            self.calls[rank].append(len(input) // self._size)
            stream.put(lambda: self._run(rank, output, input))

        def abort() -> None:
            self.aborted[rank] += 1
            self._barrier.abort()

        communicator: Any = SimpleNamespace(window=self.windows[rank], all_to_all=all_to_all, abort=abort)
        return ZeroCtaTransport(FakeDriver(rank), communicator, self._size)

    def _run(self, rank: int, output: Tensor, input: Tensor) -> None:
        try:
            self._inputs[rank] = input
            self._barrier.wait()
            width = len(input) // self._size
            assert all(len(other) == len(input) for other in self._inputs.values())
            for source in range(self._size):
                output[source * width : (source + 1) * width] = self._inputs[source][rank * width : (rank + 1) * width]
            self._barrier.wait()
        except threading.BrokenBarrierError:
            return


@pytest.mark.parametrize(("size", "slot", "most"), [(2, 16, 16), (2, 16, 100), (3, 48, 200), (4, 32, 31)])
def test_all_bytes_arrive_by_nccl(size: int, slot: int, most: int) -> None:
    nccl, tables = FakeNccl(size, slot), [lengths(size, most, seed) for seed in range(4)]
    assert moved([nccl.transport(rank) for rank in range(size)], tables) == [[[]] * len(tables)] * size


def test_rounds_are_no_wider_than_the_largest_part() -> None:
    nccl, table = FakeNccl(2, 64), [[0, 70], [3, 0]]
    assert moved([nccl.transport(rank) for rank in range(2)], [table, [[0, 0], [0, 0]]]) == [[[], []]] * 2
    assert nccl.calls == [[64, 16]] * 2  # a multiple of 16 bytes; nothing to send is no collective


def test_a_rank_that_does_not_come_ends_it() -> None:
    nccl, table = FakeNccl(2, 16), [[9, 9], [9, 9]]
    transport = nccl.transport(0)
    with pytest.raises(dist.DistBackendError, match=r"0\.2 s"):
        transport.move(transfer(0, table, 1, timeout=0.2), lambda: None)
    with pytest.raises(dist.DistBackendError, match="closed"):
        transport.move(transfer(0, table, 2), lambda: None)
    transport.close()
    assert nccl.aborted == [1, 0]


def test_an_abort_of_nccl_that_does_not_return_delays_the_error_by_no_more_than_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_transport, "_GRACE", 0.5)
    nccl, released = FakeNccl(2, 16), threading.Event()
    transport = nccl.transport(0)
    transport._communicator.abort = released.wait  # CUDA frees memory after the streams have ended
    begun = time.monotonic()
    (error,) = on_ranks(1, lambda rank: transport.move(transfer(rank, [[9, 9]] * 2, 1, 0.1), lambda: None), timeout=10)
    moved_at = time.monotonic()
    assert isinstance(error, dist.DistBackendError) and "0.1 s" in str(error) and 0.6 <= moved_at - begun < 1.1
    transport._busy.acquire()  # as a call of NCCL does that does not return
    assert on_ranks(1, lambda rank: transport.close(), timeout=10) == [None] and not transport._driver.closed
    assert 0.5 <= time.monotonic() - moved_at < 1
    released.set()
    nccl._barrier.abort()


class _Group:
    """Stands in for ``ProcessGroupNCCL`` of the ranks on threads."""

    NCCL_CTA_POLICY_ZERO = 2
    Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))
    mem_allocator = "of NCCL"
    streams: Any = threading.local()

    def __init__(self, nccl: FakeNccl, store: Any, rank: int, size: int, options: Any) -> None:
        assert options.config.cta_policy == 2 and options._timeout == 2 * timedelta(seconds=20)
        self._nccl, self._rank, self._done = nccl, rank, []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._done.append("connect")

    def register_mem_pool(self, pool: Any, symm: bool) -> None:
        assert self._done == ["connect"] and pool.allocator == self.mem_allocator and pool.used == ["entered", "left"] and symm
        self._done.append("register")

    def alltoall_base(self, output: Tensor, input: Tensor, *given: Any) -> None:
        assert self._done == ["connect", "register"] and given[:2] == ([], []) and not given[2].asyncOp
        self._nccl.calls[self._rank].append(len(input))
        _Group.streams.current.put(partial(self._nccl._run, self._rank, output, input))

    def abort(self) -> None:
        self._nccl.aborted[self._rank] += 1
        self._nccl._barrier.abort()  # collectives on another stream may still wait


@contextmanager
def _marking(marks: list[str]) -> Any:
    marks.append("entered")
    yield
    marks.append("left")


@pytest.mark.parametrize(
    ("kernels", "elsewhere", "facts"),
    [(0, False, ()), (3, False, ("3 kernels", "NCCL_CTA_POLICY")), (0, True, ("no copy", "another stream"))],
)
def test_a_lane_whose_nccl_would_launch_kernels_is_refused_and_nothing_is_left(
    kernels: int, elsewhere: bool, facts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the communicator has the policy, and its memory a window, before the first of two all-to-alls."""
    size, nccl, drivers = 2, FakeNccl(2, 16), [FakeDriver(rank) for rank in range(2)]

    others = defaultdict[FakeStream, FakeStream](FakeStream)

    @contextmanager
    def current(stream: FakeStream) -> Any:
        _Group.streams.current = others[stream] if elsewhere else stream
        yield

    given = iter(drivers)
    monkeypatch.setattr(nccl_transport, "PEER_BYTES", 140)
    monkeypatch.setattr(FakeDriver, "kernels", kernels)
    monkeypatch.setattr(selection, "CudaDriver", lambda device: next(given))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device, empty=torch.empty: empty(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: SimpleNamespace(allocator=allocator, used=[]))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: _marking(pool.used))
    group = type("Group", (_Group,), {"__init__": lambda self, *given: _Group.__init__(self, nccl, *given)})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group)

    def build(rank: int) -> Any:
        host: Any = SimpleNamespace(p2p=SimpleNamespace(rank=rank, size=size))
        return selection.build_transport("nccl-zero-cta", host, [0, 1], dist.HashStore(), timedelta(seconds=20))

    built = on_ranks(size, build)
    assert nccl.calls == [[64, 64]] * 2, "32 bytes for each rank, in two halves of at most 70 bytes"
    if facts:
        assert all(isinstance(error, RuntimeError) and fact in str(error) for error in built for fact in facts)
        assert nccl.aborted == [1, 1] and all(driver.closed for driver in drivers)
    else:
        assert moved(built, [lengths(2, 200, seed) for seed in range(3)]) == [[[]] * 3] * 2


def test_threads_that_close_and_wait_at_once_abort_nccl_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(transport: ZeroCtaTransport) -> bool:
        closed: bool = transport.__dict__.get("closed", False)
        time.sleep(0.05)  # the other threads read the same value
        return closed

    monkeypatch.setattr(
        ZeroCtaTransport, "_closed", property(slowly, lambda self, closed: self.__dict__.update(closed=closed)), raising=False
    )
    nccl = FakeNccl(2, 16)
    transport = nccl.transport(0)
    assert on_ranks(3, lambda thread: transport.close()) == [None] * 3 and nccl.aborted == [1, 0]


def test_closing_ends_what_nccl_has_in_flight() -> None:
    nccl, table = FakeNccl(2, 16), [[9, 9], [9, 9]]
    transport = nccl.transport(0)

    def close() -> None:
        while not nccl.calls[0]:
            time.sleep(1e-3)
        transport.close()

    threading.Thread(target=close, daemon=True).start()
    with pytest.raises(dist.DistBackendError, match="closed"):
        transport.move(transfer(0, table, 1), lambda: None)
    end = time.monotonic() + 20
    while not transport._driver.closed and time.monotonic() < end:
        time.sleep(0.01)
    assert transport._driver.closed and nccl.aborted == [1, 0]
