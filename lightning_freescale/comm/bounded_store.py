"""Questions to the store that the ranks met at, which end in time even if the process that holds it is frozen."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from lightning_freescale._worker import start_daemon

Answer = TypeVar("Answer")
ANSWER_SECONDS = 2.0
"""How long a store may take for an answer that it has."""


class BoundedStore:
    """A store that is given up once it has not answered in time.

    torch's own calls have no timeout for a store whose connection stands and that does not answer. So each runs on a thread of
    its own, which is left behind if need be: ask only what is asked seldom, such as after a failure.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._silent = False

    def ask(self, call: Callable[[dist.Store], Answer], otherwise: Answer, wait: float = 0.0) -> Answer:
        """Return what ``call(store)`` does; ``otherwise`` if it fails, or takes seconds more than it is to ``wait`` itself."""
        if self._silent:
            return otherwise
        answer: Future[Answer] = Future()

        def run() -> None:
            found = otherwise
            with suppress(RuntimeError):  # the store may have died with its process
                found = call(self._store)
            answer.set_result(found)

        start_daemon(run, "freescale store")
        try:
            return answer.result(wait + ANSWER_SECONDS)
        except NotInTime:
            self._silent = True
            return otherwise
