"""Counts of bytes, rows and seconds of the exchanges, and the report of the time that overlap saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import Forwarded, RowRequest

_LOOKUPS = ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups", "tokens", "rows")
_ROWS = ("incoming_rows", "colliding_incoming_rows")
_BYTES = ("torchrec_bytes", "dedup_bytes", "ids_bytes", "colliding_bytes", "non_colliding_bytes", "cross_node_bytes")
_HEAT = ("hot_near_bytes", "hot_far_bytes", "hot_direct_bytes", "hot_colliding_rows", "far_colliding_rows")
COUNTS = (*_LOOKUPS, *_ROWS, *_BYTES, *_HEAT, "transfer_s", "exposed_s")
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

    def suspended(self) -> AbstractContextManager[None]:
        """Count nothing in the context, which belongs to no training step."""
        return replaced(self, {"_suspended": True})

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the context to the total ``name``."""
        began = time.perf_counter()
        yield
        self.count(**{name: time.perf_counter() - began})

    def count_lookup(self, request: RowRequest, rank: int, dim: int, senders: Sequence[int] | None) -> None:
        """Count this rank's ids and rows, and the bytes that TorchRec would move for them. ``senders`` is None without bags."""
        ids, rows = sum(request.ids), sum(request.sizes)
        per_row = 8 + 2 * 4 * dim  # an id of 64 bits, its row, and the gradient back
        torchrec_bytes = (ids - request.ids[rank]) * (per_row if senders is None else 8)
        per_bag = 4 + 2 * 4 * dim  # the length of a bag, its pooled row, and the gradient back
        pooled_rows = sum(bags * ranks for bags, ranks in zip(request.bags, senders or ()))
        self.count(
            tokens=ids,
            rows=rows,
            torchrec_bytes=torchrec_bytes + per_bag * pooled_rows,
            dedup_bytes=(rows - request.sizes[rank]) * per_row,
        )

    def count_hot(self, through: Forwarded, bytes_of_values: int) -> None:
        """Count the bytes between nodes of a batch's hot rows; a row and its gradient have ``bytes_of_values``."""
        per_row = 6 + bytes_of_values  # and an id of 32 bits and two flags
        passed = len(through.request.rows) - len(through.cold)
        self.count(hot_direct_bytes=per_row * sum(through.hot.sizes), hot_far_bytes=per_row * passed)

    def totals(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)


@dataclass(frozen=True)
class Heat:
    """The accesses to the rows of one collection at a publication, equal on all ranks."""

    sizes: list[int]  # hot rows that each owner publishes; all 0 if the list does not pay off
    saved_s: float  # predicted saving of a step with the list of all owners; 0 without costs
    rows_of_half: int  # the most requested rows, which make 50 % of all accesses
    rows_of_most: int  # those that make 90 %
    largest_load: float  # accesses of the owner with the most, divided by the mean over owners


