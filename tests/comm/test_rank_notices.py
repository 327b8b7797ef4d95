"""The notices of ranks in processes with other stores, sockets and ends than those of a usual run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_freescale import FreeScaleStrategy
from lightning_freescale._lightning.stop_points import SIGTERMException
from lightning_freescale.comm.rank_notices import notices_of_ranks
from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.testing import _reserved_port, run_distributed
from tests.helpers.comm_groups import sockets

TIMEOUT = timedelta(seconds=20)


def _notices_over(kind: str, folder: Path) -> tuple[bool, str]:
    """Return whether a pipe is blocking as before, and what a rank adds to the error of a collective."""
    rank = dist.get_rank()
    if kind == "file":
        dist.barrier()  # the other rank may still connect
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    else:
        socket.setdefaulttimeout(5)
    pipe, _ = Pipe()
    notices = notices_of_ranks(TIMEOUT)
    assert notices is not None
    try:
        long = "long " * 1000
        error = ValueError("too little") if rank else RuntimeError(f"{long}Connection closed by peer {long}")
        cause = notices.tell_or_explain(error)
    finally:
        notices.close()
        socket.setdefaulttimeout(None)
    return os.get_blocking(pipe.fileno()), cause


@pytest.mark.parametrize("kind", ["file", "timeout"])
def test_other_stores_and_default_timeouts_of_sockets(kind: str, tmp_path: Path) -> None:
    first, second = run_distributed(_notices_over, 2, kind, tmp_path)
    assert first == (True, "rank 1 has failed first: ValueError: too little")
    assert second == (True, "")


def _ended_by(error: BaseException) -> str:
    """Return the type of the exception that ends rank 0 after rank 1 has failed with ``error``."""
    strategy = FreeScaleStrategy()
    strategy._notices = notices = notices_of_ranks(TIMEOUT)
    assert notices is not None
    ended = strategy.ended_by(error if dist.get_rank() else RuntimeError("Connection closed by peer"))
    notices.close()
    return type(ended).__name__


def test_only_a_sigterm_on_another_rank_ends_a_rank_as_a_sigterm() -> None:
    errors = (KeyError("a text with the word SIGTERMException"), SIGTERMException())
    ended = run_distributed(lambda: [_ended_by(error) for error in errors], 2)
    assert ended == [["RuntimeError", "SIGTERMException"], ["KeyError", "SIGTERMException"]]


def _close_one_after_another() -> int:
    """Return how many sockets of the notices are open after rank 1 has closed them, when rank 0 has done so before."""
    before, notices = sockets(), notices_of_ranks(TIMEOUT)
    assert notices is not None
    if dist.get_rank() == 1:
        time.sleep(1.0)
    notices.close()
    return len(sockets() - before)


def test_close_leaves_no_connection_to_a_rank_that_has_closed_before() -> None:
    _, left = run_distributed(_close_one_after_another, 2)
    assert left == 1, "that to the store, until the notices are deleted"


def _fork_and_close() -> str:
    """Rank 1 forks a process that closes the inherited notices, and is then killed. Return what rank 0 hears of it."""
    notices = notices_of_ranks(TIMEOUT)
    assert notices is not None
    if dist.get_rank() == 1:
        if (child := os.fork()) == 0:
            notices.close()
            os._exit(0)
        os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.0)
    return notices.tell_or_explain(RuntimeError("Connection closed by peer"))


def test_a_forked_process_sends_no_farewell(survivors: Callable[..., dict[int, str]]) -> None:
    assert survivors(_fork_and_close, 2) == {0: "rank 1 has ended: it was killed, or exited without an error"}


def _connect_in_vain() -> tuple[str, float, list[str]]:
    """Connect to a rank that fails half a second later. Return the error, the seconds, and the threads that still wait."""
    notices, began = notices_of_ranks(TIMEOUT), time.monotonic()
    assert notices is not None
    if dist.get_rank() == 1:
        time.sleep(0.5)
        notices.tell_or_explain(KeyError("the needle"))
        return "", 0.0, []
    with pytest.raises(dist.DistBackendError) as failure:
        GlooP2P(dist.PrefixStore("x", dist.distributed_c10d._get_default_store()), 0, 2, timedelta(seconds=100), [0, 1])
    seconds, threads = time.monotonic() - began, [thread.name for thread in threading.enumerate()]
    return str(failure.value), seconds, [name for name in threads if "connect" in name]


def test_a_rank_that_connects_hears_of_a_failure_elsewhere_and_waits_no_more() -> None:
    """A thread that still waits while the interpreter exits would end the process by an abort."""
    (error, seconds, threads), _ = run_distributed(_connect_in_vain, 2)
    assert "another rank has failed" in error
    assert 0.5 < seconds < 10.0
    assert threads == []


EXITS = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from lightning_freescale.comm.rank_notices import notices_of_ranks
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[2], rank=rank, world_size=2)
notices = notices_of_ranks(timedelta(seconds=20))
if rank == 0:
    time.sleep(3)
    print("failure:", notices._failure, notices._another_failed())
    print(notices.tell_or_explain(RuntimeError("Connection closed by peer")))
"""


@pytest.mark.slow
def test_a_program_that_ends_without_an_error_is_no_failure() -> None:
    with _reserved_port() as port:
        run = [sys.executable, "-c", EXITS]
        ranks = [subprocess.Popen([*run, str(rank), str(port)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0].startswith("failure:  False\nrank 1 has ended; locations of the ranks: rank 0 in ")
