"""A script with a limit, of which nothing is left behind."""

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
    """How a script ended.

    Attributes:
        code: its exit code, negative for a signal; None: it ran over its limit and was killed.
        seconds: that it took.
        printed: the end of what it printed.
        stuck: it could not be killed either, and may still use the GPU.
    """

    code: int | None
    seconds: float
    printed: str
    stuck: bool = False


def run_limited(
    command: Sequence[str], log: Path, limit: float, paths: Sequence[str], each_second: Callable[[], None] = lambda: None
) -> Ran:
    """Run a Python script, and then end every process of its group, whatever happens.

    Args:
        command: the script and its arguments.
        log: file that what it prints is added to.
        limit: seconds.
        paths: folders that go in front of its PYTHONPATH.
        each_second: called while it runs.
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
    """Have this process killed when the one that started it ends, even if that is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _own_group() -> None:
    """In the script's process before it starts: a group that can be killed as a whole.

    Not a session: whoever ends this process and its session would not find it.
    """
    os.setpgid(0, 0)
    die_with_parent()


def _ends(process: subprocess.Popen) -> bool:
    """Whether a process that was killed ends; a driver may hold it inside the kernel, and nobody should wait for that."""
    try:
        process.wait(timeout=ENDING)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} could not be killed within {ENDING:g} s: it may still use the GPU", file=sys.stderr)
        return False
    return True


def _wait(process: subprocess.Popen, deadline: float, each_second: Callable[[], None]) -> int | None:
    """Its exit code, None past the deadline. It stays a zombie, so that nobody else gets the number of its group."""
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
