"""Processes that are forked from a rank, as workers of a loader are, survive what the rank has thrown away."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import Recommender, Samples, collate, trainer


@pytest.mark.parametrize("backend", ["gloo", "freescale"])
def test_a_fork_leaves_groups_alone_that_wait_to_be_collected(backend: str) -> None:
    assert run_distributed(_throw_group_away_and_fork, 2, backend, timeout=60) == [0, 0]


def test_workers_of_a_second_fit_collect_garbage() -> None:
    assert run_distributed(_fit_twice, 2, timeout=120) == [2, 2]


def _throw_group_away_and_fork(backend: str) -> int:
    """Return the status of the forked process, or that it hangs."""
    gc.disable()
    group: Any = dist.new_group(backend=backend)
    dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group)
    dist.destroy_process_group(group)
    circle = [group]
    circle.append(circle)
    del group, circle
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError("the forked process hangs")


class CollectedBetween(Samples):
    """Workers collect garbage before every sample."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if get_worker_info() is not None:
            gc.collect()
        return super().__getitem__(index)


def _fit_twice() -> int:
    gc.disable()  # what the first fit leaves behind is still there when the workers of the second start
    data, done = CollectedBetween(32), 0
    for _ in range(2):
        run = trainer(devices=2)
        run.fit(Recommender(), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, num_workers=1))
        done += run.state.finished
        del run
    return done
