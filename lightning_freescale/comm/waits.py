"""Waits for other ranks that torch.distributed cannot end, and how they end if another rank fails."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_freescale._runtime.worker import call_on_daemon

_POLL_SECONDS = 0.2
T = TypeVar("T")
HAS_FAILED: list[Callable[[], bool]] = []
"""Functions that return True if another rank has failed."""


def until_another_fails(create: Callable[[], T]) -> T:
    """Return ``create()``, or raise an error as soon as another rank fails. Collective.

    gloo cannot end a wait for connections. The call therefore runs on another thread. If another rank fails, that thread is
    abandoned.

    Raises:
        DistBackendError: one of the functions in ``HAS_FAILED`` returns True.
    """
    if not HAS_FAILED:
        return create()
    created = call_on_daemon(create, "freescale connect")
    while True:
        try:
            return created.result(_POLL_SECONDS)
        except NotInTime:
            if any(has_failed() for has_failed in HAS_FAILED):
                raise dist.DistBackendError("another rank has failed while this rank created a process group") from None


class MainThread:
    """The main thread as other threads see it, with a separate connection to the store for them.

    Create an object on the main thread.

    Attributes:
        store: the store over the separate connection.
    """

    def __init__(self, store: dist.Store) -> None:
        others = {connection.getsockname() for connection in _connections(store)}
        self._shared_store, self.store = store, store.clone()
        self._own = {connection.getsockname() for connection in _connections(store)} - others
        self._thread = threading.get_ident()
        self._was_at: Any = None

    @property
    def frame(self) -> FrameType | None:
        """The frame that the thread runs."""
        return sys._current_frames().get(self._thread)

    def end_wait(self) -> None:
        """End a wait of the thread in the store, if it has not left torch.distributed since the last call.

        Such a wait is the creation of a process group by the user, or NCCL's first collective.
        """
        frame = self.frame
        inside = frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed.")
        place = (id(frame), frame.f_lasti) if frame is not None and inside else None
        if place is not None and place == self._was_at:
            for connection in _connections(self._shared_store):
                if connection.getsockname() not in self._own:
                    with suppress(OSError):  # it has ended meanwhile
                        connection.shutdown(socket.SHUT_RDWR)
        self._was_at = place


def _connections(store: dist.Store) -> Iterator[socket.socket]:
    """Yield the connections of this process to the store. torch has no other way to end a wait in the store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore) or not os.path.isdir("/dev/fd"):
        return
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # of other files, and of sockets without a connection
            blocking = os.get_blocking(int(name))
            connection = socket.socket(fileno=int(name))
            os.set_blocking(int(name), blocking)  # socket.setdefaulttimeout makes new sockets non-blocking
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == store.port:
                    yield connection
            finally:
                connection.detach()
