"""TorchRec over a freescale group has the losses, tables and optimizer states that it has over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.process_group import FreeScaleGroup
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, TIMEOUT, differs, make_group
from tests.helpers.sparse_training import KEYS, build, train

pytestmark = pytest.mark.slow


def _counted(group: FreeScaleGroup, run: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how many exchanges went over the group."""
    timeline = Timeline()
    timeline.enable(torch.device("cpu"))
    with collectives_on(timeline):
        timeline.open_step()
        result = run()
    step = timeline.close_step()
    assert step is not None
    ours = [c for c in step.collectives if c.key.startswith(f"{group.group_name}:")]
    return result, sum(collective.name == "all_to_all_single" for collective in ours)


def _trained(pipelined: bool) -> str:
    group = make_group(**SMALL)
    assert isinstance(group, FreeScaleGroup)
    mine, calls = _counted(group, lambda: train(group, pipelined))
    gloo = train(dist.new_group(backend="gloo", timeout=TIMEOUT), pipelined)
    assert len(set(gloo["losses"])) == 5, "the loss must move, or equality means nothing"
    torch.manual_seed(7)
    initial = {name: value for name, value in build(dist.group.WORLD).state_dict().items() if "rows" in name}
    for name, value in initial.items():
        assert not torch.equal(value.local_shards()[0].tensor, mine["weights"][name][0])
    assert sum(f"bag_{key}" in name for key in KEYS for name in mine["weights"]) == len(KEYS)
    assert any(part.abs().max() > 0 for parts in mine["states"].values() for part in parts if part.numel())
    assert calls >= 5 * 4
    return differs(mine, gloo)


@pytest.mark.parametrize("pipelined", [False, True], ids=["by_hand", "TrainPipelineSparseDist"])
@pytest.mark.parametrize("size", [2, 3])
def test_training_is_that_of_gloo(size: int, pipelined: bool) -> None:
    assert run_distributed(_trained, size, pipelined, timeout=100) == [""] * size


def _gathered() -> str:
    """As checkpoints gather tables on one rank."""
    told = []
    for group in (make_group(**SMALL), dist.new_group(backend="gloo", timeout=TIMEOUT)):
        state = build(group).state_dict()
        whole = {}
        for name in (name for name in state if "rows" in name or "table" in name or "columns" in name):
            out = torch.full(state[name].size(), 77.0) if dist.get_rank() == 0 else None
            state[name].gather(0, out, dtype=torch.float32)
            whole[name] = out
        told.append(whole)
    assert len(told[1]) == 5 and (dist.get_rank() > 0 or not any((table == 77).any() for table in told[1].values()))
    return differs(*told)


def test_tables_are_gathered_as_by_gloo() -> None:
    assert run_distributed(_gathered, 2) == ["", ""]


def _moved() -> list[str]:
    """A rank without a shard of a table has no tensor to ask for its device."""
    state = build(make_group()).state_dict()
    return sorted({str(value.to(torch.float64).dtype) for name, value in state.items() if "bag_table" in name})


def test_tables_of_other_ranks_can_be_converted() -> None:
    assert run_distributed(_moved, 2) == [["torch.float64"]] * 2


def _both_at_once() -> Any:
    """Sparse traffic on a lane, the dense part on the default group, as a user divides them."""
    told = []
    for backend in ("freescale", "gloo"):
        dense, group = (
            dist.new_group(backend="gloo"),
            make_group() if backend == "freescale" else dist.new_group(backend="gloo"),
        )
        draw = torch.Generator().manual_seed(dist.get_rank())
        summed, moved = [], []
        for _ in range(20):
            gradient, rows = torch.randn(3000, generator=draw), torch.randn(2000, generator=draw)
            reducing = dist.all_reduce(gradient, group=dense, async_op=True)
            out = torch.zeros(2000)
            moving = dist.all_to_all_single(out, rows, group=group, async_op=True)
            reducing.wait()
            moving.wait()
            summed.append(gradient)
            moved.append(out)
        told.append([summed, moved])
    return differs(*told)


def test_a_lane_beside_the_dense_group() -> None:
    assert run_distributed(_both_at_once, 2) == ["", ""]
