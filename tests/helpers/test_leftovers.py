"""no_leftovers finds each kind of thing that a test may leave behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.leftovers import no_leftovers


def test_a_process() -> None:
    program = [sys.executable, "-S", "-c", "input()"]
    with pytest.raises(AssertionError, match="left behind: process"), no_leftovers(grace=0.1):
        child = subprocess.Popen(program, stdin=subprocess.PIPE)
    with no_leftovers(grace=0.1):  # was there before
        pass
    child.communicate(b"\n")


def test_a_thread_of_this_package() -> None:
    end = threading.Event()
    with pytest.raises(AssertionError, match="left behind: thread freescale one"), no_leftovers(grace=0.1):
        threading.Thread(target=end.wait, name="freescale one", daemon=True).start()
    end.set()


def test_a_thread_that_ends_in_time() -> None:
    with no_leftovers():
        threading.Thread(target=time.sleep, args=(0.1,), name="freescale one", daemon=True).start()


def test_the_default_process_group(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="left behind: the default process group"), no_leftovers():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert not dist.is_initialized()
