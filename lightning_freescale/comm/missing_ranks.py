"""Name the ranks for which the creation of the default process group waits."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_freescale._runtime.worker import call_on_daemon

FIRST_REPORT, NEXT_REPORT = 20.0, 60.0
"""Seconds until the first line, and between lines."""
_POLL = 0.5


@contextmanager
def naming_missing_ranks(environment: Any) -> Iterator[None]:
    """Print which ranks are missing while the context waits for them, after 20 s and then each minute.

    The wait itself is torch's and does not change. ``environment`` is Lightning's cluster environment.
    """
    ended = threading.Event()
    if not dist.is_initialized():
        call_on_daemon(partial(_watch, environment, ended), "missing ranks")
    try:
        yield
    finally:
        ended.set()


def _watch(environment: Any, ended: threading.Event) -> None:
    """Register this rank in the store of rank 0, and print which ranks have not registered."""
    store, begun, due, over = None, time.monotonic(), FIRST_REPORT, False
    while not over:
        over = ended.wait(_POLL)
        rank, ranks = environment.global_rank(), environment.world_size()
        if ranks == 1:
            continue
        place = environment.main_address, environment.main_port
        if store is None and _listens(place):
            store = dist.PrefixStore("waiting ranks", dist.TCPStore(*place, wait_for_workers=False))
            store.set(f"{rank}", "")
        if over or (waited := time.monotonic() - begun) < due:
            continue
        due += NEXT_REPORT
        missing = [0] if store is None else [other for other in range(ranks) if not store.check([f"{other}"])]
        if missing and (rank == 0 or (store is None and environment.local_rank() == 0)):
            text = (
                f"strategy 'freescale': after {waited:.0f} s, rank {rank} still waits for ranks {missing} of {ranks} at "
                f"{place[0]}:{place[1]}. Start the program on all nodes with this MASTER_ADDR and MASTER_PORT and check that "
                "they reach the address, or pass the number of running nodes as num_nodes="
            )
            print(text, file=sys.stderr, flush=True)


def _listens(place: tuple[str, int]) -> bool:
    try:  # the constructor of TCPStore would log each failed connection
        socket.create_connection(place, _POLL).close()
    except OSError:
        return False
    return True
