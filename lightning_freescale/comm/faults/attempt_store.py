"""A part of torchrun's store for one attempt alone: torchrun has the same store for all attempts.

Otherwise an attempt would take what an earlier one has left there, such as the addresses of its ranks, for its own. The number
of restarts does not distinguish attempts: each node of torchrun counts its own.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_LOOK_EVERY = timedelta(seconds=0.5)


def is_lent() -> bool:
    """Whether torchrun's store serves several attempts, by the variable that torch asks, too."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a part of torchrun's store that is this attempt's alone, for ``init_process_group(store=)``. Collective.

    The ranks wait for each other for ``timeout``, and then raise RuntimeError.
    """
    lent = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(_name_of_attempt(dist.PrefixStore("freescale attempts", lent), rank, world_size, timeout), lent)


def _name_of_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that rank 0 has made up and that no attempt had before.

    Rank 0 leaves its name, and every rank answers to it with one of its own. That rank 0 welcomes this one proves that the name
    is none that an attempt before has left: its rank 0 can not have known this one.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("rank 0", own)
        for other in range(1, world_size):
            _wait(store, f"{own} rank {other}", deadline, f"rank {other}", timeout)
            store.set(f"{store.get(f'{own} rank {other}').decode()} is welcome", "")
        return own
    while True:
        _wait(store, "rank 0", deadline, "rank 0", timeout)
        first = store.get("rank 0").decode()
        store.set(f"{first} rank {rank}", own)
        try:
            store.wait([f"{own} is welcome"], _LOOK_EVERY)
            return first
        except dist.DistStoreError:
            _refuse_to_wait(deadline, "rank 0", timeout)


def _wait(store: dist.Store, key: str, deadline: float, awaited: str, timeout: timedelta) -> None:
    while True:
        try:
            return store.wait([key], _LOOK_EVERY)
        except dist.DistStoreError:
            _refuse_to_wait(deadline, awaited, timeout)


def _refuse_to_wait(deadline: float, awaited: str, timeout: timedelta) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"{awaited} did not come to the store of torchrun within {timeout.total_seconds():g} s: see what it has printed, "
            "or give it longer with timeout=timedelta(...)"
        )
