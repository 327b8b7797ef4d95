"""The thread that runs a collection's exchanges, one after the other in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale._worker import WorkerThread
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.transport import ExchangeObserver, LaunchOrder


class _JobDone(NamedTuple):
    """A job that has run.

    Attributes:
        result: what it returned.
        queued: on CUDA the event behind the work that it has queued.
        stamp: of when it was done; None if no observer records.
    """

    result: Any
    queued: Any
    stamp: Any


class ExchangeWorker(WorkerThread):
    """A worker with a CUDA stream of its own, that ends with the first error.

    Its queue is the agreed order of the exchanges: every rank's jobs exchange the same messages in the same order, so no rank
    has to ask another. One queue for all collections would have to know in which order the model calls them.

    Args:
        path: of the collection, for errors.
        device: of the rows.
        statistics: counts waits.
        order: in which its exchanges are launched.
        hops: groups to abort when a job fails, because ranks outside of them would not hear of it.

    Attributes:
        error: what a job has raised.
        observer: is told when training waits for rows.
    """

    def __init__(
        self,
        path: str,
        device: torch.device,
        statistics: ExchangeStatistics,
        order: LaunchOrder | None = None,
        hops: Sequence[Any] = (),
    ) -> None:
        super().__init__(f"freescale-{path}")
        self.error: Exception | None = None
        self.observer: ExchangeObserver | None = None
        self._arrived: Any = None
        self._path, self._statistics, self._order, self._hops = path, statistics, order, hops
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a job; work that the current CUDA stream has been given so far comes before it."""
        issued = None
        if self._stream is not None:
            _record_stream(args, self._stream)
            issued = torch.cuda.current_stream(self._stream.device).record_event()
        return super().submit(self._run_in_order, issued, job, *args)

    def wait(self, future: Future[Any]) -> Any:
        """Wait for a job, and return its result; on CUDA the current stream waits for what the job has queued.

        Raises:
            Exception: what the job, or one before it, raised.
        """
        done: _JobDone = future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(done.queued)
        return done.result

    def arrive(self) -> None:
        """Note that this rank has done its part of what it will await next."""
        self._arrived = None if self.observer is None else self.observer.stamp()

    def await_rows(self, *jobs: Future[Any] | None) -> Any:
        """Wait as :meth:`wait` for jobs that run in this order, as exposed communication; return the last one's result."""
        result, last = None, None
        arrived, self._arrived = self._arrived, None
        observed: AbstractContextManager[Any] = (
            nullcontext() if self.observer is None else self.observer.awaited("embedding rows", arrived)
        )
        with self._statistics.timed("exposed_s"), observed as collective:
            for job in jobs:
                if job is not None:
                    result, last = self.wait(job), job
        if collective is not None and last is not None:
            collective.done = last.result().stamp
        return result

    def hand_over(self, *tensors: Tensor) -> None:
        """Let ``tensors`` that a job made be used on the current stream from now on."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self._stream.device))

    def _stamp(self) -> Any:
        return self.observer.stamp() if self.observer is not None and self.observer.recording else None

    def _run_in_order(self, issued: Any, job: Callable[..., Any], *args: Any) -> Any:
        if self.error is not None:  # a job failed, so the peers of those behind it cannot be in step
            raise self.error
        try:
            if self._stream is None:
                return _JobDone(job(*args), None, self._stamp())
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(issued)
                result = job(*args)
                return _JobDone(result, self._stream.record_event(), self._stamp())
        except ValueError as error:  # says by itself what is wrong
            self.error = error
        except BaseException as error:  # any: another thread waits for the job
            self.error = RuntimeError(f"embedding exchange of collection {self._path!r}: {error}")
            self.error.__cause__ = error
            for group in self._hops:
                group.abort()
        if self._order is not None:  # others may wait for their turn after this one's
            self._order.fail(str(self.error))
        raise self.error


def _record_stream(values: Iterable[Any], stream: torch.cuda.Stream) -> None:
    for each in values:
        if isinstance(each, (Tensor, KeyedJaggedTensor)):
            each.record_stream(stream)
        elif isinstance(each, (list, tuple)):
            _record_stream(each, stream)
