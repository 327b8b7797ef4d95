"""A script with a time limit that leaves no processes behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ENDING = 10.0  # seconds that a process may take to end once it is killed
_PR_SET_PDEATHSIG = 1
_TAIL = 2000  # bytes
_libc = ctypes.CDLL(None)


class Ran(NamedTuple):
    """The end of a script.

    Attributes:
        code: exit code, negative for a signal; None if it exceeded its limit and was killed.
        seconds: duration.
        printed: the end of its output.
        stuck: True if it could not be killed either; it may still use the GPU.
    """

    code: int | None
    seconds: float
    printed: str
    stuck: bool = False


def run_limited(
    command: Sequence[str], log: Path, limit: float, paths: Sequence[str], each_second: Callable[[], None] = lambda: None
) -> Ran:
    """Run a Python script, and then end all processes of its group.

    Args:
        command: the script and its arguments.
        log: file that receives the output.
        limit: seconds.
        paths: folders to put in front of its PYTHONPATH.
        each_second: called once per second while the script runs.
    """
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *before]), "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    with log.open("a") as output:
        output.write(f"\n$ {' '.join(command)}\n")
        output.flush()
        before_it = output.tell()
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_own_group,  # there is one thread, and it holds no lock
        )
    try:
        code = _wait(process, begun + limit, each_second)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stuck = not _ends(process)
    with log.open("rb") as printed:
        printed.seek(max(before_it, log.stat().st_size - _TAIL))
        return Ran(code, time.monotonic() - begun, printed.read().decode(errors="replace").strip(), stuck)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even if the parent is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _own_group() -> None:
    """Create a process group before the script starts, so that the group can be killed as a whole.

    It is no session, because a program that ends this process and its session would not find it.
    """
    os.setpgid(0, 0)
    die_with_parent()


def _ends(process: subprocess.Popen) -> bool:
    """Return True if a killed process ends in time; a driver may hold it inside the kernel."""
    try:
        process.wait(timeout=ENDING)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} could not be killed within {ENDING:g} s: it may still use the GPU", file=sys.stderr)
        return False
    return True


def _wait(process: subprocess.Popen, deadline: float, each_second: Callable[[], None]) -> int | None:
    """Return the exit code, or None past the deadline. The process stays a zombie, so its group's number is not reused."""
    called = time.monotonic()
    while (now := time.monotonic()) < deadline:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if now - called >= 1:
            called = now
            each_second()
        time.sleep(0.05)
    return None
