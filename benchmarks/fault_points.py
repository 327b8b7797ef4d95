"""Faults of ``faults.py`` in a process: where they occur in a training, and what happens then."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from fault_kinds import Fault

PACKAGE = str(Path(__file__).parents[1] / "lightning_freescale")
_CALLS = {"starting": 3400, "loading": 3400, "saving": 3000}
"""The number of calls of and by functions of the package in each part of a training, about."""
_PART_OF_TABLE = 400_000  # bytes, less than a table has


@dataclass
class Point:
    """Injects the fault on this rank if the attempt has one.

    Attributes:
        process: number of this process among those of all jobs.
        progress: completed steps of each process and the time of its fault in seconds of the monotonic clock, shape
            ``[2, processes]``, in memory that all processes share.
        checkpoints: the folder of the checkpoints.
    """

    fault: Fault | None
    process: int
    progress: np.ndarray
    checkpoints: Path
    taken: list[bytearray] = field(default_factory=list, init=False)  # memory that the training cannot use
    _calls: int | None = field(default=None, init=False)  # until the fault occurs in a part of the training

    def is_due(self, place: str) -> bool:
        """Return True if the fault is due now."""
        if self.fault is None or self.process not in self.fault.ranks or self.fault.place != place:
            return False
        steps, struck = self.progress[:, self.process]
        return bool(steps >= self.fault.step and not struck)

    def is_here(self, place: str) -> bool:
        """Return True, once, if the fault is due now."""
        if not self.is_due(place):
            return False
        self.progress[1, self.process] = time.monotonic()
        return True

    def pass_by(self, place: str) -> None:
        """Inject the fault if it is due here."""
        if self.fault is not None and self.is_here(place):
            _HAPPENS[self.fault.how](self)

    def watch_threads(self) -> None:
        """Count the calls of the thread that writes checkpoints, too. It starts later."""
        if self.fault is not None and self.fault.place == "saving" and self.process in self.fault.ranks:
            threading.setprofile(self._begin_thread)

    def begin(self, part: str) -> None:
        """Begin a part of the training, in which the fault occurs at a random call if it is due."""
        if self.fault is not None and self._calls is None and self.is_due(part):
            self._calls = int(_CALLS[part] * self.fault.at)
            sys.setprofile(self._count)

    def end(self, part: str) -> None:
        """End the part. If it had fewer calls, the fault occurs now."""
        if self._calls is not None and self.fault is not None and self.fault.place == part:
            sys.setprofile(None)
            self.pass_by(part)

    def _begin_thread(self, *event: Any) -> None:
        sys.setprofile(self._count if "checkpoint" in threading.current_thread().name else None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._calls is None or event not in ("call", "c_call"):
            return
        caller = frame.f_back if event == "call" else None
        if not any(each is not None and each.f_code.co_filename.startswith(PACKAGE) for each in (frame, caller)):
            return
        self._calls -= 1
        if self._calls < 0 and self.fault is not None:
            sys.setprofile(None)
            self.pass_by(self.fault.place)


def _raise(point: Point) -> None:
    raise RuntimeError(f"injected fault on rank {point.process}")


def _memory_error(point: Point) -> None:
    raise MemoryError(f"injected fault on rank {point.process}")


def _interrupt(point: Point) -> None:
    raise KeyboardInterrupt(f"injected fault on rank {point.process}")


def _leave_process(point: Point) -> None:
    subprocess.Popen(["sleep", "600"])
    _raise(point)


def _leave_memory(point: Point) -> None:
    Path(f"/dev/shm/lightning_freescale_{os.getpid()}_left").write_bytes(b"left")
    _raise(point)


def _leave_part(point: Point) -> None:
    (point.checkpoints / ".step=6.ckpt.left.part").write_bytes(b"left")
    _raise(point)


def _raise_unencodable(point: Point) -> None:
    raise ValueError(f"injected fault on rank {point.process} in the file \udcff")


def _raise_megabytes(point: Point) -> None:
    raise ValueError(f"injected fault on rank {point.process}: {'many words ' * 500_000}")


def _send(point: Point) -> None:
    """Send this process the signal of the fault, as the system does, once or twice."""
    assert point.fault is not None
    number = getattr(signal, point.fault.how)
    if point.fault.again:
        threading.Timer(point.fault.again, os.kill, (os.getpid(), number)).start()
    os.kill(os.getpid(), number)


def _fill(point: Point) -> None:
    """Leave space for a part of a checkpoint on the disk."""
    assert point.fault is not None
    largest = max(_size(path) for path in point.checkpoints.glob("*.ckpt"))
    with open(point.checkpoints.parent / "filler", "wb") as file:
        state = os.statvfs(point.checkpoints)
        os.posix_fallocate(file.fileno(), 0, int(state.f_bfree * state.f_bsize - point.fault.at * largest))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


def _protect(point: Point) -> None:
    # a file that is open for writing on a rank prevents it for a moment
    subprocess.run(["mount", "-o", "remount,ro", point.checkpoints.parent], check=True)


def _limit_memory(point: Point) -> None:
    """Leave this process memory for a random number of parts of a table."""
    assert point.fault is not None
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    with contextlib.suppress(MemoryError):
        while True:
            point.taken.append(bytearray(_PART_OF_TABLE))
    del point.taken[: int(4 * point.fault.at)]


_HAPPENS: dict[str, Callable[[Point], Any]] = {
    "raise": _raise,
    "raise_unencodable": _raise_unencodable,
    "raise_megabytes": _raise_megabytes,
    "fill": lambda point: _fill(point) if point.process == 0 else None,
    "protect": lambda point: _protect(point) if point.process == 0 else None,
    "limit_memory": _limit_memory,
    "SIGINT": _send,
    "SIGTERM": _send,
    "leave_part": _leave_part,
    "memory_error": _memory_error,
    "interrupt": _interrupt,
    "exit": lambda point: sys.exit(3),
    "exit_0": lambda point: os._exit(0),
    "hang": lambda point: time.sleep(100_000),
    "kill": lambda point: os.kill(os.getpid(), signal.SIGKILL),
    "remove": lambda point: shutil.rmtree(point.checkpoints),
    "leave_process": _leave_process,
    "leave_memory": _leave_memory,
}
