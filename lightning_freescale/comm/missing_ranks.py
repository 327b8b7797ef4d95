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
    if environment.world_size() > 1 and not dist.is_initialized():
        call_on_daemon(partial(_watch, environment, ended), "missing ranks")
    try:
        yield
    finally:
        ended.set()


def _watch(environment: Any, ended: threading.Event) -> None:
    """Register this rank in the store of rank 0, and print which ranks have not registered."""
    address, port = environment.main_address, environment.main_port
    rank, ranks = environment.global_rank(), environment.world_size()
    store, begun, due, over = None, time.monotonic(), FIRST_REPORT, False
    while not over:
        over = ended.wait(_POLL)
        if store is None and _listens(address, port):
            store = dist.PrefixStore("waiting ranks", dist.TCPStore(address, port, wait_for_workers=False))
            store.set(f"{rank}", "")
        waited = time.monotonic() - begun
        if over or waited < due:
            continue
        due += NEXT_REPORT
        missing = [0] if store is None else [other for other in range(ranks) if not store.check([f"{other}"])]
        if missing and (rank == 0 or (store is None and environment.local_rank() == 0)):
            print(
                f"strategy 'freescale': after {waited:.0f} s, rank {rank} still waits for ranks {missing} of {ranks} at "
                f"{address}:{port}. Start the program on all nodes with this MASTER_ADDR and MASTER_PORT and check that they "
                "reach the address, or pass the number of running nodes as num_nodes=",
                file=sys.stderr,
                flush=True,
            )


def _listens(address: str, port: int) -> bool:
    # the constructor of TCPStore would log each failed connection
    try:
        socket.create_connection((address, port), _POLL).close()
    except OSError:
        return False
    return True
