"""Two processes on one device: rank 0 reports results as it finds them, and rank 1 is its peer and may be killed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import _children
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hour_process import ENDING, die_with_parent

GRACE = 2.0  # seconds that a process has to fail by itself after the other has failed
_SAID, _ENDED, _RAISED = "said", "ended", "raised"


class PairFailed(RuntimeError):  # noqa: N818 (says what happened)
    """A process raised or died; the message holds its traceback."""


@dataclass
class Rank:
    """The context of a process of the pair.

    Attributes:
        rank: 0 or 1.
        device: index of its GPU, if there is one.
        timeout: seconds of its process groups.
        say: sends a picklable object to the caller of :func:`run`; on rank 0 alone.
    """

    rank: int
    timeout: float
    say: Callable[[Any], None]
    device: int = 0

    def init_gloo(self) -> None:
        """Create the default process group, with CUDA in use if there is a GPU. Collective.

        The package's groups check which GPU the ranks use when they are created; two ranks on one GPU do not use NCCL.
        """
        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
        dist.init_process_group("gloo", rank=self.rank, world_size=2, timeout=timedelta(seconds=self.timeout))

    def make_lane(self, transport: str) -> dist.ProcessGroup:
        """Create the package's process group. Collective."""
        import lightning_freescale  # noqa: F401 (registers the backend)
        from lightning_freescale.comm import ProcessGroupFreeScaleOptions

        timeout = timedelta(seconds=self.timeout)
        return dist.new_group(
            backend="freescale", timeout=timeout, pg_options=ProcessGroupFreeScaleOptions(transport=transport)
        )

    def die(self) -> None:
        """End without any message, as a process does if its machine fails."""
        os.kill(os.getpid(), signal.SIGKILL)


def run(
    work: Callable[..., None], *args: Any, timeout: float, group_timeout: float | None = None, devices: int = 1
) -> Iterator[Any]:
    """Call ``work(Rank, *args)`` in two new processes, and yield the messages of rank 0 as they arrive.

    The processes have the environment of two nodes with one device each, as Lightning reads it. Both see all GPUs. If rank 1 is
    killed, this is no failure, and the messages of rank 0 count.

    Args:
        work: a function of a module; on rank 0 it reports its results.
        *args: for ``work``.
        timeout: seconds after which both are ended.
        group_timeout: seconds of their process groups; None: as ``timeout``.
        devices: 1 if both use the first GPU, 2 if each has its own.

    Raises:
        PairFailed: a process raised, or died; the other one is ended.
        TimeoutError: they took longer than ``timeout``; both are ended.
    """
    with _reserved_port() as port:
        yield from _run(work, args, port, timeout, group_timeout or timeout, devices)


def lacking(transport: str, devices: int = 1) -> str:
    """Return the reason why two ranks on so many devices cannot use a transport; empty if they should be able to."""
    from lightning_freescale.comm.transports.cuda_driver import import_cuda_bindings
    from lightning_freescale.comm.transports.topology import _linked_devices

    if transport in ("host", "native"):  # torch's own backend of ranks that share a GPU is gloo
        return ""
    if not torch.cuda.is_available():
        return "no CUDA device, and it moves CUDA tensors"
    if transport == "nccl-zero-cta" and devices == 1:
        return "NCCL takes no two ranks on one GPU"
    if devices > 1 and 1 not in _linked_devices(0):
        return "there is no NVLink between GPU 0 and GPU 1"
    return "" if import_cuda_bindings() is not None else "the package cuda-bindings cannot be imported"


def _run(work: Callable[..., None], args: Any, port: int, timeout: float, group_timeout: float, devices: int) -> Iterator[Any]:
    context = mp.get_context("spawn")  # CUDA does not survive a fork
    ends: dict[Connection, int] = {}
    processes = []
    try:
        for rank in range(2):
            here, there = context.Pipe(duplex=False)
            about = (rank, rank % devices, port, group_timeout, there)
            processes.append(context.Process(target=_process, args=(work, args, *about), daemon=True))
            processes[-1].start()
            there.close()
            ends[here] = rank
        yield from _listen(ends, processes, timeout)
    finally:
        for process in processes:
            _end(process)


def _listen(ends: dict[Connection, int], processes: list[Any], timeout: float) -> Iterator[Any]:
    deadline, failures = time.monotonic() + timeout, []
    while ends:
        ready = wait(list(ends), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise TimeoutError(f"the two processes did not finish within {timeout:g} s: find out why they hang")
        if not ready:
            break
        for end in ready:
            kind, value = _received(end, processes[ends[end]])
            if kind == _SAID:
                yield value
                continue
            rank = ends.pop(end)
            if kind == _RAISED and not (rank == 1 and value == -signal.SIGKILL):
                failures.append(f"rank {rank}: {f'died with exit code {value}' if isinstance(value, int) else value}")
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        raise PairFailed("\n".join(failures))


def _received(end: Connection, process: Any) -> tuple[str, Any]:
    try:
        return end.recv()
    except EOFError:
        process.join(ENDING)
        if process.exitcode is None:
            return _RAISED, f"closed its connection and did not end within {ENDING:g} s"
        return _RAISED, process.exitcode


def _end(process: Any) -> None:
    process.kill()
    process.join(ENDING)
    if process.is_alive():  # a driver may hold it inside the kernel
        print(f"process {process.pid} could not be killed within {ENDING:g} s: it may still use the GPU", file=sys.stderr)
        _children.discard(process)  # or Python would wait for it when this process ends


def _process(work: Callable[..., None], args: Any, rank: int, device: int, port: int, timeout: float, end: Connection) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK=str(rank))
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # both are on one GPU, and torch refuses that otherwise
    os.environ.pop("LOCAL_RANK", None)
    try:
        work(Rank(rank, timeout, lambda value: end.send((_SAID, value)) if rank == 0 else None, device), *args)
    except BaseException:
        end.send((_RAISED, traceback.format_exc()))
    else:
        end.send((_ENDED, None))
    time.sleep(timeout)  # the peer may still need this rank's store and connections; the parent ends it
    os._exit(1)


@contextmanager
def _reserved_port() -> Generator[int, None, None]:
    """Yield a port that one process may listen on, and that is given to no other program inside the context."""
    with socket.socket() as held:
        # Bound, and not listened on: Linux lets another socket with this option, as torch's stores have it, listen there, and
        # gives the port to no program that asks for any port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
