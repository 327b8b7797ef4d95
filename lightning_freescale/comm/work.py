"""What a collective returns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Observer(Protocol):
    """Who wants to know when this rank arrives at a collective and when it waits for one."""

    def arrive(self, name: str) -> Any:
        """This rank has issued its part of a collective."""

    def waiting(self, collective: Any) -> AbstractContextManager[None]:
        """Around this rank's wait for its result."""


class TransferWork(dist.Work):
    """A collective that a lane runs.

    Args:
        done: of the lane's job.
        results: the tensors it fills.
        arrive: called on the waiting thread once the job is done, for streams to wait as well.
    """

    def __init__(self, done: Future[None], results: list[Tensor], arrive: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._done, self._results, self._arrive = done, results, arrive
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the tensors are there; on CUDA until the current stream will wait for them.

        Raises:
            DistBackendError: a peer is gone or did not come in time, or the ranks do not agree on the collective.
        """
        try:
            self._done.result(timeout.total_seconds() if timeout > timedelta(0) else None)
        except TimeoutError as error:
            raise dist.DistBackendError(f"not done within {timeout.total_seconds():g} s") from error
        if self._arrive is not None:
            self._arrive()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, also in error."""
        return self._done.done()

    def is_success(self) -> bool:
        """Whether it has ended without error."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        """Its error, if it has ended in one."""
        return self._done.exception() if self._done.done() else None

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors it fills."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of its tensors."""
        if self._future is None:
            device = self._results[0].device if self._results else torch.device("cpu")
            self._future = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
            self._done.add_done_callback(self._fulfil)
        return self._future

    def _fulfil(self, done: Future[None]) -> None:
        assert self._future is not None
        error = done.exception()
        if isinstance(error, Exception):
            self._future.set_exception(error)
            return
        if self._arrive is not None:
            self._arrive()
        self._future.set_result(self._results)


class ObservedWork(dist.Work):
    """A Work whose wait is observed."""

    def __init__(self, work: dist.Work, observer: Observer, collective: Any) -> None:
        super().__init__()
        self._work, self._observer, self._collective = work, observer, collective

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective."""
        with self._observer.waiting(self._collective):
            return self._work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is done without error."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Its error, if any."""
        return self._work.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        """Its future."""
        return self._work.get_future()

    def result(self) -> Any:
        """Its tensors."""
        return self._work.result()

    def synchronize(self) -> None:
        """Make the current stream wait for it."""
        self._work.synchronize()


class Observed:
    """Observes a collective, or not, if nobody wants to know."""

    def __init__(self, observer: Observer | None, name: str) -> None:
        self._observer = observer
        self._collective = observer.arrive(name) if observer is not None else None

    def waiting(self) -> AbstractContextManager[Any]:
        """Around a wait in the call itself."""
        observed = self._observer is not None and self._collective is not None
        return self._observer.waiting(self._collective) if observed else nullcontext()  # type: ignore[union-attr]

    def work(self, work: dist.Work) -> dist.Work:
        """Around a later wait."""
        if self._observer is None or self._collective is None:
            return work
        return ObservedWork(work, self._observer, self._collective)
