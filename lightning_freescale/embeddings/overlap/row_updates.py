"""The owner's bookkeeping: which rows collide, and whether gradients update their rows now or later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap.batch_state import Batch, SomeRows
from lightning_freescale.embeddings.overlap.local_rows import LocalRows, add_up
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.transport import Transport

COUNTED_EVERY = 8
"""The collisions of one step in so many are counted: telling rows apart takes time."""


class Collisions:
    """Compares batches by the number of the last one that asked for each row: nothing is sorted, and nothing is reset."""

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

    def compare(self, following: Batch, current: Batch) -> tuple[Tensor, Tensor | None]:
        """Return which incoming rows of ``following`` are updated before it, and which of ``current`` it needs (bool).

        The latter is None if no update follows the current batch.
        """
        rows, updates = following.requested.incoming.rows, current.update.updates
        # a row collides if any batch of the window has it
        awaited = self._last_batch[rows] >= self._window_start if updates else torch.zeros_like(rows, dtype=torch.bool)
        self._last_batch[rows] = following.number
        # of a step all micro-batches or none: it is the first one whose rows collide
        if (self._windows + updates) % COUNTED_EVERY == 1:
            self.statistics.count_collisions(rows, awaited)
        return awaited, self._last_batch[current.requested.incoming.rows] == following.number if updates else None


@dataclass
class GradientAccumulator:
    """Gradients that an owner keeps until the next optimizer step: nothing, or one tensor of rows and one of their sums.

    They arrive as non-colliding gradients do, and are applied with the last batch of the window.
    """

    rows: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def accumulate(self, rows: Tensor, gradients: Tensor) -> None:
        """Keep ``gradients``, shape ``[rows, dim]``, added up per row with those kept before."""
        if not len(rows):
            return
        merged, sums = add_up(torch.cat([*self.rows, rows]), torch.cat([*self.gradients, gradients]))
        self.rows, self.gradients = [merged], [sums]

    def pop(self, mask: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Remove and return rows and gradients: all that are kept, or those in ``mask`` (bool)."""
        if not self.rows or mask is None:
            kept = self.rows, self.gradients
            self.rows, self.gradients = [], []
            return kept
        rows, gradients = self.rows[0], self.gradients[0]
        self.rows, self.gradients = [rows[~mask]], [gradients[~mask]]
        return [rows[mask]], [gradients[mask]]


class RowUpdates:
    """The updates of one collection's rows, on its worker only.

    Attributes:
        idle_steps: for each table the optimizer steps in which no rank had a gradient: they are no updates of it.
        kept: gradients kept for a later optimizer step, or held until they are clipped.
        moved: whether any rank has had a gradient in this window.
    """

    def __init__(self, local: LocalRows) -> None:
        self.local, self.kept = local, GradientAccumulator()
        self.idle_steps = [0] * len(local.layout.tables)
        self.moved = False

    def count_step(self, current: Batch, moved: bool) -> None:
        """Take note of whether any rank has a gradient of this batch; a window without one is no update of the tables."""
        update = current.update
        self.moved |= moved
        if update.updates and not self.moved:
            self.idle_steps = [idle + (not given.frozen) for idle, given in zip(self.idle_steps, update.settings)]
        if any(self.idle_steps):
            pairs = zip(update.settings, self.idle_steps)
            update.settings = [replace(given, step=given.step - idle) for given, idle in pairs]
        self.moved &= not update.updates

    def take(self, batch: Batch, chosen: SomeRows, gradients: Tensor, due: Tensor | None = None) -> None:
        """Update some rows of a batch; or keep their gradients, if it is clipped or no optimizer step follows it.

        Args:
            batch: the batch.
            chosen: which of its rows.
            gradients: theirs as they came, shape ``[len(chosen.incoming), dim]``.
            due: which of the kept rows are updated as well (bool); None for all.
        """
        incoming = batch.requested.incoming
        rows, order = incoming.rows.index_select(0, chosen.incoming.index), incoming.order_by_slot(chosen.incoming.index)
        if order is not None:  # the order of summation
            rows, gradients = rows[order], gradients[order]
        if batch.update.held or not batch.update.updates:
            self.kept.accumulate(rows, gradients)
            return
        if self.kept.rows:
            kept_rows, kept_gradients = self.kept.pop(due)
            rows, gradients = torch.cat([*kept_rows, rows]), torch.cat([*kept_gradients, gradients])
        self.local.update(rows, gradients, batch.update.settings)

    def apply_held(self, batch: Batch) -> None:
        """Update rows by the gradients that are held."""
        for rows, gradients in zip(*self.kept.pop()):
            self.local.update(rows, gradients, batch.update.settings)

    def discard(self) -> None:
        """Forget the gradients kept for an optimizer step that does not come."""
        self.kept.pop()
        self.moved = False

    # -- clipping of gradients that are held

    def sum_squares(self, transport: Transport, settings: Sequence[UpdateSettings]) -> Tensor:
        """Return the sum of the squares of all elements over all ranks: float64, without dimensions. Collective.

        The ranks add up in one order, so that all have the same number.
        """
        ranks = transport.ranks
        mine = torch.zeros(1, dtype=torch.float64, device=transport.device)
        for clipped, gradients in self._clipped(settings):
            mine += torch.linalg.vector_norm(gradients[clipped], dtype=torch.float64).square()
        told = transport.exchange_words(mine.view(torch.int32).repeat(ranks), [2] * ranks, [2] * ranks)
        return told.view(torch.float64).sum()

    def scale(self, factor: Tensor, settings: Sequence[UpdateSettings]) -> None:
        """Multiply all elements."""
        for clipped, gradients in self._clipped(settings):
            gradients[clipped] *= factor

    def clamp(self, limit: float, settings: Sequence[UpdateSettings]) -> None:
        """Limit all elements to ``-limit ... limit``."""
        for clipped, gradients in self._clipped(settings):
            gradients[clipped] = gradients[clipped].clamp(-limit, limit)

    def _clipped(self, settings: Sequence[UpdateSettings]) -> list[tuple[Tensor | slice, Tensor]]:
        kept = zip(self.kept.rows, self.kept.gradients)
        return [(self.local.clipped(rows, settings), gradients) for rows, gradients in kept]
