"""What an asynchronous collective returns behaves as a Work of gloo does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.comm.semantics.sides import SMALL, Case, Side, assert_same_as_gloo, make_group, named

CASES: list[Case] = []
Issued = tuple[Any, list[torch.Tensor]]


def _to_all(side: Side, rows: int = 300) -> Issued:
    given, out = side.numbers(rows * side.size), side.blank(rows * side.size)
    return dist.all_to_all_single(out, given, group=side.group, async_op=True), [out]


def _to_all_listed(side: Side, rows: int = 300) -> Issued:
    out = [side.blank(rows) for _ in range(side.size)]
    return dist.all_to_all(out, [side.numbers(rows) for _ in out], group=side.group, async_op=True), out


def _gathered(side: Side, rows: int = 300) -> Issued:
    out = side.blank(rows * side.size)
    return dist.all_gather_into_tensor(out, side.numbers(rows), group=side.group, async_op=True), [out]


def _gathered_listed(side: Side, rows: int = 300) -> Issued:
    out = [side.blank(rows) for _ in range(side.size)]
    return dist.all_gather(out, side.numbers(rows), group=side.group, async_op=True), out


def _reduced(side: Side, rows: int = 300) -> Issued:
    tensor = side.numbers(rows)
    return dist.all_reduce(tensor, group=side.group, async_op=True), [tensor]


def _broadcast(side: Side, rows: int = 300) -> Issued:
    tensor = side.numbers(rows)
    return dist.broadcast(tensor, group_src=0, group=side.group, async_op=True), [tensor]


def _scattered(side: Side, rows: int = 300) -> Issued:
    out = side.blank(rows)
    return dist.reduce_scatter_tensor(out, side.numbers(rows * side.size), group=side.group, async_op=True), [out]


KINDS: list[Callable[..., Issued]] = [
    *(_to_all, _to_all_listed, _gathered, _gathered_listed, _reduced, _broadcast, _scattered),
]
WITH_FUTURE = [kind for kind in KINDS if kind is not _scattered]
"""Gloo's reduce-scatter has no future, and is done when it is waited for."""


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
    return told


@named(CASES)
def values_of_futures(side: Side) -> Any:
    """DDP hooks take their result from there."""
    works = [kind(side)[0] for kind in (_to_all, _reduced, _broadcast)]
    return [torch.futures.wait_all([work.get_future()])[0] for work in works]


@named(CASES)
def results(side: Side) -> Any:
    told = []
    for kind in (_to_all, _reduced, _broadcast):
        work, _ = kind(side)
        work.wait()
        told += work.result()
    return told


@named(CASES)
def sync_between_async(side: Side) -> Any:
    """Collectives of a group run in the order they are issued, whether somebody waits or not."""
    first, out = _to_all(side, 5000)
    between = side.blank(side.size)
    dist.all_to_all_single(between, side.numbers(side.size), group=side.group)
    last, gathered = _gathered(side, 5000)
    summed = side.numbers(10)
    dist.all_reduce(summed, group=side.group)
    last.wait()
    first.wait()
    return between, out, gathered, summed


@named(CASES)
def input_is_free_after_the_wait(side: Side) -> Any:
    """Also when the others come later than this rank has gone on."""
    told = []
    for turn in range(side.size):
        given, out = side.numbers(3000 * side.size), side.blank(3000 * side.size)
        if side.rank == turn:
            time.sleep(0.02)
        dist.all_to_all_single(out, given, group=side.group, async_op=True).wait()
        given.fill_(-1)
        mine, gathered = side.numbers(3000), side.blank(3000 * side.size)
        dist.all_gather_into_tensor(gathered, mine, group=side.group, async_op=True).wait()
        mine.fill_(-1)
        told += [out, gathered]
    return told


@named(CASES)
def dropped_works_are_done_all_the_same(side: Side) -> Any:
    outs = [out for kind in WITH_FUTURE for out in kind(side, 2000)[1]]
    deadline = time.monotonic() + 10
    for kind in WITH_FUTURE:  # later ones of the same kind
        kind(side, 1)[0].wait()
    while time.monotonic() < deadline and any((out[-3:] == 77).any() for out in outs):
        time.sleep(0.01)
    dist.barrier(side.group)
    return outs


@named(CASES)
def waited_in_other_threads(side: Side) -> Any:
    issued = [kind(side, 1000) for kind in KINDS]
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda work=work: seen.append(work.wait())) for work, _ in issued for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [len(seen), *(out for _, outs in issued for out in outs)]


@pytest.mark.parametrize("options", [{}, SMALL], ids=["whole", "chunks"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_works_are_those_of_gloo(size: int, options: dict[str, Any]) -> None:
    assert_same_as_gloo(CASES, size, **options)


def _alone_first(backend: str) -> list[str]:
    """Rank 0 issues everything before rank 1 comes; what blocks or is said to be done by then is told."""
    side = Side(make_group() if backend == "freescale" else dist.new_group(backend="gloo"))
    store, wrong = dist.distributed_c10d._get_default_store(), []
    if side.rank == 1:
        store.get("go")
    issued = [kind(side) for kind in KINDS if kind is not _broadcast]
    if side.rank == 0:
        time.sleep(0.05)
        wrong = [str(index) for index, (work, _) in enumerate(issued) if work.is_completed()]
        store.set("go", "go")
    for work, _ in issued:
        work.wait()
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "freescale"])
def test_issuing_does_not_wait_for_the_others(backend: str) -> None:
    assert run_distributed(_alone_first, 2, backend, timeout=20) == [[], []]


def _impatient() -> list[str]:
    side = Side(make_group())
    store, told = dist.distributed_c10d._get_default_store(), []
    for kind in (_to_all, _to_all_listed, _gathered, _gathered_listed):
        if side.rank == 1:
            store.get(kind.__name__)
        work, out = kind(side)
        if side.rank == 0:
            with pytest.raises(RuntimeError):
                work.wait(timedelta(milliseconds=50))
            store.set(kind.__name__, "go")
        work.wait()
        told.append(str([tensor.sum().item() for tensor in out]))
    return told


def test_a_wait_that_is_too_short_is_an_error_and_nothing_else() -> None:
    """The collective goes on; a longer wait has its result."""
    told = run_distributed(_impatient, 2, timeout=30)
    assert all(len(one) == 4 and str(77.0) not in one for one in told)
