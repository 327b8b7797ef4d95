"""The order in which the collectives of one process group run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Job = Callable[[], None]


class Lane:
    """Runs jobs one after the other: in the background, or at once for a caller who would only wait.

    Args:
        name: of its thread, which starts with the first job in the background.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: SimpleQueue[tuple[Future[None], Job] | None] = SimpleQueue()
        self._turn, self._state = threading.Lock(), threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def run(self, job: Job) -> Future[None]:
        """Do a job now, unless others are before it; the future is done."""
        future: Future[None] = Future()
        with self._state:
            idle = self._waiting == 0 and self._turn.acquire(blocking=False)
        if not idle:
            future = self.submit(job)
            future.exception()
            return future
        try:
            _do(future, job)
        finally:
            self._turn.release()
        return future

    def submit(self, job: Job) -> Future[None]:
        """Queue a job."""
        future: Future[None] = Future()
        with self._state:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"freescale lane {self.name}", daemon=True)
                self._thread.start()
            self._jobs.put((future, job))
        return future

    def rest(self, timeout: float) -> bool:
        """End the thread after the jobs it has; the next one starts another. False if it still works after ``timeout`` seconds."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._jobs.put(None)
        thread.join(timeout)
        if not thread.is_alive():
            self._thread = None
        return not thread.is_alive()

    def _work(self) -> None:
        while (queued := self._jobs.get()) is not None:
            with self._turn:
                _do(*queued)
            del queued  # its tensors
            with self._state:
                self._waiting -= 1


def _do(future: Future[None], job: Job) -> None:
    try:
        job()
    except BaseException as error:  # also what would end a thread: somebody waits for this future
        # its frames, and those that called them, know this future: a circle that would keep the group alive
        error.__context__ = None
        future.set_exception(error.with_traceback(None))
    else:
        future.set_result(None)
