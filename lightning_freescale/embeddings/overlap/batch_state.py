"""One batch on its way through the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.embeddings.lookahead.probe import KJTSnapshot
from lightning_freescale.embeddings.overlap.row_requests import RowRequest
from lightning_freescale.embeddings.overlap.served import IncomingRows, RowMask


@dataclass(frozen=True)
class CollidingRows:
    """Which rows of a batch another one shares: of those that this rank needs, and of those that it gives as an owner."""

    mine: RowMask
    served: RowMask

    def others(self, request: RowRequest, served: IncomingRows) -> CollidingRows:
        """The non-colliding rows of the same batch."""
        return CollidingRows(self.mine.others(request.sizes), self.served.others(served.sizes))


@dataclass
class PipelinedBatch:
    """What is known of a batch; the lane fills it in.

    Attributes:
        request: the rows this rank needs.
        served: the rows this rank gives.
        rows: values of ``request.rows``, shape ``[rows, dim]``.
        rates: learning rate per kernel for its update.
        step: updates done before its own.
        updates: whether an optimizer step follows it; else its gradients are kept for the next one.
        announced: whether any rank has announced ids for it.
        known: whether this rank has.
        sound: whether all have, without error or disagreement.
        ended: ranks that have said that they have no such batch.
        mode: the highest mode of any rank, see :class:`OverlappedCollection`.
        captured: the ids announced for it, before the model asks for them.
        ready: done when ``rows`` are complete.
        before: the rows it shares with what is updated before it (their values come late).
        after: the rows it shares with the batch after it (their gradients go first).
        gradient: of ``rows``, once backward has been there.
        looked_up: whether the model has asked for it.
        sent: whether its gradients have been handed over.
    """

    request: RowRequest
    served: IncomingRows
    rows: Tensor
    rates: Sequence[float | None] = ()
    step: int = 0
    updates: bool = True
    announced: bool = False
    known: bool = False
    sound: bool = False
    ended: list[int] = field(default_factory=list)
    mode: int = 0
    captured: KJTSnapshot | None = None
    ready: Future[Any] | None = None
    before: CollidingRows | None = None
    after: CollidingRows | None = None
    gradient: Tensor | None = None
    looked_up: bool = False
    sent: bool = False


@dataclass
class GradientAccumulator:
    """Gradients that an owner holds until the next optimizer step: nothing, or one tensor of rows and one of their sums."""

    rows: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def add(self, rows: Tensor, gradients: Tensor) -> None:
        """Keep some more, one entry per row."""
        if not len(rows):
            return
        merged, place = torch.unique(torch.cat([*self.rows, rows]), return_inverse=True)
        sums = gradients.new_zeros(len(merged), gradients.shape[1])
        sums.index_add_(0, place, torch.cat([*self.gradients, gradients]))
        self.rows, self.gradients = [merged], [sums]

    def take(self, chosen: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Remove and return what is kept, or the ``chosen`` of it (bool)."""
        if not self.rows or chosen is None:
            taken = self.rows, self.gradients
            self.rows, self.gradients = [], []
            return taken
        rows, gradients = self.rows[0], self.gradients[0]
        self.rows, self.gradients = [rows[~chosen]], [gradients[~chosen]]
        return [rows[chosen]], [gradients[chosen]]
