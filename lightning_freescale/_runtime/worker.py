"""A thread that runs the jobs of a process group, the overlap engine or the profiler in the order of submission."""

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
from typing import Any, TypeVar

import torch

Job = Callable[..., Any]
T = TypeVar("T")
_current = threading.local()  # has the attribute is_worker in the thread of a worker


class WorkerThread:
    """A thread that runs one job at a time. A caller that would only wait for its job may run the job itself.

    The thread starts with the first background job. It is a daemon, because a job that waits for a dead rank must not keep the
    process alive. While background jobs are queued or running, only the submitting threads collect garbage. The comment in
    this module states the reason.

    Attributes:
        cpu_seconds: processor time of the background jobs.
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
        """Run a job on the caller's thread, or after the queued jobs, and return its completed future."""
        # waking a thread costs more than a small message, so the thread runs the job only if others are queued
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
        """End the thread after its queued jobs; the next job starts a new one. Return False if it still runs after the timeout.

        ``timeout`` is in seconds.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._jobs.put(None)
        thread.join(timeout)
        with self._state:
            if not thread.is_alive():
                self._thread = None
                if self._waiting:  # a job was submitted while the thread ended
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
            resolve()  # after the count, because a waiting thread may submit the next job at once
            del queued, future, job, args, resolve  # their tensors
            _resume_collections()  # last: this thread allocates nothing more until its next job, which has its own pause


def has_job(frame: FrameType | None) -> bool:
    """Return True if the thread with this innermost frame is a worker thread that runs a job."""
    inside = False
    while frame is not None:
        if frame.f_code is WorkerThread._work.__code__:
            return inside
        frame, inside = frame.f_back, True
    return False


def start_daemon(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that uses the CUDA device of its caller; by default a new thread uses the first device."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run_on_device() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        run()

    thread = threading.Thread(target=run_on_device, name=name, daemon=True)
    thread.start()
    return thread


def call_on_daemon(call: Callable[[], T], name: str) -> Future[T]:
    """Begin a call on a new thread that may never end, and return its future."""
    future: Future[T] = Future()
    start_daemon(partial(resolve, future, call), name)
    return future


def resolve(future: Future[Any], call: Callable[[], Any]) -> None:
    """Set the result or the error of the call, which keeps its frames."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class _JobError(Exception):
    """The traceback of a job as text; the job's error has lost its frames."""


def _attempt(future: Future[Any], job: Job, *args: Any) -> Callable[[], None]:
    """Run a job and return the call that resolves the future."""
    try:
        return partial(future.set_result, job(*args))
    except BaseException as error:
        # the frames refer to the future, and the future to the error: a cycle that would keep tensors and groups alive
        if error.__cause__ is None:
            error.__cause__ = _JobError(f"in the thread of the job:\n{traceback.format_exc()}")
        error.__context__ = None
        return partial(future.set_exception, error.with_traceback(None))


# The garbage collector does not run on threads that run jobs. PyTorch changes the reference counts of tensors and autograd
# nodes in C++, without the GIL. A collection that runs at this time on another thread can take live objects for garbage. It
# then clears the weak references to them: DDP's backward, for example, no longer finds its module. A collection on the
# training thread is safe, because that thread is not in C++ at that time.

_OFF = (2**31 - 1,) * 3
"""Thresholds that no count reaches. ``gc.disable()`` would override the user's own choice between enabled and disabled."""


class _Probe:
    """An object whose allocation makes Python compare its counts with the thresholds."""


class _Pauses:
    """The number of pauses in effect, and the thresholds to restore after the last one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.thresholds = gc.get_threshold()


_pauses = _Pauses()


def _pause_collections() -> None:
    """Prevent collections in all threads until :func:`_resume_collections` has been called as often as this function."""
    with _pauses.lock:
        if _pauses.count == 0:
            _pauses.thresholds = gc.get_threshold()
            gc.set_threshold(*_OFF)
        _pauses.count += 1


def _resume_collections() -> None:
    """End one pause. Thresholds that the user has set during the pause remain."""
    with _pauses.lock:
        _pauses.count -= 1
        if _pauses.count == 0 and gc.get_threshold() == _OFF:
            gc.set_threshold(*_pauses.thresholds)


def _collect_due() -> None:
    """Run the collection that the pause has postponed, if any, in this thread."""
    with _pauses.lock:
        if gc.get_threshold() != _OFF:
            return
        gc.set_threshold(*_pauses.thresholds)
    _Probe()  # outside the lock: a finalizer may wait for a thread that ends a pause
    with _pauses.lock:
        if _pauses.count and gc.get_threshold() == _pauses.thresholds:
            gc.set_threshold(*_OFF)


def _end_pauses_in_child() -> None:
    """End all pauses in a forked process, which does not have the threads that would end them."""
    global _pauses
    thresholds, _pauses = _pauses.thresholds, _Pauses()
    if gc.get_threshold() == _OFF:
        gc.set_threshold(*thresholds)


os.register_at_fork(after_in_child=_end_pauses_in_child)
