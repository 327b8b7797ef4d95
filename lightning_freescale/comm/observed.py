"""Collectives that tell somebody when this rank arrives and when it waits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Observer(Protocol):
    """Who wants to know when this rank arrives at a collective and when it waits for one."""

    def arrive(self, name: str) -> Any:
        """This rank has issued its part of a collective."""

    def waiting(self, collective: Any) -> AbstractContextManager[None]:
        """Around this rank's wait for its result."""


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
        if self._observer is None or self._collective is None:
            return nullcontext()
        return self._observer.waiting(self._collective)

    def work(self, work: dist.Work) -> dist.Work:
        """Around a later wait."""
        if self._observer is None or self._collective is None:
            return work
        return ObservedWork(work, self._observer, self._collective)
