"""A thread that makes items ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from lightning_freescale._worker import WorkerThread

T = TypeVar("T")
_END: Any = object()


class PrefetchThread(Generic[T]):
    """Iterates ``items`` in a thread, at most ``ahead`` items ahead of those that were used.

    Items may be made with collectives: how many are made depends only on how many were used, so ranks that use the same
    number perform the same collectives, also when all of them stop early.

    Args:
        items: what to iterate; closed by the thread.
        ahead: item ``k + ahead`` is made once item ``k`` was used.
    """

    def __init__(self, items: Generator[T, None, None], ahead: int) -> None:
        self._items = items
        # its thread is a daemon, so that a rank whose peers are gone can end without waiting for them
        self._worker = WorkerThread("freescale-stream")
        self._made: deque[Future[T]] = deque(self._submit_next() for _ in range(ahead))

    def __iter__(self) -> Iterator[T]:
        """Yield the items in their order; raise what the thread raised."""
        while (item := self._made.popleft().result()) is not _END:
            self._made.append(self._submit_next())
            yield item

    def stop(self) -> None:
        """Let the thread make what it still may, as the other ranks' threads do, and wait for its end."""
        # a generator that fails or is left early ends its workers here, not on whichever thread drops it
        self._worker.submit(self._items.close)
        self._worker.stop()

    def _submit_next(self) -> Future[T]:
        return self._worker.submit(next, self._items, _END)
