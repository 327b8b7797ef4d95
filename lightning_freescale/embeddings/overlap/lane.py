"""A thread that does one job after the other: the order in which a collection's exchanges run, the same on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Lane:
    """Runs jobs in the background, in the order they were given.

    After a job has raised, those behind it fail with the same error without being run: their peers cannot be in step.
    A daemon thread, because a job that waits for a rank that is gone must not keep this process from ending.

    Args:
        name: of the collection, for errors.
        device: on CUDA the jobs run on a stream of their own (not tested on GPU).

    Attributes:
        error: what a job has raised.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.error: Exception | None = None
        self._last: Future[Any] | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._work, name=f"freescale-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a job; work that the current CUDA stream has been given so far comes before it."""
        future: Future[Any] = Future()
        if self.stream is not None:
            for argument in args:
                if isinstance(argument, Tensor):
                    argument.record_stream(self.stream)
            args = (torch.cuda.current_stream(self.stream.device).record_event(), job, *args)
            job = self._on_stream
        self._jobs.put((future, job, args))
        self._last = future
        return future

    def wait(self, future: Future[Any]) -> None:
        """Wait for a job; on CUDA the current stream waits for what it has queued.

        Raises:
            Exception: what the job, or one before it, raised.
        """
        done = future.result()
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(done)

    def hand_over(self, *tensors: Tensor) -> None:
        """What a job made is used on the current stream from now on."""
        if self.stream is not None:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.stream.device))

    def drain(self) -> None:
        """Wait until nothing is left to do; raises as :meth:`wait`."""
        if self._last is not None:
            self.wait(self._last)

    def close(self, timeout: float = 1.0) -> bool:
        """End the thread; False if a job still waits, for a rank that is gone: it is left behind."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _on_stream(self, event: torch.cuda.Event, job: Callable[..., Any], *args: Any) -> torch.cuda.Event:
        assert self.stream is not None
        self.stream.wait_event(event)
        job(*args)
        return self.stream.record_event()

    def _work(self) -> None:
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            while (queued := self._jobs.get()) is not None:
                self._run(*queued)
                del queued  # memory: its batch is done

    def _run(self, future: Future[Any], job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.error is not None:
            future.set_exception(self.error)
            return
        try:
            future.set_result(job(*args))
        except ValueError as error:
            self._fail(future, error)
        except BaseException as error:  # also what would end a thread: somebody waits for this future
            named = RuntimeError(f"embedding exchange of collection {self._name!r}: {error}")
            named.__cause__ = error
            self._fail(future, named)

    def _fail(self, future: Future[Any], error: Exception) -> None:
        self.error = error
        future.set_exception(error)
