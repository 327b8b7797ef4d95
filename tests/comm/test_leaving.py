"""A rank may leave a group, fork or exit with collectives in flight. Nothing hangs, crashes or remains."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.process_group import ProcessGroupFreeScale
from lightning_freescale.testing import _reserved_port, run_distributed
from tests.helpers.comm_groups import AT_ONCE, SOON, Outcome, everyone_sends, lane_threads, make_group, nothing_left, outcome

ROWS = 300_000


def _normal() -> list[bool]:
    sound = []
    for async_op in (False, True):
        with nothing_left():
            lanes: list[Any] = [{"chunk_bytes": 4096}, {"transport": "native"}, {"chunk_bytes": 4096, "name": "others"}]
            groups = [make_group(**options) for options in lanes]
            sound += [everyone_sends(group, rows=10_000, async_op=async_op) for group in groups for _ in range(2)]
            sound.append(bool(lane_threads()) is async_op and type(groups[0]) is ProcessGroupFreeScale)
            for group in groups:
                dist.destroy_process_group(group)
            del groups, group
    return sound


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


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_a_destroyed_group_finishes_what_is_in_flight_and_leaves_no_thread_and_no_socket(size: int) -> None:
    assert run_distributed(_normal, size) == [[True] * 14] * size
    assert run_distributed(_in_flight, size) == [(True, True)] * size


def _aborted() -> tuple[Outcome, Outcome]:
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
        assert rank == 1 or "shut down" in after.text


def _in_vain() -> list[Outcome]:
    with nothing_left():
        group, seen = make_group(timeout=2.0), []
        if dist.get_rank() == 0:
            given, out = torch.ones(4), torch.empty(4)
            work: Any = dist.all_to_all_single(out, given, group=group, async_op=True)
            calls = [(dist.destroy_process_group, group), (work.wait,), (group.all_to_all_single, out, given)]
            seen = [outcome(*call) for call in calls]
            del work, calls
        dist.barrier()
        if dist.get_rank() == 1:
            dist.destroy_process_group(group)
        del group
    return seen


def test_destroying_a_group_whose_peer_does_not_come_ends_with_the_timeout() -> None:
    destroyed, waited, after = run_distributed(_in_vain, 2, timeout=60)[0]
    assert not destroyed.kind and destroyed.seconds < SOON
    assert waited.kind == after.kind == "DistBackendError"
    assert "rank 1 did not respond" in waited.text and waited.seconds < SOON


_PROGRAM = """
import os, sys, time
from datetime import timedelta
sys.modules["lightning"] = None  # import torch only, which is faster
import torch
import torch.distributed as dist
from lightning_freescale.comm import ProcessGroupFreeScaleOptions

BYTES = 2 * 24_000_000  # their transfer takes many times the sleep below

def issue(group):
    return dist.all_to_all_single(torch.empty(BYTES, dtype=torch.uint8), torch.ones(BYTES, dtype=torch.uint8), group=group,
                                  async_op=True)

def run(case, rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    options = ProcessGroupFreeScaleOptions(name="rows", chunk_bytes=4096)
    group = dist.new_group(backend="freescale", timeout=timedelta(seconds=120), pg_options=options)
    dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group, async_op=True).wait()
    if rank == 0:
        if case == "alone":
            dist.barrier()
            time.sleep(1.2)  # so it starts while rank 1 exits
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
            sys.exit(0)  # runs the exit of the interpreter
        children.append(child)
    print(case, "exit", *(os.waitpid(child, 0)[1] for child in children), flush=True)
"""


def test_the_interpreter_may_exit_with_an_unfinished_collective() -> None:
    """Check a collective that the peer has not issued yet, and one in the middle of its transfer."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with _reserved_port() as port, _reserved_port() as another:
        program = [sys.executable, "-c", _PROGRAM, str(port), str(another)]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=100)
    for case in ("alone", "within"):
        assert f"{case} exit 0 0\n" in done.stdout, done
        assert f"{case} 1 unfinished\n" in done.stdout, done
        assert f"{case} 0 freescale all_to_all_single, lane 'rows': rank 1 " in done.stdout, done
    assert not any(word in done.stderr for word in ("Fatal", "terminate", "Traceback")), done


@pytest.mark.parametrize("backend", ["gloo", "freescale"])
def test_a_fork_leaves_groups_alone_that_wait_to_be_collected(backend: str) -> None:
    assert run_distributed(_throw_group_away_and_fork, 2, backend, timeout=60) == [0, 0]


def _throw_group_away_and_fork(backend: str) -> int:
    gc.disable()
    group: Any = dist.new_group(backend=backend)
    dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group)
    dist.destroy_process_group(group)
    circle = [group]
    circle.append(circle)
    del group, circle
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the process if it hangs
        gc.collect()
        os._exit(0)
    return os.waitpid(child, 0)[1]
