"""Waits for other ranks: how they end if another rank fails, and the names of the ranks that are missing at the start."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_freescale._runtime.worker import call_on_daemon
from lightning_freescale.comm.attempt_store import has_torchrun_store

FIRST_REPORT, NEXT_REPORT = 20.0, 60.0
"""Seconds until missing ranks are named, and until they are named again."""
_POLL_SECONDS = 0.2
_END_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
T = TypeVar("T")
WAITING: list[MainThread] = []
"""The main thread, once for each open :class:`.RankNotices`."""


def until_another_fails(create: Callable[[], T]) -> T:
    """Return ``create()``, or raise an error as soon as another rank fails. Collective.

    gloo cannot end a wait for connections. The call therefore runs on another thread. If another rank fails, this process
    closes its connections to the store, which ends a wait there. A thread that waits for a peer is abandoned.

    Raises:
        DistBackendError: another rank has failed.
    """
    if not WAITING:
        return create()
    created = call_on_daemon(create, "freescale connect")
    while not wait([created], _POLL_SECONDS).done:
        if failed := [thread for thread in WAITING if thread.another_failed()]:
            failed[0].end_waits_in_store()
            wait([created], _END_SECONDS)  # the end of a wait while the interpreter exits would abort the process
            raise dist.DistBackendError("another rank has failed while this rank created a process group")
    return created.result()


class MainThread:
    """The main thread as other threads see it, with a separate connection to the store for them.

    Create an object on the main thread.
    """

    def __init__(self, store: dist.Store, another_failed: Callable[[], bool]) -> None:
        self.another_failed = another_failed
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
            self.end_waits_in_store()
        self._was_at = place

    def end_waits_in_store(self) -> None:
        """Close the connections of this process to the store, but not that of :attr:`store`."""
        for connection in _connections(self._shared_store):
            if connection.getsockname() not in self._own:
                with suppress(OSError):  # it has ended meanwhile
                    connection.shutdown(socket.SHUT_RDWR)


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


@contextmanager
def naming_missing_ranks(environment: Any) -> Iterator[None]:
    """Print which ranks are missing while the context waits for them, after 20 s and then each minute.

    The wait itself is torch's and does not change. ``environment`` is Lightning's cluster environment.
    """
    ended = threading.Event()
    if not dist.is_initialized():
        call_on_daemon(partial(_name_missing, environment, ended), "missing ranks")
    try:
        yield
    finally:
        ended.set()


def _name_missing(environment: Any, ended: threading.Event) -> None:
    """Register this rank in the store of rank 0, and print which ranks have not registered."""
    store, begun, due = None, time.monotonic(), FIRST_REPORT
    while not ended.wait(_POLL_SECONDS):
        rank, ranks = environment.global_rank(), environment.world_size()
        if ranks == 1:
            continue
        place = environment.main_address, environment.main_port
        with suppress(OSError):  # the constructor of TCPStore would log each failed connection
            if store is None:
                socket.create_connection(place, _CONNECT_SECONDS).close()
                store = dist.PrefixStore("waiting ranks", dist.TCPStore(*place, wait_for_workers=False))
                store.set(f"{rank}", "")
        if (waited := time.monotonic() - begun) < due:
            continue
        due += NEXT_REPORT
        missing = [0] if store is None else [other for other in range(ranks) if not store.check([f"{other}"])]
        prints = environment.local_rank() == 0 if store is None else missing[:rank] == [*range(rank)]
        if missing and prints:  # the first rank in the store, or the first one of each node if there is no store
            text = (
                f"strategy 'freescale': after {waited:.0f} s, rank {rank} still waits for ranks {missing} of {ranks} at "
                f"{place[0]}:{place[1]}. Start the program on all nodes with this MASTER_ADDR and MASTER_PORT and check that "
                "they reach the address, or pass the number of running nodes as num_nodes="
            )
            print(text, file=sys.stderr, flush=True)
    if store is not None and has_torchrun_store():
        with suppress(RuntimeError):  # rank 0 has ended
            store.delete_key(f"{rank}")  # torchrun's store outlives this attempt
