"""The NCCL transport between GPUs. Threads stand in for the devices."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transports.nccl import ZeroCtaTransport
from tests.helpers.fake_gpu import FakeDriver, FakeStream, keep
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
