"""Calls from where one would not expect them, sizes that a short tag would confuse, an interrupt."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale._worker import WorkerThread
from lightning_freescale.comm.handshake import _check_header
from lightning_freescale.comm.header import Header
from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import Outcome, everyone_sends, make_group, outcome


def test_a_job_that_comes_while_the_thread_ends_is_done() -> None:
    worker, begun, go = WorkerThread("freescale lane rows"), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go.wait(10)

    worker.submit(slow)
    assert begun.wait(10)
    stopping = threading.Thread(target=worker.stop, args=(10,))
    stopping.start()
    while worker._jobs.empty():  # until the end has been queued
        pass
    late = worker.submit(lambda: None)
    go.set()
    assert late.result(10) is None
    assert worker.run(lambda: None).done()
    stopping.join()
    assert worker.stop(10)


def _from_a_callback() -> bool:
    group, sound = make_group(), []
    work = dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group, async_op=True)
    after = work.get_future().then(lambda _: sound.append(everyone_sends(group)))
    after.wait()
    return sound == [True] and everyone_sends(group)


def test_a_callback_may_use_the_lane() -> None:
    assert run_distributed(_from_a_callback, 2, timeout=60) == [True, True]


def _sizes(one: int, other: int) -> Outcome:
    group, rank = make_group(), dist.get_rank()
    sent = [0, one] if rank == 0 else [0, 0]
    expected = [0, 0] if rank == 0 else [other, 0]
    tensors = [torch.empty(sum(sizes), dtype=torch.uint8) for sizes in (expected, sent)]
    return outcome(dist.all_to_all_single, *tensors, expected, sent, group=group)


@pytest.mark.parametrize(("one", "other"), [(2_605_024, 952), (952, 2_605_024), (2**20 + 1000, 1000), (3 * 2**20, 2**20)])
def test_parts_that_do_not_fit_never_meet(one: int, other: int) -> None:
    for failed in run_distributed(_sizes, 2, one, other, timeout=60):
        assert failed.kind == "DistBackendError" and str(one) in failed.text and str(other) in failed.text


def _interrupted() -> tuple[str, str]:
    group = make_group()
    assert everyone_sends(group)
    if dist.get_rank() == 0:
        return outcome(everyone_sends, group).text, ""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    group._executor._handshake.exchange_headers = interrupt
    with pytest.raises(KeyboardInterrupt):
        everyone_sends(group)
    return "", outcome(everyone_sends, group).text


def test_an_interrupt_ends_the_lane_on_all_ranks() -> None:
    (heard, _), (_, after) = run_distributed(_interrupted, 2, timeout=60)
    assert "KeyboardInterrupt" in heard and "KeyboardInterrupt" in after


def _coalesced() -> bool:
    group, rank, size = make_group(), dist.get_rank(), dist.get_world_size()
    given = [torch.full((2,), float(rank)), torch.full((3,), 10.0 + rank)]
    room = [[torch.empty_like(each) for each in given] for _ in range(size)]
    results = group.allgather_coalesced(room, given).get_future().wait()
    return all(any(result is each for result in results) for row in room for each in row)


def test_a_coalesced_gather_gives_what_it_gathered() -> None:
    assert run_distributed(_coalesced, 2) == [True, True]


def test_tensors_on_cpu_and_gpu_are_not_one_collective() -> None:
    nothing = [torch.empty(0, dtype=torch.uint8)] * 2
    transfer = Transfer("all_gather", nothing, nothing, 0, torch.device("cpu"), 0, timedelta(seconds=1), 0)
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .* on CUDA, this one in .* on CPU"):
        _check_header(transfer, Header("all_gather", 0, 0, 0, 0, 0, on_gpu=True), 1, 1)


def _strides_of_zero() -> list[float]:
    """Numpy's empty results have them, and count as contiguous."""
    group, rank = make_group(), dist.get_rank()
    given = torch.zeros(0).as_strided((0,), (0,)) if rank == 0 else torch.ones(1).as_strided((1,), (0,))
    out = torch.zeros(1 - rank)
    dist.all_to_all_single(out, given, [0, 1 - rank], [rank, 0], group=group)
    return out.tolist()


def test_tensors_with_strides_of_zero() -> None:
    assert run_distributed(_strides_of_zero, 2) == [[1.0], []]
