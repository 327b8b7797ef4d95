"""What the exchange of a collection has moved, and how much of its time was hidden."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

COUNTS = (
    "steps",
    "announced",
    "unknown",
    "misses",
    "tokens",
    "rows",
    "served_rows",
    "colliding_served_rows",
    "plain_bytes",
    "dedup_bytes",
    "ids_bytes",
    "colliding_bytes",
    "non_colliding_bytes",
    "transfer_s",
    "exposed_s",
)


class ExchangeStatistics:
    """Totals of one collection on this rank, by the names in ``COUNTS``; counted by two threads."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(COUNTS, 0.0)
        self._lock = threading.Lock()

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a total."""
        with self._lock:
            self._totals[name] += amount

    def totals(self) -> dict[str, float]:
        """All totals so far."""
        with self._lock:
            return dict(self._totals)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Count the block's time as spent in an exchange."""
        began = time.perf_counter()
        yield
        self.count("transfer_s", time.perf_counter() - began)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the block's time as waited for by training."""
        began = time.perf_counter()
        yield
        self.count("exposed_s", time.perf_counter() - began)

    def collisions(self, rows: Tensor, colliding: Tensor) -> None:
        """Count the different rows that an owner serves, and the colliding ones among them; one batch in eight."""
        if self._totals["steps"] % 8 != 1:  # telling them apart takes time
            return
        self.count("served_rows", len(torch.unique(rows)))
        self.count("colliding_served_rows", len(torch.unique(rows[colliding])))
