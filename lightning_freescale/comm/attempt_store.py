"""A part of torchrun's store for each attempt to run the ranks.

torchrun has one store for all attempts. Without a part of its own, an attempt would read the entries of an earlier one, such as
the addresses of its ranks. The number of restarts does not distinguish attempts: each node of torchrun counts its own.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.2


def has_torchrun_store() -> bool:
    """Return True if torchrun's store serves several attempts, by the variable that torch reads, too."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the part of torchrun's store that only this attempt uses, for ``init_process_group(store=)``. Collective.

    Raises:
        RuntimeError: a rank has not connected within ``timeout``.
    """
    lent = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(_name_of_attempt(dist.PrefixStore("freescale attempts", lent), rank, world_size, timeout), lent)


def _name_of_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a new name that rank 0 has created for this attempt.

    Rank 0 publishes its name, and every rank answers with a name of its own. Rank 0 confirms each answer. A name of an earlier
    attempt is never confirmed, because its rank 0 did not know this attempt's ranks.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()

    def has_come(key: str, awaited: str) -> bool:
        if store.check([key]):  # wait() would print two warnings each time
            return True
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{awaited} did not connect to the store of torchrun within {timeout.total_seconds():g} s. Read the output of "
                "that rank, or allow more time with timeout=timedelta(...)"
            )
        time.sleep(_POLL_SECONDS)
        return False

    if rank == 0:
        store.set("rank 0", own)
        for other in range(1, world_size):
            while not has_come(f"{own} rank {other}", f"rank {other}"):
                pass
            store.set(f"{store.get(f'{own} rank {other}').decode()} is welcome", "")
        return own
    while True:
        if has_come("rank 0", "rank 0"):
            first = store.get("rank 0").decode()
            store.set(f"{first} rank {rank}", own)
            if has_come(f"{own} is welcome", "rank 0"):
                return first
