"""When a collective happens: it needs no wait, a wait may be late, elsewhere or too short."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, Case, Side, assert_same_as_gloo, differs, make_group, named
from tests.helpers.issued_collectives import (
    KINDS,
    WITH_FUTURE,
    issue_broadcast,
    issue_gather,
    issue_list_gather,
    issue_list_to_all,
    issue_to_all,
)

CASES: list[Case] = []


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
    deadline = time.monotonic() + 30
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
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_time_changes_nothing(size: int, options: dict[str, Any]) -> None:
    assert_same_as_gloo(CASES, size, **options)


def _alone_first(backend: str) -> list[str]:
    """Rank 0 issues everything before rank 1 comes; what blocks or is said to be done by then is told."""
    side = Side(make_group() if backend == "freescale" else dist.new_group(backend="gloo"))
    store, wrong = dist.distributed_c10d._get_default_store(), []
    if side.rank == 1:
        store.get("go")
    issued = [kind(side) for kind in KINDS if kind is not issue_broadcast]
    if side.rank == 0:
        time.sleep(0.05)
        wrong = [str(index) for index, (work, _) in enumerate(issued) if work.is_completed()]
        store.set("go", "go")
    for work, _ in issued:
        work.wait()
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "freescale"])
def test_issuing_does_not_wait_for_the_others(backend: str) -> None:
    assert run_distributed(_alone_first, 2, backend, timeout=60) == [[], []]


def _impatient() -> list[str]:
    group, store, found = make_group(), dist.distributed_c10d._get_default_store(), []
    for kind in (issue_to_all, issue_list_to_all, issue_gather, issue_list_gather):
        if dist.get_rank() == 1:
            store.get(kind.__name__)
        work, out = kind(Side(group))
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError):
                work.wait(timedelta(milliseconds=50))
            store.set(kind.__name__, "go")
        work.wait()
        reference, expected = kind(Side(dist.group.WORLD))
        reference.wait()
        found.append(differs(out, expected))
    return found


def test_a_wait_that_is_too_short_is_an_error_and_nothing_else() -> None:
    """The collective goes on; a longer wait has its result."""
    assert run_distributed(_impatient, 2, timeout=60) == [[""] * 4] * 2
