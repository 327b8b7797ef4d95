"""Two processes, of which one tells and one may die."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_ranks_pair
from two_ranks_pair import PairFailed, Rank

from tests.helpers.fake_cuda import pretend_cuda

pytestmark = pytest.mark.slow


def test_what_rank_0_says_comes_at_once() -> None:
    said = two_ranks_pair.run(_says_and_waits, timeout=60)
    assert next(said) == "early"
    said.close()  # long before it ends


def test_a_killed_rank_1_is_no_failure() -> None:
    assert list(two_ranks_pair.run(_survives, timeout=60, group_timeout=20)) == ["noticed"]


@pytest.mark.parametrize(
    ("end", "told"), [("_exits", "rank 1: died with exit code 3"), ("_raises", "rank 1: (?s:.*)the peer gives up")]
)
def test_a_peer_that_fails_ends_the_run(end: str, told: str) -> None:
    start = time.monotonic()
    with pytest.raises(PairFailed, match=told):
        list(two_ranks_pair.run(globals()[end], timeout=100))
    assert time.monotonic() - start < 50


def test_a_killed_rank_0_is_a_failure() -> None:
    with pytest.raises(PairFailed, match="rank 0: died with exit code -9"):
        list(two_ranks_pair.run(_rank_0_dies, timeout=60))


@pytest.mark.parametrize("work", ["_hangs", "_hangs_alone"])
def test_a_run_that_hangs_is_ended(work: str) -> None:
    with pytest.raises(TimeoutError, match="did not finish within 8 s"):
        list(two_ranks_pair.run(globals()[work], timeout=8))


def test_nobody_else_takes_the_port_before_rank_0_listens() -> None:
    assert list(two_ranks_pair.run(_another_wants_the_port, timeout=60)) == [errno.EADDRINUSE, 2.0]


def _another_wants_the_port(rank: Rank) -> None:
    if rank.rank == 0:
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            except OSError as error:
                rank.say(error.errno)
    rank.init_gloo()
    total = torch.ones(())
    dist.all_reduce(total)
    rank.say(total.item())


def _says_and_waits(rank: Rank) -> None:
    rank.say("early")
    time.sleep(50)


def _survives(rank: Rank) -> None:
    rank.init_gloo()
    if rank.rank:
        rank.die()
    with pytest.raises(RuntimeError):
        dist.barrier()
    rank.say("noticed")


def _exits(rank: Rank) -> None:
    _then_wait(rank, lambda: os._exit(3))


def _raises(rank: Rank) -> None:
    def give_up() -> None:
        raise ValueError("the peer gives up")

    _then_wait(rank, give_up)


def _then_wait(rank: Rank, end: Callable[[], None]) -> None:
    rank.init_gloo()
    if rank.rank:
        end()
    dist.barrier()


def _rank_0_dies(rank: Rank) -> None:
    if rank.rank == 0:
        rank.die()


def _hangs(rank: Rank) -> None:
    time.sleep(100)


def _hangs_alone(rank: Rank) -> None:
    if rank.rank == 0:
        time.sleep(100)


STUCK = """
import sys, time
sys.path[:0] = [{folder!r}, {tests!r}]
from multiprocessing.popen_fork import Popen
import two_ranks_pair, test_two_ranks_pair
Popen._send_signal = lambda process, number: None
two_ranks_pair.ENDING = 0.2
said = two_ranks_pair.run(test_two_ranks_pair._says_and_waits, timeout=60)
assert next(said) == "early"
said.close()
"""


def test_a_process_that_cannot_be_killed_is_left() -> None:
    """Neither the run nor the end of the process that made it waits for one that is stuck."""
    start = time.monotonic()
    code = STUCK.format(folder=str(Path(two_ranks_pair.__file__).parent), tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=45)
    assert done.returncode == 0 and done.stderr.count("could not be killed within 0.2 s") == 2, done.stderr
    assert time.monotonic() - start < 45  # they sleep for 50


def test_cuda_is_in_use_before_a_group_is_made() -> None:
    """Or the lane would not see that both ranks have one GPU, and give CUDA tensors to NCCL, which refuses that."""
    ((gpu, uses_nccl, shared),) = two_ranks_pair.run(_makes_a_lane_on_a_gpu, timeout=60)
    assert gpu == ["GPU-0", "GPU-0"] and not uses_nccl and shared == "ranks 0 and 1 share a GPU"


def _makes_a_lane_on_a_gpu(rank: Rank) -> None:
    used: list[object] = []
    pretend_cuda("GPU-0", visible=1, bound=False)
    torch.cuda.is_initialized = lambda: bool(used)  # as torch's: not before the process has touched CUDA
    torch.cuda.set_device = used.append
    rank.init_gloo()
    lane: Any = rank.make_lane("native")
    topology = lane._executor.topology
    rank.say(([each.gpu for each in topology.hardware], lane._backends.uses_nccl, topology.find_shared_gpu()))
