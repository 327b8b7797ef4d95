"""Torch's functional collectives: a rank arrives when it calls one, and waits where the tensor is used."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.records import Collective, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed

LATE = 0.5
"""Seconds, of which a busy machine hides little."""


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
    timeline.open_step()
    return step.collectives


def _row() -> Tensor:
    return torch.full((4,), float(dist.get_rank()))


Group = Any
CALLS: dict[str, tuple[Callable[[Group], Any], int]] = {
    "broadcast": (lambda group: funcol.broadcast(_row(), 1, group), 16),
    "all_reduce": (lambda group: funcol.all_reduce(_row(), "sum", group), 16),
    "all_gather_single": (lambda group: funcol.all_gather_tensor(_row(), 0, group), 16),
    "reduce_scatter_single": (lambda group: funcol.reduce_scatter_tensor(_row(), "sum", 0, group), 8),
    "all_to_all_single": (lambda group: funcol.all_to_all_single(_row(), None, None, group), 8),
    "all_reduce_coalesced": (lambda group: funcol.all_reduce_coalesced([_row(), _row()], "sum", group), 32),
    "all_gather_single_coalesced": (lambda group: funcol.all_gather_single_coalesced([_row(), _row()], group), 32),
    "reduce_scatter_single_coalesced": (
        lambda group: funcol.reduce_scatter_single_coalesced([_row(), _row()], "sum", [0, 0], group),
        16,
    ),
}


def _used(result: Any) -> float:
    return sum((each + 0).sum().item() for each in (result if isinstance(result, list) else [result]))


def _late(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Rank 1 is late by ``LATE``; rank 0 does something else for a third of it before it uses what it got."""
    rank, found = dist.get_rank(), {}
    expected = {name: _used(call()) for name, call in calls.items()}
    with ExitStack() as stack:
        timeline = _watched(stack)
        for name, call in calls.items():
            time.sleep(LATE * rank)
            result = call()
            time.sleep(LATE / 3 * (1 - rank))
            assert _used(result) == expected[name]
            assert _used(result) == expected[name]  # is there, and no second collective
            found[name] = [(c.name, c.key, c.moved, c.start - c.arrive, c.end - c.arrive) for c in _seen(timeline)]
            dist.barrier()
            _seen(timeline)
    return found


def _all_late() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    group = dist.group.WORLD
    return _late({name: lambda call=call: call(group) for name, (call, _) in CALLS.items()})


@pytest.fixture(scope="module")
def all_late() -> list[dict[str, Any]]:
    return run_distributed(_all_late, 2)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_arrives_when_it_calls_and_waits_where_it_uses(name: str, all_late: list[dict[str, Any]]) -> None:
    (early,), (late,) = (rank[name] for rank in all_late)
    assert early[:3] == late[:3], "the ranks agree on name, key and bytes"
    assert (early[0], early[2]) == (name, CALLS[name][1])
    assert early[1].startswith("world:")
    assert early[3] >= LATE / 3, "not waited for before it is used"
    assert early[4] > 0.8 * LATE > 0.4 * LATE > late[4]


def _in_other_words() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    matrix = torch.arange(16.0).reshape(4, 4)
    rows = distribute_tensor(matrix, mesh, [Shard(0)])
    return _late(
        {
            "mesh": lambda: funcol.all_reduce(_row(), "sum", mesh),
            "dimension of a mesh": lambda: funcol.all_reduce(_row(), "sum", (mesh, 0)),
            "waits itself": lambda: funcol.all_gather_single(torch.ones(3, 4), 1, mesh),
            "DTensor": lambda: rows.redistribute(mesh, [Replicate()]).to_local(),
        }
    )


def test_groups_by_other_names_and_dtensor() -> None:
    one, other = run_distributed(_in_other_words, 2)
    for way, seen in one.items():
        ((name, key, _, _, waited),) = seen
        ((other_name, other_key, _, _, less),) = other[way]
        assert (name, key) == (other_name, other_key)
        assert waited > 0.8 * LATE > 0.4 * LATE > less, way


def _backward() -> tuple[list[tuple[str, str]], list[float], list[float]]:
    rank = dist.get_rank()
    with ExitStack() as stack:
        timeline = _watched(stack)
        x = torch.ones(4, requires_grad=True)
        y = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
        loss = (y * (rank + 1)).sum()
        time.sleep(LATE * rank)
        loss.backward()
        seen = _seen(timeline)
    return [(c.name, c.key) for c in seen], [c.end - c.arrive for c in seen], x.grad.tolist()


def test_backward_is_seen_where_it_waits() -> None:
    one, other = run_distributed(_backward, 2)
    assert one[0] == other[0]
    assert [name for name, _ in one[0]] == ["all_reduce", "functional backward"]
    assert one[1][1] > 0.8 * LATE > 0.4 * LATE > other[1][1]
    assert one[2] == other[2] == [6.0] * 4


def _total(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD) * 2


def _unseen() -> dict[str, int]:
    mine, counts = dist.new_group(), {}
    originals = dict(vars(funcol))
    with ExitStack() as stack:
        timeline = _watched(stack, [mine])
        _used(funcol.all_reduce(_row(), "sum", mine))
        counts["group left out"] = len(_seen(timeline))
        total = torch.compile(_total, fullgraph=True, backend="eager")(_row())
        assert total.tolist() == [2.0] * 4
        counts["compiled"] = len(_seen(timeline))
        with timeline.collective("mine"):
            _used(funcol.all_reduce(_row(), "sum", dist.group.WORLD))
        counts["inside another"] = len(_seen(timeline)) - 1
        timeline.close_step()
        pending = funcol.all_reduce(_row(), "sum", dist.group.WORLD)
        timeline.open_step()
        _used(pending)  # called between steps
        counts["called between steps"] = len(_seen(timeline))
        assert funcol.wait_tensor(torch.ones(2)).tolist() == [1, 1]
        counts["nothing to wait for"] = len(_seen(timeline))
    assert {name: value for name, value in vars(funcol).items() if originals.get(name) is not value} == {}
    return counts


def test_what_is_nobodys_business_is_not_seen() -> None:
    for counts in run_distributed(_unseen, 2):
        assert len(counts) == 5 and not any(counts.values()), counts
