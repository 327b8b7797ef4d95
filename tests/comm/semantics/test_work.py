"""What an asynchronous collective returns behaves as a Work of gloo does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.both_groups import SMALL, Case, Side, assert_same_as_gloo, named
from tests.helpers.issued_collectives import KINDS, WITH_FUTURE, issue_broadcast, issue_gather, issue_reduce, issue_to_all

CASES: list[Case] = []


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
    works = [kind(side)[0] for kind in (issue_to_all, issue_reduce, issue_broadcast)]
    return [torch.futures.wait_all([work.get_future()])[0] for work in works]


@named(CASES)
def results(side: Side) -> Any:
    told = []
    for kind in (issue_to_all, issue_reduce, issue_broadcast):
        work, _ = kind(side)
        work.wait()
        told += work.result()
    return told


@named(CASES)
def sync_between_async(side: Side) -> Any:
    """Collectives of a group run in the order they are issued, whether somebody waits or not."""
    first, out = issue_to_all(side, 5000)
    between = side.blank(side.size)
    dist.all_to_all_single(between, side.numbers(side.size), group=side.group)
    last, gathered = issue_gather(side, 5000)
    summed = side.numbers(10)
    dist.all_reduce(summed, group=side.group)
    last.wait()
    first.wait()
    return between, out, gathered, summed


@pytest.mark.parametrize("options", [{}, SMALL], ids=["whole", "chunks"])
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_works_are_those_of_gloo(size: int, options: dict[str, Any]) -> None:
    assert_same_as_gloo(CASES, size, **options)
