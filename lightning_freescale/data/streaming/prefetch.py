"""A thread that makes items ahead of their use."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from lightning_freescale._worker import start_daemon

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
        self._ready: SimpleQueue[T] = SimpleQueue()
        self._permits: SimpleQueue[bool] = SimpleQueue()  # True for every item that may be made, False after the last
        for _ in range(ahead):
            self._permits.put(True)
        self._error: BaseException | None = None
        # a daemon, so that a rank whose peers are gone can end without waiting for them
        self._thread = start_daemon(self._run, "freescale-stream")

    def __iter__(self) -> Iterator[T]:
        """Yield the items in their order; raise what the thread raised."""
        while (item := self._ready.get()) is not _END:
            self._permits.put(True)
            yield item
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let the thread make what it still may, as the other ranks' threads do, and wait for its end."""
        self._permits.put(False)
        self._thread.join()

    def _run(self) -> None:
        try:
            # a generator that fails or is left early ends its workers here, not on whichever thread drops it
            with contextlib.closing(self._items) as items:
                while self._permits.get() and (item := next(items, _END)) is not _END:
                    self._ready.put(item)
        except BaseException as error:
            self._error = error
        self._ready.put(_END)
