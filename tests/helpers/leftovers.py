"""What a test leaves behind in pytest's own process: children, threads of this package, the default process group."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import torch.distributed as dist


@contextmanager
def no_leftovers(grace: float = 5.0) -> Iterator[None]:
    """Raise AssertionError if, ``grace`` seconds after the block, anything is left that was not there before it."""
    processes, threads = _processes(), _threads()
    yield
    deadline = time.monotonic() + grace
    if _processes() - processes or _threads() - threads:
        gc.collect()  # an error's traceback holds its frames, and what they hold, in a circle
    while left := [*(_processes() - processes), *(_threads() - threads)]:
        assert time.monotonic() < deadline, f"left behind: {', '.join(left)}"
        time.sleep(0.01)
    if dist.is_initialized():
        dist.destroy_process_group()  # the next test needs none
        raise AssertionError("left behind: the default process group")


def _processes() -> set[str]:
    children: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended since it was listed
            children += path.read_text().split()
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)  # multiprocessing keeps it for good
    return {f"process {pid}" for pid in children if int(pid) != tracker}


def _threads() -> set[str]:
    return {f"thread {one.name} {one.ident}" for one in threading.enumerate() if one.name.startswith("freescale")}
