"""Tests of run_distributed: results by rank, and every kind of failure of a rank."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

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


def test_a_process_that_has_a_group_is_refused() -> None:
    def inside() -> list[Any]:
        with pytest.raises(ValueError, match="destroy_process_group"):
            run_distributed(_sum, 2, 0)
        return run_distributed(lambda: "own", 1, init=False)

    assert run_distributed(inside, 1) == [["own"]]


def _error_of(action: Any, port: int) -> int | None:
    """Return the error of another program that connects to the port or binds it."""
    with socket.socket() as other:
        try:
            getattr(other, action)(("127.0.0.1", port))
        except OSError as error:
            return error.errno
    return None


def _listens_late(left: Barrier) -> list[Any]:
    """Create a group twice, each time after another program has tried the port."""
    found: list[Any] = []
    for _ in range(2):
        if os.environ["RANK"] == "0":
            found += [_error_of(action, int(os.environ["MASTER_PORT"])) for action in ("connect", "bind")]
        dist.init_process_group("gloo")
        found.append(_sum(0))
        dist.destroy_process_group()
        left.wait(60)  # else a rank could still reach the store of the first group
    return found


def test_no_other_program_takes_the_port_before_a_rank_listens() -> None:
    refused = [errno.ECONNREFUSED, errno.EADDRINUSE, 1]
    assert run_distributed(_listens_late, 2, get_context("fork").Barrier(2), init=False) == [refused * 2, [1, 1]]


def _fails_on_one(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise KeyError("the needle")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "named"),
    [("raises", r"(?s)rank 1: Traceback.*_fails_on_one.*the needle"), ("is killed", "rank 1: died with exit code -9")],
)
def test_a_rank_that_fails_is_named(how: str, named: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=named):
        run_distributed(_fails_on_one, 2, how)
    assert time.monotonic() - started < 60


def test_timeout() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] .* 1 s"):
        run_distributed(lambda: time.sleep(60), 2, timeout=1.0, init=False)
