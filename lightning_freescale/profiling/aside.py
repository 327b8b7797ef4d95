"""A thread on which the profiler works while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Aside:
    """Runs jobs one after the other. A daemon: a job that waits for a rank that is gone must not keep the process from ending.

    Attributes:
        seconds: processor time that the jobs have taken.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="freescale-profiler", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a job."""
        future: Future[Any] = Future()
        self._jobs.put((future, job, args))
        return future

    def close(self, timeout: float) -> bool:
        """End the thread after the jobs it has; False if it still waits, for a rank that is gone: it is left behind."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (queued := self._jobs.get()) is not None:
            future, job, args = queued
            began = time.thread_time()
            try:
                result = job(*args)
            except BaseException as error:  # whoever waits for the job gets it
                future.set_exception(error)
            else:
                self.seconds += time.thread_time() - began
                future.set_result(result)
