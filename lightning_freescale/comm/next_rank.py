"""The end of the next rank's process, which this rank notices by a connection to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_freescale._runtime.worker import start_daemon
from lightning_freescale.comm.transports.p2p import GlooP2P

_FAREWELL = 0  # the tag
_FAREWELL_SECONDS = 1.0
_FOREVER = timedelta(days=3650)


class NextRank:
    """A thread that waits for the farewell of the next rank. The constructor is collective.

    If the connection ends without a farewell, that process has ended. The thread then calls ``on_end`` with the rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, on_end: Callable[[int], None]) -> None:
        self._ring = GlooP2P(store, rank, size, timeout, list(range(size)))
        self._previous, self._next = (rank - 1) % size, (rank + 1) % size
        self._is_closed = False
        self._thread = start_daemon(partial(self._watch, on_end), "freescale watch")

    def close(self, farewell: bool) -> None:
        """Send a farewell to the previous rank if wanted, and end the thread and the connections."""
        if farewell:
            with suppress(RuntimeError):
                work = self._ring.send(torch.empty(1), self._previous, _FAREWELL)
                work.wait(timedelta(seconds=_FAREWELL_SECONDS))
        self._is_closed = True
        self._ring.close_connections()
        self._thread.join(_FAREWELL_SECONDS)

    def _watch(self, on_end: Callable[[int], None]) -> None:
        try:
            self._ring.receive(torch.empty(1), self._next, _FAREWELL).wait(_FOREVER)
        except RuntimeError:
            if not self._is_closed:
                on_end(self._next)
