"""What an owner does with the gradients of its rows: update now, or keep them for a later optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.batch_state import PipelinedBatch, SomeRows
from lightning_freescale.embeddings.overlap.local_rows import LocalRows, add_up


class RowUpdates:
    """The updates of one collection's rows, on its worker only.

    Args:
        local: this rank's rows.

    Attributes:
        idle_steps: for each table the optimizer steps in which no rank had a gradient: they are no updates of it.
        kept: gradients kept for a later optimizer step, or held until they are clipped.
        moved: whether any rank has had a gradient in this window.
    """

    def __init__(self, local: LocalRows) -> None:
        self.local, self.kept = local, GradientAccumulator()
        self.idle_steps = [0] * len(local.layout.tables)
        self.moved = False

    def count_step(self, current: PipelinedBatch, moved: bool) -> None:
        """Take note of whether any rank has a gradient of this batch; a window without one is no update of the tables."""
        self.moved |= moved
        if current.updates and not self.moved:
            self.idle_steps = [idle + (not given.frozen) for idle, given in zip(self.idle_steps, current.settings)]
        if any(self.idle_steps):
            pairs = zip(current.settings, self.idle_steps)
            current.settings = [replace(given, step=given.step - idle) for given, idle in pairs]
        self.moved &= not current.updates

    def take(self, batch: PipelinedBatch, chosen: SomeRows, gradients: Tensor, due: Tensor | None = None) -> None:
        """Update some rows of a batch; or keep their gradients, if it is clipped or no optimizer step follows it.

        Args:
            batch: the batch.
            chosen: which of its rows.
            gradients: theirs as they came, shape ``[len(chosen.incoming), dim]``.
            due: which of the kept rows are updated as well (bool); None for all.
        """
        rows = batch.incoming.rows.index_select(0, chosen.incoming.index)
        order = batch.incoming.order_by_slot(chosen.incoming.index)
        if order is not None:  # the order of summation
            rows, gradients = rows[order], gradients[order]
        if batch.held or not batch.updates:
            self.kept.accumulate(rows, gradients)
            return
        if self.kept.rows:
            kept_rows, kept_gradients = self.kept.pop(due)
            rows, gradients = torch.cat([*kept_rows, rows]), torch.cat([*kept_gradients, gradients])
        self.local.update(rows, gradients, batch.settings)

    def apply_held(self, batch: PipelinedBatch) -> None:
        """Update rows by the gradients that are held."""
        for rows, gradients in zip(*self.kept.pop()):
            self.local.update(rows, gradients, batch.settings)

    def discard(self) -> None:
        """Forget the gradients kept for an optimizer step that does not come."""
        self.kept.pop()
        self.moved = False


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
