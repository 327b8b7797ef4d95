"""Counts of bytes, rows and seconds of the exchanges, and the report of the time that overlap saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import RowRequest

_LOOKUPS = ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups", "tokens", "rows")
_ROWS = ("incoming_rows", "colliding_incoming_rows")
_BYTES = ("torchrec_bytes", "dedup_bytes", "ids_bytes", "colliding_bytes", "non_colliding_bytes", "cross_node_bytes")
COUNTS = (*_LOOKUPS, *_ROWS, *_BYTES, "transfer_s", "exposed_s")
"""The names of a collection's totals."""


class ExchangeStatistics:
    """Totals of one collection on this rank, by the names in ``COUNTS``; two threads count."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(COUNTS, 0.0)
        self._lock = threading.Lock()
        self._suspended = False

    def count(self, **amounts: float) -> None:
        with self._lock:
            if self._suspended:
                return
            for name, amount in amounts.items():
                self._totals[name] += amount

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Count nothing in the context, which belongs to no training step."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the context to the total ``name``."""
        began = time.perf_counter()
        yield
        self.count(**{name: time.perf_counter() - began})

    def count_lookup(self, request: RowRequest, rank: int, dim: int, torchrec_bytes: int | None = None) -> None:
        """Count the rows and ids of this rank's lookups, and the bytes that TorchRec would move for them.

        ``torchrec_bytes`` is passed for bags only.
        """
        ids, rows = sum(request.ids), sum(request.sizes)
        per_row = 8 + 2 * 4 * dim  # an id of 64 bits, its row, and the gradient back
        self.count(
            tokens=ids,
            rows=rows,
            torchrec_bytes=(ids - request.ids[rank]) * per_row if torchrec_bytes is None else torchrec_bytes,
            dedup_bytes=(rows - request.sizes[rank]) * per_row,
        )

    def totals(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)


@dataclass(frozen=True)
class OverlapReport:
    """Means per optimizer step over all collections, of one rank or over all ranks.

    Attributes:
        steps: the number of steps that began while a collection was overlapped.
        collision_rate: the share of the rows of a global batch that the batch before it updates as well.
        hidden_s: the seconds of exchange during which training went on.
        exposed_s: the seconds that training waited for rows.
        tokens: the number of ids looked up.
        rows: the number of rows requested, each once with ``dedup``.
        torchrec_bytes: the bytes that plain TorchRec would move: each id, its row and its gradient, or those of the bags.
        dedup_bytes: the bytes that TorchRec would move with each row once.
        ids_bytes: the bytes sent to agree on rows.
        colliding_bytes: the bytes of rows and gradients that training waited for.
        non_colliding_bytes: the bytes of rows and gradients sent during compute.
        cross_node_bytes: the part of the last three sent to other nodes; 0 if the nodes are unknown.
        unpredicted_lookups: the number of lookups whose ids were unknown ahead.
        mispredicted_lookups: the number of lookups with other ids than predicted.
    """

    steps: int
    collision_rate: float
    hidden_s: float
    exposed_s: float
    tokens: float
    rows: float
    torchrec_bytes: float
    dedup_bytes: float
    ids_bytes: float
    colliding_bytes: float
    non_colliding_bytes: float
    cross_node_bytes: float
    unpredicted_lookups: float
    mispredicted_lookups: float

    @classmethod
    def from_totals(cls, totals: Mapping[str, float], before: Mapping[str, float] | None = None) -> OverlapReport | None:
        """Return the means of totals, or of their growth since ``before``; None without steps."""
        grown = {name: value - (before or {}).get(name, 0.0) for name, value in totals.items()}
        steps, incoming = grown.pop("steps"), grown["incoming_rows"]
        if not steps:
            return None
        grown["hidden_s"] = max(0.0, grown["transfer_s"] - grown["exposed_s"])
        means = {name: grown[name] / steps for name in cls.__annotations__ if name in grown}
        rate = grown["colliding_incoming_rows"] / incoming if incoming else 0.0
        return cls(steps=int(steps), collision_rate=rate, **means)

    def scalars(self) -> dict[str, float]:
        """Return the means by the names that loggers use."""
        return {f"freescale/overlap/{name}": value for name, value in vars(self).items() if name != "steps"}

    def __str__(self) -> str:
        moved = self.ids_bytes + self.colliding_bytes + self.non_colliding_bytes
        total = self.hidden_s + self.exposed_s
        hidden = self.hidden_s / total if total else 0.0
        crossed = f", {self.cross_node_bytes / 1e6:.3g} to other nodes" if self.cross_node_bytes else ""
        others = (self.unpredicted_lookups + self.mispredicted_lookups) * self.steps
        return (
            f"embedding exchange: {hidden:.0%} of its {1e3 * total:.1f} ms per step hidden, {1e3 * self.exposed_s:.1f} ms "
            f"waited for; collision rate {self.collision_rate:.0%}; {moved / 1e6:.3g} MB sent per step "
            f"({self.colliding_bytes / 1e6:.3g} waited for{crossed}), plain TorchRec {self.torchrec_bytes / 1e6:.3g}; "
            f"{others:.0f} lookups of unexpected ids"
        )


class BagTraffic:
    """Counts the bytes that TorchRec would move for bags, whose owners pool rows before they send them, in tables of one width.

    The count depends on the number of bags, not on their contents. A table that is split by rows is pooled by every rank, and
    each sends all other ranks a row for each of their bags, even without a row of it (a reduce-scatter). A table on one rank is
    pooled there.
    """

    def __init__(self, layout: RowLayout, rank: int, dim: int) -> None:
        self._layout, self._dim = layout, dim
        last = torch.tensor([[layout.rows_of(each)] for each in range(layout.ranks)])
        holds = torch.diff(layout.first_row, append=last) > 0
        sends = holds | (holds.sum(dim=0) > 1)
        self._others = np.arange(layout.ranks) != rank
        self._senders = [
            (feature, (sends[:, table].numpy() & self._others).astype(np.int64)) for feature, table in layout.features
        ]

    def pooled_rows(self, features: KeyedJaggedTensor) -> np.ndarray:
        """Return the number of pooled rows that TorchRec would send to this rank for one lookup, by sending rank."""
        bags = dict(zip(features.keys(), features.stride_per_key()))
        none = np.zeros(self._layout.ranks, np.int64)
        return sum((bags.get(feature, 0) * senders for feature, senders in self._senders), none)

    def torchrec_bytes(self, request: RowRequest, pooled_rows: np.ndarray | int) -> int:
        ids = np.array(request.ids)
        # an id of 64 bits; the length of a bag, its pooled row, and the gradient back
        return int((8 * ids + (4 + 2 * 4 * self._dim) * pooled_rows)[self._others].sum())
