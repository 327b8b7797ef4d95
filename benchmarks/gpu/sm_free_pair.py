"""Two processes on one device: rank 0 measures, rank 1 is its peer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GRACE = 2.0  # seconds that a process has to fail by itself after the other has failed


def run(work: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """Call ``work(rank, *args)`` in two new processes, whose default group is gloo, and return what rank 0 returns.

    Raises:
        ProcessRaisedException, ProcessExitedException: a process failed; the other one is ended.
        TimeoutError: they took longer than ``timeout`` seconds; both are ended.
    """
    answers = mp.get_context("spawn").SimpleQueue()  # CUDA does not survive a fork
    started = mp.spawn(_process, (work, args, _free_port(), timeout, answers), nprocs=2, join=False)
    try:
        _join(started, timeout)
    finally:
        for process in started.processes:
            process.kill()
            process.join()
    return answers.get()


def make_group(timeout: float) -> dist.ProcessGroup:
    """The package's process group over host memory. Collective."""
    import lightning_freescale  # noqa: F401 (registers the backend)
    from lightning_freescale.comm import LaneOptions

    return dist.new_group(backend="freescale", timeout=timedelta(seconds=timeout), pg_options=LaneOptions(transport="host"))


def _join(started: Any, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not started.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=GRACE):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the two processes did not finish within {timeout:g} s: raise --timeout, or look why they hang")


def _process(rank: int, work: Callable[..., Any], args: Any, port: int, timeout: float, answers: Any) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
    answer = work(rank, *args)
    if rank == 0:
        answers.put(answer)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
