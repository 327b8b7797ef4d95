"""Threads that enter a dispatch mode and use an operation for the first time, at once."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, sys, threading
import torch
from tests.helpers.thread_mode import ThreadMode

class Mode(ThreadMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

sys.setswitchinterval(1e-7)
together, one, failed = threading.Barrier(4), torch.ones(1), []
made = torch.library.Library("made_for_a_test", "DEF")
names = [f"operation_{number}" for number in range(300)]
for name in names:
    made.define(f"{name}(Tensor x) -> Tensor")
    made.impl(name, lambda x: x.clone(), "CPU")

def use(name):
    with Mode():
        together.wait()
        try:
            getattr(torch.ops.made_for_a_test, name)(one)
        except AttributeError as error:  # of what lies where the operation was
            failed.append(error)

for name in names:
    threads = [threading.Thread(target=use, args=(name,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect(0)
    with Mode():
        getattr(torch.ops.made_for_a_test, name)(one)
assert not failed, failed
"""


def test_operations_that_threads_meet_at_once_are_made_once() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
