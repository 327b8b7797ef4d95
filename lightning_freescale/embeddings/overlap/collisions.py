"""Which rows of the next batch the current one still updates."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.batch_state import PipelinedBatch
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics

COUNTED_EVERY = 8
"""The collisions of one step in so many are counted: telling rows apart takes time."""


class Collisions:
    """Compares batches by the number of the last one that asked for each row: nothing is sorted, and nothing is reset.

    Args:
        local: this rank's rows.
        statistics: what to count in.
    """

    def __init__(self, local: LocalRows, statistics: ExchangeStatistics) -> None:
        self.statistics = statistics
        self._last_batch = torch.zeros(local.count, dtype=torch.int32, device=local.layout.device)
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

    def compare(self, following: PipelinedBatch, current: PipelinedBatch) -> tuple[Tensor, Tensor]:
        """Return which incoming rows of ``following`` are updated before it, and which of ``current`` it needs (bool)."""
        rows = following.incoming.rows
        # a row collides if any batch of the window has it
        awaited = self._last_batch[rows] >= self._window_start if current.updates else torch.zeros_like(rows, dtype=torch.bool)
        self._last_batch[rows] = following.number
        # of a step all micro-batches or none: it is the first one whose rows collide
        if (self._windows + current.updates) % COUNTED_EVERY == 1:
            self.statistics.count_collisions(rows, awaited)
        return awaited, self._last_batch[current.incoming.rows] == following.number
