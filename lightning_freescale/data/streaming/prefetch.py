"""A thread that makes items ahead of their use."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

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
        self._allowed = ahead  # items that may still be made
        self._ready: deque[T] = deque()
        self._change = threading.Condition()
        self._stopping = self._done = False
        self._error: BaseException | None = None
        # a daemon, so that a rank whose peers are gone can end without waiting for them
        self._thread = threading.Thread(target=self._run, name="freescale-stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        """Yield the items in their order; raise what the thread raised."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ready or self._done)
                if not self._ready:
                    break
                item = self._ready.popleft()
                self._allowed += 1
                self._change.notify_all()
            yield item
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let the thread make what it still may, as the other ranks' threads do, and wait for its end."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        self._thread.join()
        self._ready.clear()

    def _run(self) -> None:
        try:
            # a generator that fails or is left early ends its workers here, not on whichever thread drops it
            with contextlib.closing(self._items) as items:
                while self._wait_for_permission() and (item := next(items, _END)) is not _END:
                    with self._change:
                        self._ready.append(item)
                        self._change.notify_all()
        except BaseException as error:
            self._error = error
        with self._change:
            self._done = True
            self._change.notify_all()

    def _wait_for_permission(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._allowed or self._stopping)
            self._allowed -= 1
            return self._allowed >= 0
