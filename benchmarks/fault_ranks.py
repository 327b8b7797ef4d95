"""Ranks of an attempt of ``faults.py``: forked, failed from outside, and watched until they end; and what they leave."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fault_kinds import Fault

from lightning_freescale.testing import _reserved_port

_BEGINS_WITHIN = 180.0  # seconds until a fault occurs on a busy machine
_WORKERS_LOOK_EVERY = 5.0  # seconds between the checks of a loader's worker for its rank


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank.

    Attributes:
        code: exit status; None if the rank was still running when the time was over.
        seconds: time since the fault.
        error: all messages of its last error, the first cause last; the stack if the rank was still running.
        decisive: the message of its last error.
        result: its result; None if it returned none.
    """

    code: int | None
    seconds: float
    error: str
    decisive: str
    result: dict[str, Any] | None


@dataclass(frozen=True)
class Attempt:
    """The end of an attempt.

    Attributes:
        ends: the end of each rank, job by job.
        struck: whether the fault occurred.
        steps: number of steps that rank 0 completed.
        processes: remaining processes of the ranks.
        memory: remaining shared memory of the ranks.
    """

    ends: list[RankEnd]
    struck: bool
    steps: int
    processes: list[str]
    memory: list[str]


def run_ranks(
    call: Callable[[int, np.ndarray], dict[str, Any]],
    ranks: int,
    fault: Fault | None,
    folder: Path,
    limit: float,
    jobs: int = 1,
    watch: Callable[[], None] = lambda: None,
) -> Attempt:
    """Call ``call(process, progress)`` in a separate process for each rank of each job.

    Args:
        call: the work of a rank; ``progress`` has the completed steps of each process and the time of its fault, shape
            ``[2, jobs * ranks]``.
        ranks: number of ranks of a job.
        fault: the fault to inject.
        folder: folder for the output of the ranks.
        limit: seconds after a fault within which a rank has to end.
        jobs: number of jobs at the same time.
        watch: called every 5 ms while ranks run.
    """
    everyone = range(jobs * ranks)
    progress, processes = np.frombuffer(mmap.mmap(-1, 16 * len(everyone))).reshape(2, len(everyone)), list[int]()
    sys.stdout.flush()
    try:
        with _reserved_port() as port, _reserved_port() as other:
            for number in everyone:
                processes.append(_fork(call, number, ranks, (port, other)[number // ranks], progress, folder))
            codes, ended_at, seen = _watch(processes, fault, progress, limit, watch)
    except BaseException:
        for process in _of_sessions(set(processes)):
            _kill(process)
        raise
    stays = set(fault.ranks) if fault is not None and fault.stays else set()
    stacks = {rank: _stack_of(processes[rank], folder, rank) for rank in set(everyone) - codes.keys() - stays}
    for rank in sorted(stays - codes.keys()):
        _kill(processes[rank])
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(processes[rank], 0)[1])
    sessions = {process for rank, process in enumerate(processes) if rank in codes.keys() - stays}
    deadline = time.monotonic() + 2 * _WORKERS_LOOK_EVERY
    while (left := _of_sessions(sessions)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left | _of_sessions(set(processes)).keys():
        _kill(process)
    for rank in stacks:
        os.waitpid(processes[rank], 0)
    memory = [name for name in os.listdir("/dev/shm") if any(str(process) in name for process in seen | set(processes))]
    for name in memory:
        Path("/dev/shm", name).unlink()
    first = min((float(at) for at in progress[1] if at), default=0.0)
    ends = []
    for rank in everyone:
        error, decisive, result = _report_of(folder, rank)
        seconds = ended_at[rank] - first if first else 0.0
        ends.append(RankEnd(codes.get(rank), seconds, stacks.get(rank, error), decisive, result))
    return Attempt(ends, bool(first), int(progress[0, 0]), [f"{name} ({process})" for process, name in left.items()], memory)


def _fork(
    call: Callable[[int, np.ndarray], dict[str, Any]], number: int, ranks: int, port: int, progress: np.ndarray, folder: Path
) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        printed = os.open(folder / f"rank{number}.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        faulthandler.register(signal.SIGUSR1)
        rank = number % ranks
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="faults")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        report = folder / f"rank{number}.json"
        report.unlink(missing_ok=True)
        try:
            report.write_text(json.dumps({"result": call(number, progress)}))
            code = 0
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            traceback.print_exc()
            last = "".join(traceback.format_exception_only(error))
            report.write_text(json.dumps({"error": _messages(error), "decisive": last}))
        # as a script ends
        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


def _messages(error: BaseException | None) -> str:
    lines = []
    while error is not None:
        lines += traceback.format_exception_only(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "".join(lines)


def _report_of(folder: Path, rank: int) -> tuple[str, str, dict[str, Any] | None]:
    """Return the error of a rank, its last message and the result, as far as they exist."""
    try:
        report = json.loads((folder / f"rank{rank}.json").read_text())
    except (FileNotFoundError, ValueError):
        return "", "", None
    return report.get("error", ""), report.get("decisive", ""), report.get("result")


def _stack_of(process: int, folder: Path, rank: int) -> str:
    """Return the position of each thread of a rank that runs, the last call and the main thread first."""
    printed = folder / f"rank{rank}.txt"
    before = printed.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGUSR1)
    time.sleep(1.0)
    others, current, main = printed.read_bytes()[before:].decode(errors="replace").partition("Current thread")
    return current + main + others


def _watch(
    processes: list[int], fault: Fault | None, progress: np.ndarray, limit: float, watch: Callable[[], None]
) -> tuple[dict[int, int], list[float], set[int]]:
    """Return the exit statuses of the ranks that have ended, the times of their ends, and all processes that existed."""
    began, codes, ended_at, seen = time.monotonic(), dict[int, int](), [0.0] * len(processes), set[int]()
    stays = set(fault.ranks) if fault is not None and fault.stays else set()
    repeats_after = 0.0 if fault is None else max(fault.seconds, fault.again)
    looked = due = repeats = 0.0
    while len(codes.keys() | stays) < len(processes):
        now = time.monotonic()
        first = min((float(at) for at in progress[1] if at), default=0.0)
        if now > (first + limit if first else began + _BEGINS_WITHIN):
            break
        for rank, process in enumerate(processes):
            if rank not in codes and (found := os.waitpid(process, os.WNOHANG))[0]:
                codes[rank], ended_at[rank] = os.waitstatus_to_exitcode(found[1]), time.monotonic()
        if now > looked + 0.2:
            looked, seen = now, seen | _of_sessions(set(processes)).keys()
        if fault is not None and fault.place == "signal":
            if not due and progress[0, fault.ranks[0]] >= fault.step:
                due = now + fault.delay
            if due and not first and now >= due:
                progress[1, list(fault.ranks)] = time.monotonic()
                repeats = now + repeats_after
                _signal([processes[rank] for rank in fault.ranks if rank not in codes], getattr(signal, fault.how))
            if repeats_after and repeats and now >= repeats:
                repeats, name = 0.0, "SIGCONT" if fault.seconds else fault.how
                _signal([processes[rank] for rank in fault.ranks if rank not in codes], getattr(signal, name))
        watch()
        time.sleep(0.005)
    return codes, [at or time.monotonic() for at in ended_at], seen


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _of_sessions(sessions: set[int]) -> dict[int, str]:
    """Return the running processes of these sessions, and their names."""
    found = {}
    for process in os.listdir("/proc"):
        if process.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(") ")
                state, _, _, session = rest.split()[:4]
                if int(session) in sessions and state != "Z":
                    found[int(process)] = name
    return found
