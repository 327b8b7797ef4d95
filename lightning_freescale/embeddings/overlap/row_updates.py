"""The owner's state: which rows collide, and whether gradients update their rows now or later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap.batch_state import Batch, SomeRows
from lightning_freescale.embeddings.overlap.local_rows import LocalRows, add_up
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.transport import RowTransport

COUNTED_EVERY = 8
"""Collisions are counted in one step of this many, because counting distinct rows takes time."""


class Collisions:
    """Compares batches by the number of the last batch that requested each row, without sorting and without resets."""

    def __init__(self, local: LocalRows, statistics: ExchangeStatistics) -> None:
        self.statistics = statistics
        self._last_batch = torch.zeros(local.count, dtype=torch.int32, device=local.layout.device)
        self._window_start = 1  # rows that no batch has requested have 0
        self._windows = 0  # number of ended windows

    def begin_window(self, number: int) -> None:
        """Start a window with batch ``number``: the updates of all batches before it are done."""
        self._window_start = number
        self._windows += 1

    def mark(self, rows: Tensor, number: int) -> None:
        """Record rows that a batch requests in addition. A later batch may have requested them already."""
        self._last_batch[rows] = self._last_batch[rows].clamp(min=number)

    def asked_by(self, number: int, rows: Tensor) -> Tensor:
        """Return whether batch ``number`` requests each row, if no later batch has been compared."""
        return self._last_batch[rows] == number

    def compare(self, following: Batch, current: Batch) -> tuple[Tensor, Tensor | None]:
        """Return which incoming rows of ``following`` are updated before it, and which of ``current`` it needs (bool).

        The latter is None if no update follows the current batch.
        """
        rows, updates = following.requested.incoming.rows, current.update.updates
        # a row collides if any batch of the window has it
        awaited = self._last_batch[rows] >= self._window_start if updates else torch.zeros_like(rows, dtype=torch.bool)
        self._last_batch[rows] = following.number
        # count all micro-batches of a step or none: the rows of the first one collide
        if (self._windows + updates) % COUNTED_EVERY == 1:
            incoming, colliding = (len(torch.unique(each)) for each in (rows, rows[awaited]))
            self.statistics.count(incoming_rows=incoming, colliding_incoming_rows=colliding)
        return awaited, self._last_batch[current.requested.incoming.rows] == following.number if updates else None


class RowUpdates:
    """The updates of one collection's rows; used by its worker only."""

    def __init__(self, local: LocalRows) -> None:
        self.local = local
        # gradients kept for a later optimizer step, or held until they are clipped: nothing, or distinct rows and their sums
        self.kept_rows: list[Tensor] = []
        self.kept_gradients: list[Tensor] = []
        self.idle_steps = [0] * len(local.layout.tables)  # per table: optimizer steps without a gradient on any rank
        self.moved = False  # whether any rank had a gradient in this window

    def count_step(self, current: Batch, moved: bool) -> None:
        """Record whether any rank has a gradient of this batch. A window without one does not update the tables."""
        update = current.update
        self.moved |= moved
        if update.updates and not self.moved:
            self.idle_steps = [idle + (not given.frozen) for idle, given in zip(self.idle_steps, update.settings)]
        if any(self.idle_steps):
            pairs = zip(update.settings, self.idle_steps)
            update.settings = [replace(given, step=given.step - idle) for given, idle in pairs]
        self.moved &= not update.updates

    def take(self, batch: Batch, chosen: SomeRows, gradients: Tensor, due: Tensor | None = None) -> None:
        """Update some rows of a batch, or keep their gradients if they are held or no optimizer step follows.

        ``gradients`` are those received for ``chosen.incoming``, shape ``[rows, words]``. ``due`` marks the kept rows that are
        updated as well; None for all.
        """
        incoming, gradients = batch.requested.incoming, self.local.wire.gradients.decode(gradients)
        rows, order = incoming.rows.index_select(0, chosen.incoming.index), incoming.order_by_slot(chosen.incoming.index)
        if order is not None:  # the order of summation
            rows, gradients = rows[order], gradients[order]
        if batch.update.held or not batch.update.updates:
            self.keep(rows, gradients)
            return
        if self.kept_rows:
            kept_rows, kept_gradients = self._pop_kept(due)
            rows, gradients = torch.cat([*kept_rows, rows]), torch.cat([*kept_gradients, gradients])
        self.local.update(rows, gradients, batch.update.settings)

    def keep(self, rows: Tensor, gradients: Tensor) -> None:
        """Add ``gradients``, shape ``[rows, dim]``, to those kept before, per row."""
        if len(rows):
            merged, sums = add_up(torch.cat([*self.kept_rows, rows]), torch.cat([*self.kept_gradients, gradients]))
            self.kept_rows, self.kept_gradients = [merged], [sums]

    def _pop_kept(self, mask: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Remove and return the kept rows and gradients: all of them, or those marked in ``mask`` (bool)."""
        kept = self.kept_rows, self.kept_gradients
        self.kept_rows, self.kept_gradients = [], []
        if not kept[0] or mask is None:
            return kept
        (rows,), (gradients,) = kept
        self.kept_rows, self.kept_gradients = [rows[~mask]], [gradients[~mask]]
        return [rows[mask]], [gradients[mask]]

    def apply_held(self, batch: Batch) -> None:
        for rows, gradients in zip(*self._pop_kept()):
            self.local.update(rows, gradients, batch.update.settings)

    # -- clipping of gradients that are held

    def sum_squares(self, transport: RowTransport, settings: Sequence[UpdateSettings]) -> Tensor:
        """Return the sum of the squares of all elements over all ranks: float64, zero-dimensional. Collective.

        Each rank adds the parts in the same order, so that all ranks have the same result.
        """
        ranks = transport.ranks
        mine = torch.zeros(1, dtype=torch.float64, device=transport.device)
        for clipped, gradients in self._clipped(settings):
            mine += torch.linalg.vector_norm(gradients[clipped], dtype=torch.float64).square()
        parts = transport.exchange_words(mine.view(torch.int32).repeat(ranks), [2] * ranks, [2] * ranks)
        return parts.view(torch.float64).sum()

    def scale(self, factor: Tensor, settings: Sequence[UpdateSettings]) -> None:
        for clipped, gradients in self._clipped(settings):
            gradients[clipped] *= factor

    def clamp(self, limit: float, settings: Sequence[UpdateSettings]) -> None:
        for clipped, gradients in self._clipped(settings):
            gradients[clipped] = gradients[clipped].clamp(-limit, limit)

    def _clipped(self, settings: Sequence[UpdateSettings]) -> list[tuple[Tensor | slice, Tensor]]:
        kept = zip(self.kept_rows, self.kept_gradients)
        return [(self.local.clipped(rows, settings), gradients) for rows, gradients in kept]