@dataclass(frozen=True)
class HeatReport:
    """Hot rows, summed over all collections. Bytes are means per optimizer step, of one rank or over all ranks."""

    rows: int  # in the current lists
    rows_of_half: int  # the most requested rows, which make 50 % of all accesses
    rows_of_most: int  # those that make 90 %
    largest_load: float  # accesses of the owner with the most, divided by the mean over owners; the largest of all collections
    colliding_share: float | None  # share of hot rows among the requested colliding rows of other nodes; None if none collides
    sent_bytes: float  # bytes of ids, rows and gradients that a rank sends
    cross_node_bytes: float  # the part of them between nodes
    hot_near_bytes: float  # the part of sent_bytes for hot rows within the node
    hot_far_bytes: float  # the part of cross_node_bytes for hot rows
    hot_direct_bytes: float  # bytes between nodes if all ranks had sent the same hot rows directly

    @classmethod
    def of(cls, heats: Sequence[Heat], totals: Mapping[str, float], steps: float) -> HeatReport | None:
        """Return the report of the collections that have published ``heats``; None if there are none."""
        if not heats:
            return None
        colliding = totals["far_colliding_rows"]
        means = {name: totals[name] / steps for name in cls.__annotations__ if name in totals and name != "rows"}
        return cls(
            rows=sum(sum(heat.sizes) for heat in heats),
            rows_of_half=sum(heat.rows_of_half for heat in heats),
            rows_of_most=sum(heat.rows_of_most for heat in heats),
            largest_load=max(heat.largest_load for heat in heats),
            colliding_share=totals["hot_colliding_rows"] / colliding if colliding else None,
            sent_bytes=sum(totals[f"{kind}_bytes"] for kind in ("ids", "colliding", "non_colliding")) / steps,
            **means,
        )

    def scalars(self) -> dict[str, float]:
        return {f"freescale/heat/{name}": value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class OverlapReport:
    """Means per optimizer step over all collections, of one rank or over all ranks."""

    steps: int  # steps that began while a collection was overlapped
    collision_rate: float  # share of the rows of a global batch that the batch before it updates as well
    hidden_s: float  # seconds of exchange during which training went on
    exposed_s: float  # seconds that training waited for rows
    tokens: float  # ids looked up
    rows: float  # rows requested, each once with dedup
    torchrec_bytes: float  # bytes that plain TorchRec would move: each id, its row and its gradient, or those of the bags
    dedup_bytes: float  # bytes that TorchRec would move if it sent each row once
    ids_bytes: float  # bytes sent to agree on rows
    colliding_bytes: float  # bytes of rows and gradients that training waited for
    non_colliding_bytes: float  # bytes of rows and gradients sent during compute
    cross_node_bytes: float  # the part of the last three that went to other nodes; 0 if the nodes are unknown
    unpredicted_lookups: float  # lookups whose ids were unknown ahead
    mispredicted_lookups: float  # lookups with other ids than predicted
    heat: HeatReport | None = None  # None before the first list, and if no row can be hot

    @classmethod
    def from_totals(
        cls, totals: Mapping[str, float], heats: Sequence[Heat] = (), before: Mapping[str, float] | None = None
    ) -> OverlapReport | None:
        """Return the means of totals, or of their growth since ``before``; None without steps."""
        grown = {name: value - (before or {}).get(name, 0.0) for name, value in totals.items()}
        steps, incoming = grown.pop("steps"), grown["incoming_rows"]
        if not steps:
            return None
        grown["hidden_s"] = max(0.0, grown["transfer_s"] - grown["exposed_s"])
        means = {name: grown[name] / steps for name in cls.__annotations__ if name in grown}
        rate = grown["colliding_incoming_rows"] / incoming if incoming else 0.0
        return cls(steps=int(steps), collision_rate=rate, **means, heat=HeatReport.of(heats, grown, steps))

    def scalars(self) -> dict[str, float]:
        """Return the means by the names that loggers use."""
        means = {f"freescale/overlap/{name}": value for name, value in vars(self).items() if name not in ("steps", "heat")}
        return means if self.heat is None else {**means, **self.heat.scalars()}

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
            f"{others:.0f} lookups of unexpected ids (normal in the first step of an epoch)"
        )


def bag_senders(layout: RowLayout, rank: int) -> list[int]:
    """Return, for each feature of the layout, the number of other ranks that would send ``rank`` a pooled row for each bag.

    In TorchRec, owners pool rows before they send them. A table that is split by rows is pooled by every rank, and each sends
    all other ranks a row for each of their bags, even without a row of it (a reduce-scatter). A table on one rank is pooled
    there.
    """
    last = torch.tensor([[layout.rows_of(each)] for each in range(layout.ranks)])
    holds = torch.diff(layout.first_row, append=last) > 0
    sends = holds | (holds.sum(dim=0) > 1)
    senders = (sends.sum(dim=0) - sends[rank].long()).tolist()
    return [senders[table] for _, table in layout.features]
