"""The timeline sees every collective that goes through torch.distributed: when this rank arrived, and when it waited."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.profiling.recording.collectives import NAMES, collectives_on
from lightning_freescale.profiling.recording.observed_work import moved_bytes
from lightning_freescale.profiling.recording.records import Collective, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import make_group, outcome

LATE = 1.0
"""Seconds, of which a busy machine hides little."""
GROUPS = {"freescale": {"transport": "auto"}, "native": {"transport": "native"}}


def _watched(stack: ExitStack, ignored_groups: Any = ()) -> Timeline:
    timeline = Timeline()
    timeline.enable(torch.device("cpu"))
    stack.enter_context(collectives_on(timeline, ignored_groups))
    dist.barrier()
    timeline.open_step()
    return timeline


def _seen(timeline: Timeline) -> list[Collective]:
    step = timeline.close_step()
    assert isinstance(step, StepRecord)
    return step.collectives


def _group(name: str | None) -> Any:
    return None if name is None else make_group(**GROUPS[name])


def _all_to_all(group: Any, async_op: bool) -> Any:
    return dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group, async_op=async_op)


def _all_reduce(group: Any, async_op: bool) -> Any:
    return dist.all_reduce(torch.ones(2), group=group, async_op=async_op)


ASYNC = [(name, call) for name in (None, *GROUPS) for call in (_all_to_all, _all_reduce)]


def _late(async_op: bool, calls: list[tuple[str | None, Callable[..., Any]]]) -> list[dict[str, float]]:
    """Rank 1 is late by ``LATE``; async, rank 0 does other things for twice as long."""
    groups = [_group(name) for name, _ in calls]
    with ExitStack() as stack:
        timeline = _watched(stack)
        time.sleep(LATE * dist.get_rank())
        works = [call(group, async_op) for (_, call), group in zip(calls, groups)]
        if async_op:
            time.sleep(LATE * (0.2 if dist.get_rank() else 2))
            for work in works:
                work.wait()
                work.wait()  # a second wait is no second collective
        seen = _seen(timeline)
    assert len(seen) == len(calls)
    return [
        {"ahead": c.start - c.arrive, "waited": c.end - c.start, "done": -1.0 if c.done is None else c.done - c.arrive}
        for c in seen
    ]


@pytest.fixture(scope="module")
def late_async() -> list[list[dict[str, float]]]:
    """All of them at once: what takes time is to be late."""
    return run_distributed(_late, 2, True, ASYNC)


@pytest.mark.parametrize("index", range(len(ASYNC)), ids=[f"{call.__name__}-{name}" for name, call in ASYNC])
def test_an_async_collective_arrives_when_issued_waits_when_waited_for_and_is_done_between(
    index: int, late_async: list[list[dict[str, float]]]
) -> None:
    early, late = (rank[index] for rank in late_async)
    assert early["ahead"] >= 2 * LATE and late["ahead"] >= 0.2 * LATE
    assert early["waited"] < 0.5 * LATE and late["waited"] < 0.5 * LATE
    assert 0.75 * LATE < early["done"] < 1.5 * LATE, "done when the late rank came, long before it was waited for"


def test_a_sync_collective_waits_in_the_call() -> None:
    (early,), (late,) = run_distributed(_late, 2, False, [("freescale", _all_to_all)])
    assert early["ahead"] < 0.5 * LATE
    assert early["waited"] > 0.5 * LATE > late["waited"] >= 0


def _pair() -> list[torch.Tensor]:
    return [torch.empty(2), torch.empty(2)]


CALLS: dict[str, Callable[[Any, bool], Any]] = {
    "all_to_all_single": _all_to_all,
    "all_to_all": lambda group, a: dist.all_to_all(_pair(), _pair(), group, a),
    "all_gather": lambda group, a: dist.all_gather(_pair(), torch.ones(2), group, a),
    "all_gather_into_tensor": lambda group, a: dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), group, a),
    "all_reduce": _all_reduce,
    "broadcast": lambda group, a: dist.broadcast(torch.ones(2), 0, group, a),
    "reduce": lambda group, a: dist.reduce(torch.ones(2), 0, group=group, async_op=a),
    "reduce_scatter_tensor": lambda group, a: dist.reduce_scatter_tensor(
        torch.empty(2), torch.ones(4), group=group, async_op=a
    ),
    "all_gather_single": lambda group, a: dist.all_gather_single(torch.empty(4), torch.ones(2), group, a),
    "reduce_scatter_single": lambda group, a: dist.reduce_scatter_single(
        torch.empty(2), torch.ones(4), group=group, async_op=a
    ),
    "barrier": lambda group, a: dist.barrier(group, a),
}
MOVED = {
    "all_to_all_single": 4,  # two floats, one of them to the other rank
    "all_to_all": 8,
    "all_gather": 8,
    "all_gather_into_tensor": 8,
    "all_reduce": 8,
    "broadcast": 8,
    "reduce": 8,
    "reduce_scatter_tensor": 8,
    "all_gather_single": 8,
    "reduce_scatter_single": 8,
    "barrier": 0,
}


def _names(async_op: bool, name: str | None) -> list[list[tuple[str, str, int | None]]]:
    group, seen = _group(name), []
    with ExitStack() as stack:
        timeline = _watched(stack)
        for call in CALLS.values():
            work = call(group, async_op)
            if async_op:
                work.wait()
            seen.append([(c.name, c.key, c.moved) for c in _seen(timeline)])
            timeline.open_step()
    return seen


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("group", [None, *GROUPS])
def test_every_collective_is_seen_once_with_its_name_and_bytes(group: str | None, async_op: bool) -> None:
    first, second = run_distributed(_names, 2, async_op, group)
    assert first == second, "the ranks agree on names and keys"
    for name, seen in zip(CALLS, first):
        ((found, key, moved),) = seen
        assert (found, moved) == (name, MOVED[name])
        assert key.startswith("world:") == (group is None)
    assert len({key for ((_, key, _),) in first}) == len(CALLS)


def _unseen() -> dict[str, int]:
    rank, mine, stock, counts = dist.get_rank(), make_group(), dist.new_group(), {}
    originals = {name: getattr(dist, name) for name in NAMES}
    with ExitStack() as stack:
        timeline = _watched(stack, ignored_groups=[mine, stock])
        for work in [dist.isend(torch.ones(1), group_dst=1 - rank, group=stock), dist.irecv(torch.ones(1), group=stock)]:
            assert work is not None
            work.wait()
        _all_reduce(mine, False)
        counts["groups left out"] = len(_seen(timeline))
        _all_reduce(None, False)  # no step is open
        timeline.open_step()
        counts["between steps"] = len(_seen(timeline))
        timeline.open_step()
        with timeline.collective("mine"):
            _all_reduce(None, False)
        counts["inside another"] = len(_seen(timeline)) - 1
    timeline.open_step()
    _all_reduce(None, False)
    counts["afterwards"] = len(_seen(timeline))
    assert originals == {name: getattr(dist, name) for name in NAMES}
    return counts


def test_what_is_nobodys_business_is_not_seen() -> None:
    for counts in run_distributed(_unseen, 2):
        assert len(counts) == 4
        assert not any(counts.values()), counts


def _in_a_thread() -> tuple[int, list[str], bool]:
    with ExitStack() as stack:
        timeline = _watched(stack)
        thread = threading.Thread(target=_all_reduce, args=(None, False))
        thread.start()
        thread.join()
        (seen,) = timeline.background
        return len(_seen(timeline)), [seen.name], seen.arrive < seen.done


def test_a_collective_of_another_thread_is_in_the_background() -> None:
    assert run_distributed(_in_a_thread, 2) == [(0, ["all_reduce"], True)] * 2


def _across_steps() -> list[int]:
    with ExitStack() as stack:
        timeline = _watched(stack)
        work = _all_reduce(None, True)
        first = _seen(timeline)
        timeline.open_step()
        work.wait()
        return [len(first), len(_seen(timeline))]


def test_a_collective_belongs_to_the_step_that_waits_for_it() -> None:
    assert run_distributed(_across_steps, 2) == [[0, 1]] * 2


def _failing() -> tuple[str, bool]:
    group = make_group()
    with ExitStack() as stack:
        timeline = _watched(stack)
        rows = 2 if dist.get_rank() else 4
        failed = outcome(dist.all_to_all_single, torch.empty(rows), torch.ones(rows), group=group)
        (collective,) = _seen(timeline)
        return failed.kind, collective.end is not None


def test_the_wait_for_a_collective_that_fails_has_an_end() -> None:
    assert run_distributed(_failing, 2) == [("DistBackendError", True)] * 2


def _left_alone() -> dict[str, int]:
    rank, counts = dist.get_rank(), {}
    first = dist.new_group([0])
    with ExitStack() as stack:
        timeline = _watched(stack)
        dist.all_reduce(torch.ones(1), group=first)  # torch makes it a warning on rank 1
        counts["another's group"] = len(_seen(timeline))
        timeline.open_step()
        total = torch.compile(_summed, fullgraph=True, backend="eager")(torch.full((1,), float(rank)))
        assert total.item() == 1
        counts["compiled"] = len(_seen(timeline))
        timeline.open_step()
        dist.all_reduce(torch.eye(2).to_sparse())
        (sparse,) = _seen(timeline)
        assert sparse.moved is None
    return counts


def _summed(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


@pytest.mark.slow
def test_what_torch_does_in_its_own_way_works_as_without() -> None:
    one, other = run_distributed(_left_alone, 2)
    assert one == {"another's group": 1, "compiled": 0}
    assert other == {"another's group": 0, "compiled": 0}


def _synchronized() -> int:
    with ExitStack() as stack:
        timeline = _watched(stack)
        _all_reduce(None, True).synchronize()
        return len(_seen(timeline))


def test_a_work_may_be_synchronized_instead() -> None:
    assert run_distributed(_synchronized, 2) == [1, 1]


# -- several at once

TOGETHER: dict[str, tuple[Callable[[], Any], tuple[str, int]]] = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(2)), ("all_reduce (coalesced)", 16)),
    "all_gather": (
        lambda: dist.all_gather_single(torch.empty(4), torch.ones(2)),
        ("all_gather_single (coalesced)", 16),
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter_single(torch.empty(2), torch.ones(4)),
        ("reduce_scatter_single (coalesced)", 16),
    ),
}


def _coalesced(async_op: bool) -> dict[str, Any]:
    """Rank 1 is late by ``LATE``, and nobody waits before it is."""
    found = {}
    with ExitStack() as stack:
        timeline = _watched(stack)
        for name, (call, _) in TOGETHER.items():
            time.sleep(LATE * dist.get_rank())
            with dist._coalescing_manager(async_ops=async_op) as works:
                call()
                call()
            if async_op:
                works.wait()
            found[name] = [(c.name, c.key, c.moved, c.end - c.arrive) for c in _seen(timeline)]
            timeline.open_step()
    return found


def _coalescing_fails() -> int:
    with ExitStack() as stack:
        timeline = _watched(stack)
        with pytest.raises(ZeroDivisionError), dist._coalescing_manager():
            raise ZeroDivisionError
        return len(_seen(timeline))


def test_what_fails_before_it_runs_is_no_collective() -> None:
    assert run_distributed(_coalescing_fails, 2) == [0, 0]


def _coalesced_by_function() -> list[Any]:
    with ExitStack() as stack:
        timeline = _watched(stack)
        time.sleep(LATE * dist.get_rank())
        dist.all_reduce_coalesced([torch.ones(2), torch.ones(2)])
        return [(c.name, c.key, c.moved, c.end - c.arrive) for c in _seen(timeline)]


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("way", TOGETHER)
def test_coalesced_collectives_are_one(way: str, async_op: bool, coalesced: Any) -> None:
    ((name, key, moved, early),), ((other, other_key, _, late),) = (rank[way] for rank in coalesced[async_op])
    assert (name, key) == (other, other_key)
    assert (name, moved) == TOGETHER[way][1]
    assert early > 0.8 * LATE > 0.4 * LATE > late


@pytest.fixture(scope="module")
def coalesced() -> dict[bool, list[dict[str, Any]]]:
    return {async_op: run_distributed(_coalesced, 2, async_op) for async_op in (False, True)}


def test_a_function_for_several_tensors_is_one() -> None:
    ((name, key, moved, early),), ((_, other, _, late),) = run_distributed(_coalesced_by_function, 2)
    assert (name, moved) == ("all_reduce_coalesced", 16) and key == other
    assert early > 0.8 * LATE > 0.4 * LATE > late


# -- bytes over a rank's link, of four ranks

RANKS = 4
FOUR = SimpleNamespace(size=lambda: RANKS)
ROW = torch.zeros(8, dtype=torch.float64)  # 64 bytes
WHOLE = torch.zeros(RANKS * 8, dtype=torch.float64)
ROWS = [ROW] * RANKS

BYTES: dict[str, tuple[tuple[Any, ...], int | None]] = {
    "_all_gather_base": ((WHOLE, ROW), 192),
    "_reduce_scatter_base": ((ROW, WHOLE), 192),
    "all_gather_coalesced": (([ROWS, ROWS], [ROW, ROW]), 384),
    "all_gather_single": ((WHOLE, ROW), 192),
    "all_reduce_coalesced": (([ROW, ROW],), 192),
    "monitored_barrier": ((), 0),
    "reduce_scatter_single": ((ROW, WHOLE), 192),
    "all_gather": ((ROWS, ROW), 192),
    "all_gather_into_tensor": ((WHOLE, ROW), 192),
    "all_gather_object": (([None] * RANKS, ROW), None),
    "all_reduce": ((ROW,), 96),
    "all_to_all": ((ROWS, ROWS), 192),
    "all_to_all_single": ((WHOLE, WHOLE), 192),
    "barrier": ((), 0),
    "broadcast": ((ROW, 0), 64),
    "broadcast_object_list": (([ROW], 0), None),
    "gather": ((ROW, ROWS), 192),
    "gather_object": ((ROW, None), None),
    "reduce": ((ROW, 0), 64),
    "reduce_scatter": ((ROW, ROWS), 192),
    "reduce_scatter_tensor": ((ROW, WHOLE), 192),
    "scatter": ((ROW, ROWS, 0), 192),
    "scatter_object_list": (([None], [ROW], 0), None),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of(name: str) -> None:
    arguments, expected = BYTES[name]
    assert moved_bytes(name, arguments, {"async_op": False, "group": None}, FOUR) == expected


def test_uneven_splits_and_keywords() -> None:
    kwargs = {"output": torch.zeros(100), "input": torch.zeros(40), "output_split_sizes": [25] * 4}
    assert moved_bytes("all_to_all_single", (), kwargs, FOUR) == 300
    assert moved_bytes("gather", (torch.zeros(0),), {"gather_list": []}, FOUR) == 0


def test_one_rank_moves_nothing() -> None:
    assert moved_bytes("all_reduce", (ROW,), {}, SimpleNamespace(size=lambda: 1)) == 0


def test_without_a_group_it_is_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert moved_bytes("all_gather_into_tensor", (WHOLE, ROW), {}, None) == 128
