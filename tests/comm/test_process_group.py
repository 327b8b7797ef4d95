"""The observed group does what gloo does, and tells who waited."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.comm.process_group import ObservedProcessGroup, observed_group
from lightning_freescale.profiling.timeline import Timeline
from lightning_freescale.testing import run_distributed


def _collectives(group: dist.ProcessGroup) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    results: list[Any] = []
    tensor = torch.arange(4.0) + rank
    dist.all_reduce(tensor, group=group)
    gathered = [torch.empty(4) for _ in range(size)]
    dist.all_gather(gathered, tensor + rank, group=group)
    flat = torch.empty(4 * size)
    dist.all_gather_into_tensor(flat, tensor, group=group)
    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, torch.arange(float(size)), group=group)
    sent = [rank + k + 1 for k in range(size)]
    received = [k + rank + 1 for k in range(size)]
    out = torch.empty(sum(received))
    work = dist.all_to_all_single(out, torch.full((sum(sent),), float(rank)), received, sent, group=group, async_op=True)
    work.wait()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    dist.broadcast(tensor, 0, group=group)
    dist.barrier(group=group)
    results += [tensor, *gathered, flat, scattered, out]
    return [value.tolist() for value in results] + objects


def _both() -> tuple[list[Any], list[Any]]:
    group = observed_group(Timeline(), timedelta(seconds=60))
    assert isinstance(group, ObservedProcessGroup)
    return _collectives(group), _collectives(dist.group.WORLD)


def test_same_results_as_gloo() -> None:
    for observed, plain in run_distributed(_both, 3):
        assert observed == plain


def _late() -> tuple[str, float, float]:
    timeline = Timeline()
    group = observed_group(timeline, timedelta(seconds=60))
    timeline.enable(torch.device("cpu"))
    dist.barrier()
    timeline.open_step()
    time.sleep(0.2 * dist.get_rank())
    work = dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group, async_op=True)
    time.sleep(0.05)
    work.wait()
    work.wait()  # a second wait is no second collective
    step = timeline.close_step()
    (collective,) = step.collectives
    return collective.name, collective.start - collective.arrive, collective.end - collective.start


def test_arrival_and_wait_are_seen() -> None:
    early, late = run_distributed(_late, 2)
    assert early[0] == late[0] == "all_to_all_single"
    assert early[1] >= 0.05
    assert early[2] > 0.1 > late[2]
