"""A rank may leave a group, or the process end, whatever is still under way: no hang, no crash, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.process_group import FreeScaleGroup
from lightning_freescale.testing import _reserved_port, run_distributed
from tests.helpers.comm_groups import (
    AT_ONCE,
    SOON,
    Outcome,
    everyone_sends,
    lane_threads,
    make_group,
    nothing_left,
    outcome,
)

ROWS = 300_000


def _normal(async_op: bool) -> bool:
    with nothing_left():
        groups = [make_group(chunk_bytes=4096), make_group(transport="native"), make_group(chunk_bytes=4096, name="others")]
        sound = all(everyone_sends(group, rows=10_000, async_op=async_op) for group in groups for _ in range(2))
        threads = lane_threads()
        for group in groups:
            dist.destroy_process_group(group)
        del groups, group
    return sound and bool(threads) is async_op


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_destroyed_group_leaves_no_thread_and_no_socket(size: int, async_op: bool) -> None:
    assert run_distributed(_normal, size, async_op) == [True] * size


def _in_flight() -> tuple[bool, bool]:
    with nothing_left():
        group, n = make_group(chunk_bytes=4096), dist.get_world_size()
        given = torch.full((ROWS * n,), dist.get_rank(), dtype=torch.uint8)
        outs = [torch.full_like(given, 99) for _ in range(3)]
        works = [dist.all_to_all_single(out, given, group=group, async_op=True) for out in outs]
        dist.destroy_process_group(group)
        arrived = all(torch.equal(out, torch.arange(n, dtype=torch.uint8).repeat_interleave(ROWS)) for out in outs)
        done = all(work.is_success() for work in works)
        del group
    return arrived, done


@pytest.mark.parametrize("size", [1, 2, 3])
def test_destroying_a_group_finishes_what_is_in_flight(size: int) -> None:
    assert run_distributed(_in_flight, size) == [(True, True)] * size


def _in_vain(timeout: float) -> tuple[Outcome, Outcome, Outcome] | None:
    """Rank 0 destroys the group while it waits for rank 1, which does not come."""
    with nothing_left():
        group = make_group(timeout=timeout)
        if dist.get_rank() == 1:
            dist.barrier()
            seen = None
        else:
            work = dist.all_to_all_single(torch.empty(4), torch.ones(4), group=group, async_op=True)
            destroyed = outcome(dist.destroy_process_group, group)
            seen = destroyed, outcome(work.wait), outcome(group.all_to_all_single, torch.empty(4), torch.ones(4))
            dist.barrier()
            del work
        if seen is None:
            dist.destroy_process_group(group)
        del group
    return seen


def test_destroying_a_group_whose_peer_does_not_come_ends_with_the_timeout() -> None:
    seen, _ = run_distributed(_in_vain, 2, 2.0, timeout=60)
    destroyed, waited, after = seen
    assert not destroyed.kind
    assert destroyed.seconds < SOON
    assert waited.kind == after.kind == "DistBackendError"
    assert waited.seconds < SOON
    assert "rank 1 did not come" in waited.text


def _aborted() -> tuple[Outcome, Outcome]:
    """Rank 0 aborts while it waits for rank 1."""
    with nothing_left():
        group = make_group()
        assert everyone_sends(group)
        work: Any = None
        if dist.get_rank() == 0:
            work = dist.all_to_all_single(torch.empty(6000), torch.ones(6000), group=group, async_op=True)
        dist.barrier()
        if dist.get_rank() == 0:
            group.abort()
        dist.barrier()
        in_flight = outcome(everyone_sends, group, 3000) if work is None else outcome(work.wait)
        seen = in_flight, outcome(everyone_sends, group)
        dist.destroy_process_group(group)
        del group, work
    return seen


def test_aborting_a_group_ends_what_is_in_flight_on_all_ranks_and_for_good() -> None:
    for rank, (in_flight, after) in enumerate(run_distributed(_aborted, 2, timeout=60)):
        assert in_flight.kind == after.kind == "DistBackendError"
        assert in_flight.text.startswith("freescale all_to_all_single, lane 'rows': ")
        assert in_flight.seconds < SOON
        assert after.seconds < AT_ONCE
        assert rank == 1 or "it has been shut down" in after.text


def _dropped() -> bool:
    """Nobody waits for the Work, nor keeps it."""
    group, n = make_group(chunk_bytes=4096), dist.get_world_size()
    given, out = torch.ones(ROWS * n, dtype=torch.uint8), torch.zeros(ROWS * n, dtype=torch.uint8)
    dist.all_to_all_single(out, given, group=group, async_op=True)
    sound = everyone_sends(group)
    return sound and bool(out.all())


def test_a_collective_whose_work_is_dropped_still_happens() -> None:
    assert run_distributed(_dropped, 2) == [True, True]


def test_the_classes_own_groups_are_ours() -> None:
    def kind() -> bool:
        return type(make_group()) is FreeScaleGroup

    assert run_distributed(kind, 1) == [True]


_PROGRAM = """
import os, sys, time
from datetime import timedelta
sys.modules["lightning"] = None  # torch alone, which is imported sooner
import torch
import torch.distributed as dist
from lightning_freescale.comm import LaneOptions

BYTES = 2 * 24_000_000  # which take many times what the sleep below takes, however late it ends

def issue(group):
    return dist.all_to_all_single(torch.empty(BYTES, dtype=torch.uint8), torch.ones(BYTES, dtype=torch.uint8), group=group,
                                  async_op=True)

def run(case, rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    options = LaneOptions(name="rows", chunk_bytes=4096)
    group = dist.new_group(backend="freescale", timeout=timedelta(seconds=120), pg_options=options)
    dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group, async_op=True).wait()
    if rank == 0:
        if case == "alone":
            dist.barrier()
            time.sleep(1.2)  # and so comes while rank 1 is about to end
        try:
            issue(group).wait()
        except dist.DistBackendError as error:
            print(case, "0", error, flush=True)
        os._exit(0)
    work = issue(group)
    if case == "alone":
        time.sleep(0.2)
        dist.barrier()
    else:
        time.sleep(0.02)
    print(case, "1", "finished" if work.is_completed() else "unfinished", flush=True)

for case in ("alone", "within"):
    os.environ["MASTER_PORT"] = sys.argv[1 if case == "alone" else 2]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            run(case, rank)
            sys.exit(0)  # and so through the end of the interpreter
        children.append(child)
    print(case, "exit", *(os.waitpid(child, 0)[1] for child in children), flush=True)
"""


def test_the_interpreter_may_exit_with_an_unfinished_collective() -> None:
    """Of which the peer has not yet issued its part, and which is half way."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with _reserved_port() as port, _reserved_port() as another:
        program = [sys.executable, "-c", _PROGRAM, str(port), str(another)]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=100)
    for case in ("alone", "within"):
        assert f"{case} exit 0 0\n" in done.stdout, done
        assert f"{case} 1 unfinished\n" in done.stdout, done
        assert f"{case} 0 freescale all_to_all_single, lane 'rows': rank 1 " in done.stdout, done
    assert not any(word in done.stderr for word in ("Fatal", "terminate", "Traceback")), done
