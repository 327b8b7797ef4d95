"""A thread that runs the jobs of a process group, of the overlap engine or of the profiler in the order of their submission."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any

import torch

Job = Callable[..., Any]
_current = threading.local()  # has the attribute is_worker in the thread of a worker


class WorkerThread:
    """Run jobs one after the other: in the background, or at once for a caller who would only wait.

    The thread starts with the first job in the background. It is a daemon: a job that waits for a rank that is gone must not
    keep the process from ending. While jobs are queued or run in the background, garbage is collected only by the threads that
    submit them, because a collection on another thread beside PyTorch's C++ code can take live objects for garbage.

    Attributes:
        cpu_seconds: processor time that the jobs in the background have taken.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cpu_seconds = 0.0
        self._jobs: SimpleQueue[tuple[Future[Any], Job, tuple[Any, ...]] | None] = SimpleQueue()
        self._turn = threading.Lock()  # held while a job runs
        self._state = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> Any:
        """Copy or pickle a worker without its jobs, as a part of another object."""
        return type(self), (self.name,)

    def submit(self, job: Job, *args: Any) -> Future[Any]:
        """Queue ``job(*args)`` for the thread and return its future."""
        future: Future[Any] = Future()
        if not hasattr(_current, "is_worker") and torch._C._current_graph_task_id() == -1:  # not in a backward
            _collect_due()
        _pause_collections()
        with self._state:
            self._waiting += 1
            if self._thread is None:
                self._start()
            self._jobs.put((future, job, args))
        return future

    def run(self, job: Job) -> Future[Any]:
        """Run a job on the caller's thread, or behind those that are queued; the future returned is done."""
        # waking a thread costs more than a small message, so it is woken only if other jobs come first
        inside = threading.current_thread() is self._thread  # a callback of one of this thread's futures
        with self._state:
            idle = inside or (self._waiting == 0 and self._turn.acquire(blocking=False))
        future: Future[Any] = Future() if idle else self.submit(job)
        if not idle:
            future.exception()
            return future
        try:
            resolve = _attempt(future, job)
        finally:
            if not inside:
                self._turn.release()
        resolve()
        return future

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the jobs it has; the next job starts another. False if it still works after ``timeout`` s."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._jobs.put(None)
        thread.join(timeout)
        with self._state:
            if not thread.is_alive():
                self._thread = None
                if self._waiting:  # a job came while the thread ended
                    self._start()
        return not thread.is_alive()

    def _start(self) -> None:
        self._thread = start_daemon(self._work, self.name)

    def _work(self) -> None:
        _current.is_worker = True
        while (queued := self._jobs.get()) is not None:
            future, job, args = queued
            began = time.thread_time()
            with self._turn:
                resolve = _attempt(future, job, *args)
            self.cpu_seconds += time.thread_time() - began
            with self._state:
                self._waiting -= 1
            resolve()  # last, because a waiting thread may submit the next job at once
            del queued, future, job, args, resolve  # their tensors
            _resume_collections()  # last: this thread allocates nothing more until its next job, which has its own pause


def has_job(frame: FrameType | None) -> bool:
    """Return True if the thread with this innermost frame is a worker's that runs a job and does not wait for one."""
    inside = False
    while frame is not None:
        if frame.f_code is WorkerThread._work.__code__:
            return inside
        frame, inside = frame.f_back, True
    return False


def start_daemon(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that works on its caller's CUDA device. By itself a new thread works on the first."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run_on_device() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        run()

    thread = threading.Thread(target=run_on_device, name=name, daemon=True)
    thread.start()
    return thread


class _JobError(Exception):
    """The text of the traceback that an error of a job has lost."""


def _attempt(future: Future[Any], job: Job, *args: Any) -> Callable[[], None]:
    """Run a job; return the call that gives the future its result or its error, which may be of any kind."""
    try:
        return partial(future.set_result, job(*args))
    except BaseException as error:
        # its frames, and those that called them, know the future it goes to: a circle that would keep tensors and groups
        if error.__cause__ is None:
            error.__cause__ = _JobError(f"in the thread of the job:\n{traceback.format_exc()}")
        error.__context__ = None
        return partial(future.set_exception, error.with_traceback(None))


# The garbage collector stays off the threads that run jobs. PyTorch changes the use counts of tensors and of autograd nodes in
# C++, without the GIL. A collection that runs meanwhile on another thread can take live objects for garbage. It then clears the
# weak references to them: DDP's backward, for example, no longer finds its module. A collection on the training thread is safe,
# because that thread is not in C++ at that time.

_OFF = (2**31 - 1,) * 3
"""Thresholds that no count reaches. ``gc.disable()`` would undo what the user has chosen with it and with ``gc.enable()``."""


class _Probe:
    """An object that is allocated only so that Python compares its counts with the thresholds."""


class _Pauses:
    """The pauses that are in effect, and the thresholds that return with the end of the last one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.thresholds = gc.get_threshold()


_pauses = _Pauses()


def _pause_collections() -> None:
    """Start no collection in any thread until :func:`_resume_collections` has been called as often as this function."""
    with _pauses.lock:
        if _pauses.count == 0:
            _pauses.thresholds = gc.get_threshold()
            gc.set_threshold(*_OFF)
        _pauses.count += 1


def _resume_collections() -> None:
    """End one pause. Thresholds that the user has set meanwhile stay."""
    with _pauses.lock:
        _pauses.count -= 1
        if _pauses.count == 0 and gc.get_threshold() == _OFF:
            gc.set_threshold(*_pauses.thresholds)


def _collect_due() -> None:
    """Make the collection in this thread, now, that the pause has put off; nothing if none is due."""
    with _pauses.lock:
        if gc.get_threshold() != _OFF:
            return
        gc.set_threshold(*_pauses.thresholds)
    _Probe()  # outside the lock: a finalizer may wait for a thread that ends a pause
    with _pauses.lock:
        if _pauses.count and gc.get_threshold() == _pauses.thresholds:
            gc.set_threshold(*_OFF)


def _end_pauses_in_child() -> None:
    """End all pauses in a forked process: the threads that would end them are not there."""
    global _pauses
    thresholds, _pauses = _pauses.thresholds, _Pauses()
    if gc.get_threshold() == _OFF:
        gc.set_threshold(*thresholds)


os.register_at_fork(after_in_child=_end_pauses_in_child)
