"""The ``Work`` that a collective of a lane returns."""

from __future__ import annotations

from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TransferWork(dist.Work):
    """A collective that a lane runs; ``done`` is the future of its job, which fills the tensors ``results``."""

    def __init__(self, done: Future[None], results: list[Tensor]) -> None:
        super().__init__()
        self._done, self._results = done, results

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the tensors are complete, on CUDA as well. Raise DistBackendError if the collective fails."""
        try:
            error = self._done.exception(timeout.total_seconds() if timeout > timedelta(0) else None)
        except TimeoutError as late:
            raise dist.DistBackendError(f"not done within {timeout.total_seconds():g} s") from late
        if isinstance(error, Exception):
            raise dist.DistBackendError(str(error)) from None  # a new error, whose frames do not form a cycle with the future
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        return self._done.exception() if self._done.done() else None

    def get_future(self) -> torch.futures.Future[Any]:
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
