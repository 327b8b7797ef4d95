"""The order in which the collectives of one process group run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Job = Callable[[], None]


class WorkerThread:
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
        own = threading.current_thread() is self._thread  # called by what a future of this lane calls
        with self._state:
            idle = own or (self._waiting == 0 and self._turn.acquire(blocking=False))
        future: Future[None] = Future() if idle else self.submit(job)
        if not idle:
            future.exception()
            return future
        try:
            error = _attempt(job)
        finally:
            if not own:
                self._turn.release()
        _settle(future, error)
        return future

    def submit(self, job: Job) -> Future[None]:
        """Queue a job."""
        future: Future[None] = Future()
        with self._state:
            self._waiting += 1
            if self._thread is None:
                self._start()
            self._jobs.put((future, job))
        return future

    def rest(self, timeout: float) -> bool:
        """End the thread after the jobs it has; the next one starts another. False if it still works after ``timeout`` s."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._jobs.put(None)
        thread.join(timeout)
        with self._state:
            if not thread.is_alive():
                self._thread = None
                if self._waiting:  # somebody came while it ended
                    self._start()
        return not thread.is_alive()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=f"freescale lane {self.name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (queued := self._jobs.get()) is not None:
            future, job = queued
            with self._turn:
                error = _attempt(job)
            with self._state:
                self._waiting -= 1
            _settle(future, error)  # only now: what waits for it may use the lane
            del queued, future, job  # its tensors


def _attempt(job: Job) -> BaseException | None:
    """What it raises; also what would end a thread: somebody waits for the job."""
    try:
        job()
    except BaseException as error:
        # its frames, and those that called them, know the future it goes to: a circle that would keep the group alive
        error.__context__ = None
        return error.with_traceback(None)
    return None


def _settle(future: Future[None], error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
