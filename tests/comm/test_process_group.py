"""An observer of a group sees every collective, when this rank arrived at it and when it waited for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import FreeScaleGroup
from lightning_freescale.profiling.timeline import Collective, StepRecord, Timeline
from lightning_freescale.testing import run_distributed
from tests.comm.conftest import make_group, outcome


def _observed(**options: Any) -> tuple[Any, Timeline]:
    group, timeline = make_group(**options), Timeline()
    assert isinstance(group, FreeScaleGroup)
    group.observer = timeline
    timeline.enable(torch.device("cpu"))
    dist.barrier()
    timeline.open_step()
    return group, timeline


def _seen(timeline: Timeline) -> list[Collective]:
    step = timeline.close_step()
    assert isinstance(step, StepRecord)
    return step.collectives


def _late(async_op: bool, transport: str, call: Callable[..., Any]) -> tuple[int, float, float]:
    """Number of collectives, seconds from the arrival to the wait, seconds of the wait."""
    group, timeline = _observed(transport=transport)
    time.sleep(0.2 * dist.get_rank())
    work = call(group, async_op)
    if async_op:
        time.sleep(0.05)
        work.wait()
        work.wait()  # a second wait is no second collective
    collectives = _seen(timeline)
    first = collectives[0]
    return len(collectives), first.start - first.arrive, first.end - first.start


def _all_to_all(group: Any, async_op: bool) -> Any:
    return dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group, async_op=async_op)


def _all_reduce(group: Any, async_op: bool) -> Any:
    return dist.all_reduce(torch.ones(2), group=group, async_op=async_op)


CASES = {
    "of the transport": ("auto", _all_to_all),
    "through torch's backend": ("native", _all_to_all),
    "delegated": ("auto", _all_reduce),
}


@pytest.mark.parametrize("case", CASES)
def test_an_async_collective_is_seen_to_arrive_when_issued_and_to_wait_when_waited_for(case: str) -> None:
    early, late = run_distributed(_late, 2, True, *CASES[case])
    assert early[0] == late[0] == 1
    assert early[1] >= 0.05 and late[1] >= 0.05
    assert early[2] > 0.1 > late[2] >= 0


def test_a_sync_collective_is_seen_to_wait_in_the_call() -> None:
    early, late = run_distributed(_late, 2, False, *CASES["of the transport"])
    assert early[0] == late[0] == 1
    assert 0 <= early[1] < 0.1
    assert early[2] > 0.1 > late[2] >= 0


CALLS: dict[str, tuple[str, Callable[[Any, bool], Any]]] = {
    "all_to_all_single": ("all_to_all_single", _all_to_all),
    "all_to_all": ("all_to_all", lambda group, a: dist.all_to_all(_pair(), _pair(), group, a)),
    "all_gather": ("all_gather", lambda group, a: dist.all_gather(_pair(), torch.ones(2), group, a)),
    "all_gather_into_tensor": (
        "all_gather_single",
        lambda group, a: dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), group, a),
    ),
    "all_reduce": ("allreduce", _all_reduce),
    "broadcast": ("broadcast", lambda group, a: dist.broadcast(torch.ones(2), 0, group, a)),
    "reduce": ("reduce", lambda group, a: dist.reduce(torch.ones(2), 0, group=group, async_op=a)),
    "reduce_scatter_tensor": (
        "reduce_scatter",
        lambda group, a: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4), group=group, async_op=a),
    ),
}


def _pair() -> list[torch.Tensor]:
    return [torch.empty(2), torch.empty(2)]


def _names(async_op: bool, transport: str) -> list[list[str]]:
    group, timeline = _observed(transport=transport)
    seen = []
    for _, call in CALLS.values():
        work = call(group, async_op)
        if async_op:
            work.wait()
        seen.append([collective.name for collective in _seen(timeline) if collective.arrive is not None])
        timeline.open_step()
    return seen


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_collective_is_seen_once_by_its_name(async_op: bool) -> None:
    for seen in run_distributed(_names, 2, async_op, "auto"):
        for (name, _), names in zip(CALLS.values(), seen):
            assert len(names) == 1
            assert name in names[0]


def test_every_collective_of_torchs_own_backend_is_seen_once() -> None:
    for seen in run_distributed(_names, 2, True, "native"):
        assert [len(names) for names in seen] == [1] * len(CALLS)


def _unseen() -> tuple[int, list[int]]:
    group, timeline = _observed()
    rank = dist.get_rank()
    dist.barrier(group=group)
    for work in [dist.isend(torch.ones(1), group=group, group_dst=1 - rank), dist.irecv(torch.ones(1), group=group)]:
        assert work is not None
        work.wait()
    messages = len(_seen(timeline))
    timeline.disable()
    _all_to_all(group, False)
    timeline.enable(torch.device("cpu"))
    timeline.open_step()
    other = make_group()
    _all_to_all(other, False)
    failed = outcome(dist.all_to_all_single, torch.empty(3), torch.ones(3), group=group)
    assert failed.kind == "ValueError"
    return messages, [len(_seen(timeline))]


def test_messages_barriers_and_what_never_became_a_collective_are_not_seen() -> None:
    assert run_distributed(_unseen, 2) == [(0, [0])] * 2


def _failing() -> tuple[str, bool]:
    group, timeline = _observed()
    rows = 2 if dist.get_rank() else 4
    failed = outcome(dist.all_to_all_single, torch.empty(rows), torch.ones(rows), group=group)
    (collective,) = _seen(timeline)
    return failed.kind, collective.end is not None


def test_the_wait_for_a_collective_that_fails_has_an_end() -> None:
    assert run_distributed(_failing, 2) == [("DistBackendError", True)] * 2
