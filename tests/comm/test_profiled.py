"""torch's profiler with a schedule, around calls of the group: what is posted ahead outlives its windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import everyone_sends, make_group


def _blocking(group: Any) -> bool:
    return everyone_sends(group, 1000)


def _in_the_background(group: Any) -> bool:
    return everyone_sends(group, 1000, async_op=True)


def _exchange(group: Any) -> bool:
    sizes, received = [1000] * group.size(), torch.empty(1000 * group.size())
    group.exchange(received, torch.full_like(received, float(group.rank())), sizes, sizes)
    return bool(received[-1] == group.size() - 1)


def _profiled(call: Callable[[Any], bool]) -> int:
    group, windows = make_group(), []
    plan = schedule(wait=1, warmup=1, active=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=windows.append) as profiler:
        for _ in range(20):
            assert call(group)
            profiler.step()
    dist.barrier()
    return len(windows)


@pytest.mark.parametrize("call", [_blocking, _in_the_background, _exchange])
def test_a_profiler_with_a_schedule(call: Callable[[Any], bool]) -> None:
    assert run_distributed(_profiled, 2, call) == [5, 5]
