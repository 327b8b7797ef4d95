"""The Works that collectives return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _ResultWork(dist.Work):
    """A Work that fills ``results``."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._results = results

    def synchronize(self) -> None:
        """Block until the tensors are there, as :meth:`wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors it fills; wait first."""
        return self._results


class TransferWork(_ResultWork):
    """A collective that a lane runs; ``done`` is the future of its job."""

    def __init__(self, done: Future[None], results: list[Tensor]) -> None:
        super().__init__(results)
        self._done = done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the tensors are there, on CUDA as well; raise DistBackendError if the collective fails."""
        try:
            error = self._done.exception(timeout.total_seconds() if timeout > timedelta(0) else None)
        except TimeoutError as late:
            raise dist.DistBackendError(f"not done within {timeout.total_seconds():g} s") from late
        if isinstance(error, Exception):
            raise dist.DistBackendError(str(error)) from None  # a new one: its frames know the future that holds the other
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, also in error."""
        return self._done.done()

    def is_success(self) -> bool:
        """Return whether it has ended without error."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        """Return its error, if it has ended in one."""
        return self._done.exception() if self._done.done() else None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of its tensors."""
        device = self._results[0].device if self._results else torch.device("cpu")
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        self._done.add_done_callback(partial(self._resolve, future))
        return future

    def _resolve(self, future: torch.futures.Future[Any], done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(self._results)
        else:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


class CoalescedWork(_ResultWork):
    """Several Works as one."""

    def __init__(self, works: list[dist.Work], results: list[Tensor]) -> None:
        super().__init__(results)
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all Works, one after the other; raise what the first of them raises."""
        return all(work.wait(timeout) for work in self._works)  # each raises or is true

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all have ended without error."""
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        """Block until the tensors are there, as :meth:`wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors they fill; wait first."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors they fill."""
        together = torch.futures.collect_all([work.get_future() for work in self._works])
        return together.then(lambda done: [each.value() for each in done.value()] and self._results)


class FinishedWork(CoalescedWork):
    """A Work of torch's own after which ``finish`` is called once, at the first wait."""

    def __init__(self, work: dist.Work, results: list[Tensor], finish: Callable[[], Any]) -> None:
        super().__init__([work], results)
        self._finish: Callable[[], Any] | None = finish
        self._once = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the Work, and finish it once."""
        super().wait(timeout)
        self._finish_once()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the finished tensors."""
        # gloo calls back before it says that the Work is done: to wait for it there would be to wait for oneself
        return self._works[0].get_future().then(lambda _: self._finish_once())

    def _finish_once(self) -> list[Tensor]:
        with self._once:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return self._results


def divide_to_whole(tensor: Tensor, ranks: int) -> None:
    """Make a sum over ``ranks`` a mean, rounded toward zero."""
    tensor.copy_(torch.div(tensor, ranks, rounding_mode="trunc"))
