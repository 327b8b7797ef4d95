"""run_distributed: results by rank, and every way a rank can fail."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
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
    def inside() -> str:
        with pytest.raises(ValueError, match="destroy_process_group"):
            run_distributed(_sum, 2, 0)
        return str(run_distributed(lambda: "own", 1, init=False))

    assert run_distributed(inside, 1) == ["['own']"]


def _listens_late() -> list[Any]:
    """As a rank that takes a while to begin, on a machine where others look for ports; twice, as a group may be made anew."""
    told: list[Any] = []
    for _ in range(2):
        if os.environ["RANK"] == "0":
            with socket.socket() as other:
                told.append(other.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))))
                told.append(_refusal(int(os.environ["MASTER_PORT"])))
        dist.init_process_group("gloo")
        told.append(_sum(0))
        dist.destroy_process_group()
    return told


def _refusal(port: int) -> int | None:
    """What another program is told that wants the port."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno
    return None


def test_nobody_else_takes_the_port_before_a_rank_listens() -> None:
    refused = [errno.ECONNREFUSED, errno.EADDRINUSE, 1]
    assert run_distributed(_listens_late, 2, init=False) == [refused * 2, [1, 1]]


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
