"""The notices of ranks in processes with other stores, sockets and ends than those of a usual run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_freescale.comm.rank_notices import notices_of_ranks
from lightning_freescale.comm.transports import p2p as p2p_module
from lightning_freescale.testing import _reserved_port, run_distributed

TIMEOUT = timedelta(seconds=20)


def _notices_over(kind: str, folder: Path) -> tuple[bool, str]:
    """Return whether a pipe is blocking as before, and what a rank adds to the error of a collective."""
    rank = dist.get_rank()
    if kind == "file":
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    else:
        socket.setdefaulttimeout(5)
    pipe, _ = Pipe()
    notices = notices_of_ranks(TIMEOUT)
    assert notices is not None
    try:
        error = ValueError("too little") if rank else RuntimeError("Connection closed by peer")
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


def _connect_in_vain() -> tuple[str, float]:
    """Connect to a rank that never comes, until a function says that it has failed."""
    began = time.monotonic()
    p2p_module.HAS_FAILED.append(lambda: time.monotonic() > began + 0.5)
    with pytest.raises(dist.DistBackendError) as failure:
        p2p_module.GlooP2P(dist.HashStore(), 0, 2, timedelta(seconds=100), [0, 1])
    return str(failure.value), time.monotonic() - began


def test_a_rank_that_connects_hears_of_a_failure_elsewhere() -> None:
    ((error, seconds),) = run_distributed(_connect_in_vain, 1)
    assert "another rank has failed" in error
    assert 0.5 < seconds < 10.0


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
    print("failure:", notices._failure, notices._has_failed())
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
