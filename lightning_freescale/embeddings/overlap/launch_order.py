"""In which order the exchanges of several collections are launched, where NCCL moves them: on every rank that of rank 0.

NCCL's kernels wait on the device for those of the other ranks. With a communicator for each collection, two ranks that launch
in different orders may wait for each other, as soon as anything keeps the second kernel from starting before the first has
ended. So the collections take turns. Rank 0 numbers an exchange when it gets there. No rank waits for a lower number in vain:
behind a head all ranks have come to the same message, and a job without a head is submitted right behind one with a head,
with nothing between that its thread or the training thread would wait for.

All-reduces of DistributedDataParallel and exchanges of TorchRec's own modules are launched by torch and take no turns. They
start beside ours, whose communicators take few of the device's multiprocessors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta


class LaunchOrder:
    """The turns of one process, shared by its collections.

    Args:
        timeout: how long an exchange waits for those before it.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._drawn = self._launched = 0
        self._failure = ""

    def draw(self) -> int:
        """Return the next number; on rank 0 only, which tells it to the others."""
        with self._changed:
            number, self._drawn = self._drawn, self._drawn + 1
        return number

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Launch in the block, after the exchanges with lower numbers.

        Raises:
            RuntimeError: one of them has failed, or has not been launched in time.
        """
        with self._changed:
            seconds = self._timeout.total_seconds()
            if not self._changed.wait_for(lambda: self._failure or self._launched == number, seconds):
                raise RuntimeError(
                    f"exchange {number} of this rank's collections waited {seconds:g} s for exchange {self._launched}, which "
                    "has not been launched"
                )
            if self._failure:
                raise RuntimeError(f"an exchange launched before this one has failed: {self._failure}")
        yield
        with self._changed:
            self._launched = number + 1
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Let nobody wait for an exchange that will not be launched."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()


def refuse_one_queue() -> None:
    """Check that work on one stream need not wait for work on another.

    Raises:
        ValueError: the environment gives the device one queue, in which all waits for what was launched before.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives the device one queue, in which an overlapped exchange and DDP's all-reduce "
            "may wait for each other forever: unset it, or pass FreeScaleStrategy(exchange='torchrec')"
        )
