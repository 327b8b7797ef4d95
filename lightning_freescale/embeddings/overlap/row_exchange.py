"""The exchanges of a collection: what its worker does with every batch, in the same order on every rank.

For the batch that follows, while the current one computes: ``send_ids`` sends its ids to the owners, ``prefetch`` sorts its
rows into those that the current batch still updates (colliding) and all others (non-colliding), and fetches the non-colliding
ones. ``exchange_colliding`` sends the current batch's gradients for the colliding rows; their owners apply them and send the
new values without being asked again. ``exchange_non_colliding`` sends the gradients that nobody waits for. ``confirm_ids``
stands between: a rank whose model looks up other ids than were submitted says so, and all ranks serve it anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division

from lightning_freescale.embeddings.overlap.batch_state import CollidingRows, GradientAccumulator, PipelinedBatch
from lightning_freescale.embeddings.overlap.handshake import Consensus, IdState, LookupHandshake
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowMask, RowMembership, RowRequest


class RowExchange:
    """Runs on the collection's worker only, so that its rows need no lock.

    Args:
        path: of the collection, for errors.
        local: this rank's rows.
        group: process group of this collection alone.
        dedup: request each row once per rank and batch.
        statistics: what to count in.
    """

    def __init__(
        self, path: str, local: LocalRows, group: dist.ProcessGroup, dedup: bool, statistics: ExchangeStatistics
    ) -> None:
        self.local, self.group = local, group
        self.dedup, self.statistics = dedup, statistics
        self.accumulator = GradientAccumulator()
        layout = self.layout = local.layout
        self._handshake = LookupHandshake(path, group, layout, dedup)
        self._membership = RowMembership(local.count, layout.device)
        small = int(torch.diff(layout.starts).max()) < torch.iinfo(torch.int32).max
        self._id_type = torch.int32 if small else torch.int64

    def new_batch(self) -> PipelinedBatch:
        """Return the state of a batch that nothing is known of."""
        request = RowRequest.empty(self.layout, self.dedup)
        return PipelinedBatch(request, IncomingRows(request.rows, request.counts), self._new_rows(request))

    # -- ids

    def send_ids(
        self, batch: PipelinedBatch, current: PipelinedBatch, features: KeyedJaggedTensor | None, ended: bool, mode: int
    ) -> None:
        """Send the ids of the batch after ``current``; None if they are not known, or if there is none (``ended``)."""
        state = IdState.ENDED if ended else IdState.UNKNOWN if features is None else IdState.REQUESTED
        consensus = self._handshake.agree(state, features, updates=current.updates, mode=mode, ahead=True)
        batch.mode, batch.ended_ranks = consensus.mode, consensus.ended_ranks
        batch.any_submitted, batch.all_submitted = any(consensus.requested), consensus.from_all
        batch.submitted = consensus.requested[self.group.rank()]
        if batch.any_submitted:
            batch.request, batch.rows = consensus.request, self._new_rows(consensus.request)
            batch.incoming = self._exchange_ids(consensus)

    def confirm_ids(self, batch: PipelinedBatch, features: KeyedJaggedTensor | None, predicted: bool) -> None:
        """Tell that the model has looked up the submitted ids (``predicted``), others, or none (None).

        Others are served anew before anybody sorts rows against this batch.
        """
        predicted = predicted and batch.submitted
        state = IdState.PREDICTED if predicted else IdState.REQUESTED
        consensus = self._handshake.agree(state, features)
        if not any(consensus.requested):
            return
        new = self._exchange_ids(consensus)
        rows = self._exchange_rows(self.local.read(new.rows), new.sizes, consensus.request.sizes, "colliding")
        if not predicted:
            batch.request, batch.rows = consensus.request, rows
        batch.incoming = batch.incoming.replaced(new, consensus.requested)

    # -- rows

    def prefetch(self, batch: PipelinedBatch, current: PipelinedBatch) -> None:
        """Sort the submitted rows of ``batch`` against those that are updated before it, and fetch the non-colliding ones."""
        if not batch.any_submitted:
            return
        if current.updates:
            batch.shared_with_previous, current.shared_with_next = self._find_collisions(batch, current)
        else:
            batch.shared_with_previous = batch.no_rows()
        self._fetch(batch, batch.shared_with_previous.complement(batch.request, batch.incoming), "non_colliding")

    def _find_collisions(self, batch: PipelinedBatch, current: PipelinedBatch) -> tuple[CollidingRows, CollidingRows]:
        """Return the rows of ``batch`` that are updated before it, and those of ``current`` that ``batch`` needs."""
        # with accumulated gradients a row is colliding if any batch of the window has it
        previous = self._membership.isin(batch.incoming.rows, [current.incoming.rows, *self.accumulator.rows])
        following = self._membership.isin(current.incoming.rows, [batch.incoming.rows])
        self.statistics.count_collisions(batch.incoming.rows, previous)
        sizes = list(zip(batch.request.sizes, current.request.sizes))
        masks = zip(previous.split(batch.incoming.sizes), following.split(current.incoming.sizes))
        outgoing = [torch.cat(pair).to(torch.uint8) for pair in masks]
        received = [outgoing[0].new_empty(sum(pair)) for pair in sizes]
        self._exchange(outgoing, received, "ids")
        both = zip(*(mask.bool().split(pair) for mask, pair in zip(received, sizes)))
        of_batch, of_current = (torch.cat(list(masks)) for masks in both)
        return (
            CollidingRows(RowMask.from_mask(of_batch, batch.request.sizes), RowMask.from_mask(previous, batch.incoming.sizes)),
            CollidingRows(
                RowMask.from_mask(of_current, current.request.sizes), RowMask.from_mask(following, current.incoming.sizes)
            ),
        )

    def _fetch(self, batch: PipelinedBatch, rows: CollidingRows, kind: str) -> None:
        """Fetch some rows of a batch from all owners."""
        values = self.local.read(batch.incoming.rows[rows.incoming.mask])
        batch.rows[rows.requested.mask] = self._exchange_rows(values, rows.incoming.sizes, rows.requested.sizes, kind)

    # -- gradients

    def exchange_colliding(self, current: PipelinedBatch, following: PipelinedBatch, gradient: Tensor | None) -> None:
        """Sum up the gradient (shape ``[ids, dim]``; None is zero), send what the next batch waits for, and fetch that."""
        current.gradient = self._sum_per_row(current, gradient)
        if current.shared_with_next is None or following.shared_with_previous is None:
            return
        rows, gradients = self._exchange_gradients(current, current.shared_with_next, "colliding")
        kept = self.accumulator.rows
        due = self._membership.isin(kept[0], [following.incoming.rows]) if kept else None
        self._update(current, rows, gradients, due)
        self._fetch(following, following.shared_with_previous, "colliding")

    def exchange_non_colliding(self, current: PipelinedBatch) -> None:
        """Send the gradients that nobody waits for; their owners apply them, or keep them until an optimizer step follows."""
        sent = current.shared_with_next or current.no_rows()
        others = sent.complement(current.request, current.incoming)
        rows, gradients = self._exchange_gradients(current, others, "non_colliding")
        current.gradient = None
        if current.updates:
            self._update(current, rows, gradients, None)
        else:
            self.accumulator.accumulate(rows, gradients)

    def discard_accumulated(self) -> None:
        """Forget the gradients kept for an optimizer step that does not come."""
        self.accumulator.pop()

    def _sum_per_row(self, current: PipelinedBatch, gradient: Tensor | None) -> Tensor:
        request = current.request
        sums = torch.zeros(len(request.rows), self.local.dim, device=request.rows.device)
        if gradient is None:
            return sums
        self.statistics.count_lookup(request, self.group.rank(), self.local.dim)
        if not self.dedup:
            sums[request.inverse] = gradient
            return sums
        return sums.index_add_(0, request.inverse, gradient)

    def _exchange_gradients(self, current: PipelinedBatch, rows: CollidingRows, kind: str) -> tuple[Tensor, Tensor]:
        """Return some rows that this rank owns, and their gradients, in the order of summation."""
        assert current.gradient is not None
        mine = current.gradient[rows.requested.mask]
        gradients = self._exchange_rows(mine, rows.requested.sizes, rows.incoming.sizes, kind)
        if get_gradient_division():
            gradients /= self.group.size()
        order = current.incoming.order_by_slot(rows.incoming.mask)
        return current.incoming.rows[rows.incoming.mask][order], gradients[order]

    def _update(self, current: PipelinedBatch, rows: Tensor, gradients: Tensor, due: Tensor | None) -> None:
        if self.accumulator.rows:
            kept_rows, kept_gradients = self.accumulator.pop(due)
            rows, gradients = torch.cat([*kept_rows, rows]), torch.cat([*kept_gradients, gradients])
        self.local.update(rows, gradients, current.rates, current.step)

    # -- transport

    def _exchange_ids(self, consensus: Consensus) -> IncomingRows:
        outgoing = list(consensus.request.rows.to(self._id_type).split(consensus.request.sizes))
        received = [outgoing[0].new_empty(size) for size in consensus.counts.sum(dim=1).tolist()]
        self._exchange(outgoing, received, "ids")
        return IncomingRows.from_ranks(received, consensus.counts)

    def _exchange_rows(self, values: Tensor, send_sizes: list[int], receive_sizes: list[int], kind: str) -> Tensor:
        received = values.new_empty(sum(receive_sizes), self.local.dim)
        self._exchange(values.contiguous().split(send_sizes), received.split(receive_sizes), kind)
        return received

    def _exchange(self, outgoing: Sequence[Tensor], received: Sequence[Tensor], kind: str) -> None:
        with self.statistics.timed("transfer_s"):
            dist.all_to_all(list(received), list(outgoing), group=self.group)
        rank = self.group.rank()
        self.statistics.count(f"{kind}_bytes", sum(part.nbytes for peer, part in enumerate(outgoing) if peer != rank))

    def _new_rows(self, request: RowRequest) -> Tensor:
        return torch.empty(len(request.rows), self.local.dim, device=request.rows.device)
