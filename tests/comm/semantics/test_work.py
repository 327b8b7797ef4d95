"""The Work of an asynchronous collective behaves like gloo's. The collective completes even if the caller does not wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.collectives.executor import TransferWork
from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, Case, Side, assert_same_as_gloo, differs, named
from tests.helpers.comm_groups import make_group
from tests.helpers.pretended_gpu import GPU, PretendedGPU

CASES: list[Case] = []
Issued = tuple[Any, list[torch.Tensor]]


def _to_all(side: Side, rows: int = 300) -> Issued:
    given, out = side.numbers(rows * side.size), side.blank(rows * side.size)
    return dist.all_to_all_single(out, given, group=side.group, async_op=True), [out]


def _list_to_all(side: Side, rows: int = 300) -> Issued:
    out = [side.blank(rows) for _ in range(side.size)]
    return dist.all_to_all(out, [side.numbers(rows) for _ in out], group=side.group, async_op=True), out


def _gather(side: Side, rows: int = 300) -> Issued:
    out = side.blank(rows * side.size)
    return dist.all_gather_into_tensor(out, side.numbers(rows), group=side.group, async_op=True), [out]


def _list_gather(side: Side, rows: int = 300) -> Issued:
    out = [side.blank(rows) for _ in range(side.size)]
    return dist.all_gather(out, side.numbers(rows), group=side.group, async_op=True), out


def _reduce(side: Side, rows: int = 300) -> Issued:
    tensor = side.numbers(rows)
    return dist.all_reduce(tensor, group=side.group, async_op=True), [tensor]


def _scatter(side: Side, rows: int = 300) -> Issued:
    out = side.blank(rows)
    return dist.reduce_scatter_tensor(out, side.numbers(rows * side.size), group=side.group, async_op=True), [out]


OURS: list[Callable[..., Issued]] = [_to_all, _list_to_all, _gather, _list_gather]
WITH_FUTURE = [*OURS, _reduce]
KINDS = [*WITH_FUTURE, _scatter]  # gloo's reduce-scatter has no future, and is done when it is waited for


@named(CASES)
def waited_in_any_order(side: Side) -> Any:
    results = []
    for stride in (1, -1, 5):
        works = [kind(side, rows) for rows in (1, 300, 2000) for kind in KINDS]
        for index in range(len(works)):
            works[(stride * index) % len(works)][0].wait()
        results += [out for _, outs in works for out in outs]
    return results


@named(CASES)
def waited_twice_and_asked(side: Side) -> Any:
    told = []
    for kind in KINDS:
        work, out = kind(side)
        assert isinstance(work, dist.Work)  # TorchRec waits for nothing else
        first = work.wait()
        told += [first, work.wait(), work.wait(timedelta(seconds=9)), work.is_completed(), work.is_success(), *out]
    return told


@named(CASES)
def futures(side: Side) -> Any:
    told: list[Any] = []
    for kind in WITH_FUTURE:
        work, out = kind(side)
        future = work.get_future()
        after = future.then(lambda done, out=out: [tensor * 2 for tensor in out] if done.value() is not None else None)
        told += [*after.wait(), *out]
        assert future.wait() is not None and future.done() and len(work.get_future().value()) > 0
        work.wait()
        assert work.get_future().done()
    for kind in (_to_all, _reduce):  # DDP hooks take their result from there
        told.append(torch.futures.wait_all([kind(side)[0].get_future()])[0])
        work, _ = kind(side)
        work.wait()
        told += work.result()
    return told


@named(CASES)
def dropped_works_are_done_all_the_same(side: Side) -> Any:
    outs = [out for kind in WITH_FUTURE for out in kind(side, 2000)[1]]
    deadline = time.monotonic() + 30
    for kind in WITH_FUTURE:  # later ones of the same kind
        kind(side, 1)[0].wait()
    while time.monotonic() < deadline and any((out[-3:] == 77).any() for out in outs):
        time.sleep(0.01)
    dist.barrier(side.group)
    return outs


@pytest.mark.parametrize(
    ("size", "options"), [(3, SMALL), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, {}), (4, SMALL)])]
)
def test_works_are_those_of_gloo(size: int, options: dict[str, Any]) -> None:
    assert_same_as_gloo(CASES, size, **options)


def _at_its_time() -> list[str]:
    """Issue everything on rank 0 before rank 1 starts: nothing blocks or completes, and a wait may time out."""
    group, store, wrong = make_group(), dist.distributed_c10d._get_default_store(), []
    side = Side(group)
    if side.rank == 1:
        store.get("go")
    issued = [kind(side) for kind in KINDS]
    if side.rank == 0:
        time.sleep(0.05)
        wrong = [str(index) for index, (work, _) in enumerate(issued) if work.is_completed()]
        for work, _ in issued[: len(OURS)]:
            with pytest.raises(RuntimeError):
                work.wait(timedelta(milliseconds=50))
        store.set("go", "go")
    for work, _ in issued:
        work.wait()
    reference = Side(dist.group.WORLD)
    for kind, (_, out) in zip(KINDS, issued):  # the collective went on
        work, expected = kind(reference)
        work.wait()
        wrong.append(differs(out, expected))
    return [each for each in wrong if each]


def test_issuing_does_not_wait_for_the_others_and_a_wait_that_is_too_short_is_an_error_and_nothing_else() -> None:
    assert run_distributed(_at_its_time, 2, timeout=60) == [[], []]


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_a_future_knows_the_gpu_that_its_tensors_are_on(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Check the device of the future, on whose streams torch orders callbacks, with a stand-in for the GPU."""
    given: list[Any] = []
    future: Any = torch.futures.Future
    monkeypatch.setattr(torch.futures, "Future", lambda devices: given.append(devices) or future())
    done: Future[None] = Future()
    with PretendedGPU().active():
        results = [torch.ones(2, device=device)]
        told = TransferWork(done, results).get_future()
    done.set_result(None)
    assert told.value() is results and given == [[GPU] if device == GPU else []]


def test_an_error_is_that_of_the_work_and_of_its_future() -> None:
    done: Future[None] = Future()
    work = TransferWork(done, [torch.ones(1)])
    future = work.get_future()
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    done.set_exception(OSError("no memory"))
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), OSError)
    for wait in (work.wait, work.synchronize, future.wait):
        with pytest.raises((dist.DistBackendError, OSError, RuntimeError), match="no memory"):
            wait()
