"""How a thread that watches is woken: by a signal to the process, or by the thread that closes it."""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

_STATUS = Path("/proc/self/status")


class WakeUp:
    """A pipe that a signal writes to, while Python stands in code that is not Python's, too. Create it on the main thread.

    A handler of Python's runs on the main thread between two lines of Python, so never while that thread waits in a
    collective. What the process writes to its wake-up descriptor it writes at once. There is one per process, as there is one
    handler per signal: whoever has one keeps it.

    Args:
        name: of the signal; None for none.

    Attributes:
        problem: why the signal wakes nobody; None if it does.
    """

    def __init__(self, name: str | None) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)
        os.set_blocking(self._writes, False)
        self._signal = None if name is None else getattr(signal, name)
        self.problem = None if self._signal is None else self._take()
        self._taken = self._signal is not None and self.problem is None

    def wait(self, seconds: float) -> bool:
        """Wait until somebody wakes the caller, at most so long; return whether the signal did."""
        poll = select.poll()  # select() refuses descriptors from 1024 on, which a run on many ranks has
        poll.register(self._reads, select.POLLIN)
        poll.poll(seconds * 1000)
        return self.forget()

    def forget(self) -> bool:
        """Forget what has come until now; return whether the signal has."""
        came = b""
        with suppress(BlockingIOError):
            came = os.read(self._reads, 4096)
        return self._signal is not None and self._signal in came

    def wake(self) -> None:
        """Wake the thread that waits."""
        with suppress(BlockingIOError):  # full, so it is about to wake
            os.write(self._writes, b"\0")

    def release(self) -> None:
        """Leave the signal to whoever comes next."""
        if not self._taken or self._signal is None:
            return
        self._taken = False
        if signal.getsignal(self._signal) is _nothing:
            signal.signal(self._signal, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current != self._writes:  # somebody has taken it over meanwhile
            signal.set_wakeup_fd(current)

    def close(self) -> None:
        """Close the pipe, when nobody waits any more."""
        os.close(self._reads)
        os.close(self._writes)

    def _take(self) -> str | None:
        assert self._signal is not None
        if threading.current_thread() is not threading.main_thread():
            return "signals can be handled on the main thread alone, and training runs on another"
        if signal.getsignal(self._signal) != signal.SIG_DFL or _is_caught(self._signal):
            return "it has a handler already, which stays"
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return "this process is woken for its signals by somebody else, such as asyncio"
        try:
            signal.signal(self._signal, _nothing)
        except OSError as error:  # the kernel or the C library keeps some to itself
            signal.set_wakeup_fd(-1)
            return f"it cannot be handled ({error})"
        return None


def _is_caught(number: int) -> bool:
    """Whether the process has a handler, as the kernel knows it: Python does not see those of others, such as faulthandler."""
    if not _STATUS.exists():
        return False
    caught = next((line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Keep the signal from ending the process; the pipe tells of it."""
