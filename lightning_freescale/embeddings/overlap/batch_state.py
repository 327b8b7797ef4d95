"""What is known of a batch while its rows and gradients travel."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_snapshot import KJTSnapshot
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowMask, RowRequest


@dataclass(frozen=True)
class Lookup:
    """What the model has looked up in a step.

    Attributes:
        features: the ids.
        predicted: whether they are those submitted ahead; None if none were.
    """

    features: KeyedJaggedTensor
    predicted: bool | None


@dataclass(frozen=True)
class CollidingRows:
    """Rows that a batch shares with another one: of those it requests here, and of those requested from this owner."""

    requested: RowMask
    incoming: RowMask

    def complement(self, request: RowRequest, incoming: IncomingRows) -> CollidingRows:
        """Return the non-colliding rows of the same batch."""
        return CollidingRows(self.requested.complement(request.sizes), self.incoming.complement(incoming.sizes))


@dataclass
class PipelinedBatch:
    """One batch of a collection; filled in by the collection's worker.

    Attributes:
        request: the rows this rank needs.
        incoming: the rows this rank gives as an owner.
        rows: values of ``request.rows``, shape ``[rows, dim]``.
        rates: learning rate per kernel for its update.
        step: updates done before its own.
        updates: whether an optimizer step follows it; else its gradients are kept for the next one.
        any_submitted: whether any rank has submitted its ids ahead.
        submitted: whether this rank has.
        all_submitted: whether all have, without error or disagreement.
        ended_ranks: ranks that have said that they have no such batch.
        mode: the highest mode of any rank, see :class:`OverlappedCollection`.
        snapshot: the ids submitted ahead, before the model looks them up.
        ready: done when ``rows`` are complete.
        shared_with_previous: the rows that are updated before it (their values come late).
        shared_with_next: the rows that the batch after it needs, too (their gradients go first).
        gradient: of ``rows``, once backward has been there.
        looked_up: whether the model has looked it up.
        gradient_sent: whether its gradients have been handed over.
    """

    request: RowRequest
    incoming: IncomingRows
    rows: Tensor
    rates: Sequence[float | None] = ()
    step: int = 0
    updates: bool = True
    any_submitted: bool = False
    submitted: bool = False
    all_submitted: bool = False
    ended_ranks: list[int] = field(default_factory=list)
    mode: int = 0
    snapshot: KJTSnapshot | None = None
    ready: Future[Any] | None = None
    shared_with_previous: CollidingRows | None = None
    shared_with_next: CollidingRows | None = None
    gradient: Tensor | None = None
    looked_up: bool = False
    gradient_sent: bool = False

    def no_rows(self) -> CollidingRows:
        """Return none of this batch's rows."""
        sizes = (self.request.sizes, self.incoming.sizes)
        return CollidingRows(*(RowMask.empty(each, self.rows.device) for each in sizes))


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
        merged, inverse = torch.unique(torch.cat([*self.rows, rows]), return_inverse=True)
        sums = gradients.new_zeros(len(merged), gradients.shape[1])
        sums.index_add_(0, inverse, torch.cat([*self.gradients, gradients]))
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
