"""Exchange B: which rows of the next batch the current one still updates, and the values of all others."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.batch_state import PipelinedBatch, SomeRows
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.messages import PartLayout, put, ranges, take
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_requests import RowSubset
from lightning_freescale.embeddings.overlap.transport import Transport

COUNTED_EVERY = 8
"""The collisions of one step in so many are counted: telling rows apart takes time."""


class Collisions:
    """Compares batches by the number of the last one that asked for each row: nothing is sorted, and nothing is reset.

    Args:
        local: this rank's rows.
        transport: of the collection.
        statistics: what to count in.
    """

    def __init__(self, local: LocalRows, transport: Transport, statistics: ExchangeStatistics) -> None:
        self.local, self.transport, self.statistics = local, transport, statistics
        self._device = transport.device
        self._last_batch = torch.zeros(local.count, dtype=torch.int32, device=self._device)
        self._window_start = 1  # rows that no batch has asked for have 0
        self._windows = 0  # that have ended

    def begin_window(self, number: int) -> None:
        """Compare with no batch before this one: their updates are done."""
        self._window_start = number
        self._windows += 1

    def mark(self, rows: Tensor, number: int) -> None:
        """Note rows that a batch asks for, beside those compared; a later batch may have asked for them already."""
        self._last_batch[rows] = self._last_batch[rows].clamp(min=number)

    def asked_by(self, number: int, rows: Tensor) -> Tensor:
        """Return which of some rows a batch asks for, if no later one has been compared."""
        return self._last_batch[rows] == number

    def send_others(self, following: PipelinedBatch, current: PipelinedBatch) -> None:
        """Exchange which rows collide, and the values of those that do not: ``[flags of following, of current | rows]``."""
        awaited, urgent = self._compare(following, current)
        dim, none = self.transport.dim, [0] * self.transport.ranks
        asked, here = following.incoming.sizes, current.incoming.sizes if current.updates else none
        late, at_once = RowSubset.split(awaited, asked)
        parts = PartLayout(dim, [a + b for a, b in zip(asked, here)], at_once.sizes)
        source = late.index.new_zeros(parts.length)
        put(source, parts.first_rows, at_once.sizes, following.incoming.rows.index_select(0, at_once.index))
        message = self.local.read(source) if at_once.index.numel() else self.transport.rows(parts.length)
        flags, starts = message.view(torch.uint8).view(-1), parts.octets()
        put(flags, starts, asked, awaited.view(torch.uint8))
        if current.updates:
            put(flags, [start + size for start, size in zip(starts, asked)], here, urgent.view(torch.uint8))

        asks, mine = following.request.sizes, current.request.sizes if current.updates else none
        slots = PartLayout(dim, [a + b for a, b in zip(asks, mine)], asks)
        following.rows = self.transport.rows(slots.length)
        self.transport.exchange(following.rows, message, parts.sizes, slots.sizes)
        self.transport.count("ids", 1, [a + b for a, b in zip(asked, here)])
        self.transport.count("non_colliding", 4 * dim, at_once.sizes)

        flags, starts = following.rows.view(torch.uint8).view(-1), slots.octets()
        waiting, others = RowSubset.split(take(flags, starts, asks).view(torch.bool), asks)
        # a slot has room for all rows of its owner: those that come last go behind the others
        ends = [first + count for first, count in zip(slots.first_rows, others.sizes)]
        following.late_places = ranges(ends, waiting.sizes, self._device)
        places = waiting.index.new_empty(sum(asks), dtype=torch.int32)
        places[waiting.index] = following.late_places.int()
        places[others.index] = ranges(slots.first_rows, others.sizes, self._device).int()
        following.places = places.index_select(0, following.request.inverse)
        following.awaited = SomeRows(waiting, late)
        if current.updates:
            shared = take(flags, [start + size for start, size in zip(starts, asks)], mine).view(torch.bool)
            pairs = zip(RowSubset.split(shared, mine), RowSubset.split(urgent, here))
            current.urgent, current.patient = (SomeRows(*pair) for pair in pairs)

    def _compare(self, following: PipelinedBatch, current: PipelinedBatch) -> tuple[Tensor, Tensor]:
        """Owner: return which incoming rows of ``following`` are updated before it, and which of ``current`` it needs."""
        rows = following.incoming.rows
        # a row collides if any batch of the window has it
        awaited = self._last_batch[rows] >= self._window_start if current.updates else torch.zeros_like(rows, dtype=torch.bool)
        self._last_batch[rows] = following.number
        # of a step all micro-batches or none: it is the first one whose rows collide
        if (self._windows + current.updates) % COUNTED_EVERY == 1:
            self.statistics.count_collisions(rows, awaited)
        return awaited, self._last_batch[current.incoming.rows] == following.number
