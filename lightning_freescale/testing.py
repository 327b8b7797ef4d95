"""Run a function on several ranks in tests."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankFailed(RuntimeError):  # noqa: N818 (the name states the event)
    """A rank raised, died or did not finish. The message contains its traceback."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, init: bool = True, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in ``world_size`` processes that share a gloo group, and return their results by rank.

    The processes are forked from this one, which saves imports. Each process has one thread, and the environment that torchrun
    sets, from which ``Trainer(devices=world_size)`` reads the rank.

    Args:
        fn: any function, also a closure. Its result must be picklable.
        world_size: number of processes.
        *args: positional arguments of ``fn``.
        timeout: seconds after which all processes are killed.
        init: whether to create the default process group before calling ``fn``.
        **kwargs: keyword arguments of ``fn``.

    Raises:
        ValueError: ``init`` is set, and this process has a default process group, which the ranks would inherit.
        RankFailed: a rank raised (with its traceback), died (with its exit code), or exceeded the timeout.

    Examples:
        >>> import torch.distributed as dist
        >>> run_distributed(lambda: dist.get_rank() + dist.get_world_size(), 2)
        [2, 3]
    """
    if init and dist.is_initialized():
        raise ValueError(
            "run_distributed(init=True): this process has a default process group, which the ranks would inherit. Call "
            "torch.distributed.destroy_process_group() before, or pass init=False"
        )
    with _reserved_port() as port:
        return _run(partial(fn, *args, **kwargs), world_size, port, timeout, init)


def _run(call: Callable[[], Any], world_size: int, port: int, timeout: float, init: bool) -> list[Any]:
    context = mp.get_context("fork")
    ends, ranks = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(call, rank, world_size, port, timeout, init, there))
        process.start()
        there.close()
        ends.append(here)
        ranks.append(process)
    try:
        return _collect(ends, ranks, timeout)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(ends: list[Connection], ranks: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, Any] = {}
    deadline, grace = time.monotonic() + timeout, 2.0
    open_ends: dict[Any, int] = {end: rank for rank, end in enumerate(ends)}
    while open_ends and (ready := wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))):
        for end in ready:
            rank = open_ends.pop(end)
            try:
                ok, value = ends[rank].recv()
            except EOFError:
                ranks[rank].join(grace)
                ok, value = False, f"died with exit code {ranks[rank].exitcode}"
            (results if ok else failures)[rank] = value
            if not ok:  # the other ranks fail soon, or would wait until the timeout
                deadline = min(deadline, time.monotonic() + grace)
    if failures:
        raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    if open_ends:
        raise RankFailed(f"ranks {sorted(open_ends.values())} did not finish within {timeout:g} s")
    return [results[rank] for rank in range(len(ends))]


def _rank(call: Callable[[], Any], rank: int, world_size: int, port: int, timeout: float, init: bool, end: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="run_distributed")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", OMP_NUM_THREADS="1")
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    code = 0
    try:
        if init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        answer = (True, call())
    except BaseException:
        answer, code = (False, traceback.format_exc()), 1
    sys.stdout.flush()
    sys.stderr.flush()
    end.send(answer)
    if not code:
        time.sleep(timeout)  # peers may still need this rank's store and connections; the parent kills it
    os._exit(code)  # without orderly shutdown, which would wait for failed peers


@contextmanager
def _reserved_port() -> Generator[int, None, None]:
    """Yield a port on which one process may listen, and which no other program gets within the context."""
    with socket.socket() as held:
        # The socket is bound but does not listen. Linux lets another socket with this option, such as that of torch's store,
        # listen on the port, but does not assign the port to a socket that requests any port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
