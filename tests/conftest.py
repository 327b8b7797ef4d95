"""Fixtures of all tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch.distributed as dist

GRACE = 5.0
"""Seconds that threads and processes have to end once a test is over."""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread of this package or the default process group behind in pytest's process."""
    processes, threads = _processes(), _threads()
    yield
    deadline = time.monotonic() + GRACE
    while left := [*(_processes() - processes), *(_threads() - threads)]:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(map(str, left))}", pytrace=False)
        time.sleep(0.01)
    if dist.is_initialized():
        dist.destroy_process_group()  # the next test needs none
        pytest.fail("left behind: the default process group", pytrace=False)


def _processes() -> set[str]:
    """Children of this process by their number; the one that multiprocessing keeps for good is not of any test."""
    children: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended since it was listed
            children += path.read_text().split()
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return {f"process {pid}" for pid in children if int(pid) != tracker}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("freescale")}
