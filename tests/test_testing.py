"""run_distributed: results by rank, and every way a rank can fail."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.testing import RankFailed, run_distributed


def _sum(value: int) -> int:
    tensor = torch.tensor(value + dist.get_rank())
    dist.all_reduce(tensor)
    return int(tensor)


def test_results_by_rank() -> None:
    assert run_distributed(_sum, 3, 10) == [33, 33, 33]
    offset = 5
    assert run_distributed(lambda: int(os.environ["RANK"]) + offset, 2, init=False) == [5, 6]


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the needle")
    dist.barrier()


def test_traceback_of_the_rank_that_raised() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 1: Traceback.*_raise_on_one.*the needle"):
        run_distributed(_raise_on_one, 2)
    assert time.monotonic() - started < 60


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_killed_rank() -> None:
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9"):
        run_distributed(_die_on_one, 2)


def test_timeout() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not finish within 1 s"):
        run_distributed(lambda: time.sleep(60), 2, timeout=1.0, init=False)
