"""no_leftovers finds each kind of thing that a test may leave behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.leftovers import no_leftovers


def test_a_process_a_thread_of_this_package_and_the_default_process_group(tmp_path: Path) -> None:
    end = threading.Event()
    with pytest.raises(AssertionError, match="left behind: process"), no_leftovers(grace=0.1):
        child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    with pytest.raises(AssertionError, match="left behind: thread freescale one"), no_leftovers(grace=0.1):
        threading.Thread(target=end.wait, name="freescale one", daemon=True).start()
    with no_leftovers(grace=0.1):  # both were there before
        pass
    end.set()
    child.communicate(b"\n")
    with pytest.raises(AssertionError, match="left behind: the default process group"), no_leftovers():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
