"""The exchanges of a collection: what its thread does with every batch, in the same order on every rank.

For batch t, while batch t-1 computes: ``announce`` sends its ids to the owners, ``prefetch`` sorts its rows into those that
batch t-1 still updates (colliding) and all others (non-colliding), and fetches the non-colliding ones. ``colliding`` sends
the gradients of batch t-1 for the colliding rows; their owners apply them and send the new values without being asked again.
``non_colliding`` sends the gradients that nobody waits for. ``verify`` stands between: a rank whose model asks for other ids
than were announced says so, and all ranks serve it anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division

from lightning_freescale.embeddings.overlap.batch_state import CollidingRows, GradientAccumulator, PipelinedBatch
from lightning_freescale.embeddings.overlap.handshake import LookupHandshake, State
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import RowRequest
from lightning_freescale.embeddings.overlap.served import IncomingRows, RowMask, RowMembership
from lightning_freescale.embeddings.overlap.statistics import ExchangeStatistics


class RowExchange:
    """Runs on the lane's thread only.

    Args:
        path: of the collection, for errors.
        layout: of its tables.
        local: this rank's rows.
        group: process group of this collection alone.
        dedup: ask for each row once per rank and batch.
        statistics: what to count in.
    """

    def __init__(
        self,
        path: str,
        layout: RowLayout,
        local: LocalRows,
        group: dist.ProcessGroup,
        dedup: bool,
        statistics: ExchangeStatistics,
    ) -> None:
        self.layout, self.local, self.group, self.dedup, self.statistics = layout, local, group, dedup, statistics
        self._agreement = LookupHandshake(path, group, layout, dedup)
        self._touched = RowMembership(local.count, layout.first.device)
        self._window = GradientAccumulator()
        small = int(torch.diff(layout.starts).max()) < torch.iinfo(torch.int32).max
        self._id_type = torch.int32 if small else torch.int64

    def flight(self) -> PipelinedBatch:
        """Of a batch that nothing is known of."""
        nothing = RowRequest.none(self.layout, self.dedup)
        return PipelinedBatch(nothing, IncomingRows(nothing.rows, nothing.counts), self._room(nothing))

    # -- ids

    def announce(
        self, flight: PipelinedBatch, now: PipelinedBatch, features: KeyedJaggedTensor | None, ended: bool, mode: int
    ) -> None:
        """Send the ids of the batch after the current one; None if they are not known, or if there is none (``ended``)."""
        state = State.ENDED if ended else State.UNKNOWN if features is None else State.ASKS
        asking = self._agreement.ask(state, features, updates=now.updates, mode=mode)
        answer = self._agreement.reach(asking, ahead=True)
        flight.mode = answer.mode
        flight.announced, flight.sound, flight.ended = answer.somebody_asks, answer.sound, answer.ended
        flight.known = asking.state == State.ASKS
        if flight.announced:
            flight.request = asking.request
            flight.served = IncomingRows.of(self._exchange_ids(asking.request, answer.counts), answer.counts)
            flight.rows = self._room(asking.request)

    def verify(self, flight: PipelinedBatch, features: KeyedJaggedTensor | None, same: bool) -> None:
        """The model has asked: for the announced ids (``same``), for others, or not at all (None)."""
        same = same and flight.known
        asking = self._agreement.ask(State.SAME if same else State.ASKS, features)
        answer = self._agreement.reach(asking)
        if not answer.somebody_asks:
            return
        if not same:
            flight.request, flight.rows = asking.request, self._room(asking.request)
        parts = self._exchange_ids(asking.request, answer.counts)
        new = IncomingRows.of(parts, answer.counts)
        self._serve(asking.request, new, flight.rows if not same else None)
        flight.served = self._merged(flight.served, new, answer.anew)

    def _merged(self, old: IncomingRows, new: IncomingRows, anew: Sequence[bool]) -> IncomingRows:
        """Of every rank what it asked for last."""
        pairs = zip(old.parts(), new.parts(), anew)
        counts = torch.where(torch.tensor(anew)[:, None], new.counts, old.counts)
        return IncomingRows.of([b if again else a for a, b, again in pairs], counts)

    def _serve(self, request: RowRequest, served: IncomingRows, into: Tensor | None) -> None:
        rows = self._exchange_rows(self.local.read(served.rows), served.sizes, request.sizes, "colliding")
        if into is not None:
            into.copy_(rows)

    # -- rows

    def prefetch(self, flight: PipelinedBatch, now: PipelinedBatch) -> None:
        """Sort the rows of the announced batch against those that are updated before it, and fetch the non-colliding ones."""
        if not flight.announced:
            return
        if now.updates:
            flight.before, now.after = self._contention(flight, now)
        else:
            flight.before = self._nothing(flight)
        self._fetch(flight, flight.before.others(flight.request, flight.served), "non_colliding")

    def _contention(self, flight: PipelinedBatch, now: PipelinedBatch) -> tuple[CollidingRows, CollidingRows]:
        before = self._touched.among(flight.served.rows, [now.served.rows, *self._window.rows])
        after = self._touched.among(now.served.rows, [flight.served.rows])
        self.statistics.collisions(flight.served.rows, before)
        outgoing = [
            torch.cat(pair).to(torch.uint8) for pair in zip(before.split(flight.served.sizes), after.split(now.served.sizes))
        ]
        ahead, here = flight.request.sizes, now.request.sizes
        incoming = [outgoing[0].new_empty(sum(pair)) for pair in zip(ahead, here)]
        self._exchange(outgoing, incoming, "ids")
        told = [part.bool().split([a, b]) for part, a, b in zip(incoming, ahead, here)]
        first, second = (torch.cat(list(parts)) for parts in zip(*told))
        return (
            CollidingRows(RowMask.of(first, ahead), RowMask.of(before, flight.served.sizes)),
            CollidingRows(RowMask.of(second, here), RowMask.of(after, now.served.sizes)),
        )

    def _fetch(self, flight: PipelinedBatch, rows: CollidingRows, kind: str) -> None:
        """Some rows of a batch, from all owners."""
        values = self.local.read(flight.served.rows[rows.served.mask])
        flight.rows[rows.mine.mask] = self._exchange_rows(values, rows.served.sizes, rows.mine.sizes, kind)

    def _nothing(self, flight: PipelinedBatch) -> CollidingRows:
        device = flight.rows.device
        return CollidingRows(RowMask.none(flight.request.sizes, device), RowMask.none(flight.served.sizes, device))

    # -- gradients

    def colliding(self, now: PipelinedBatch, following: PipelinedBatch, gradient: Tensor | None) -> None:
        """Sum up the gradient (shape ``[ids, dim]``; None is zero), send what the next batch waits for, and fetch that."""
        now.gradient = self._per_row(now, gradient)
        if now.after is None or following.before is None:
            return
        rows, gradients = self._gather(now, now.after, "colliding")
        kept = self._touched.among(self._window.rows[0], [following.served.rows]) if self._window.rows else None
        self._update(now, rows, gradients, kept)
        self._fetch(following, following.before, "colliding")

    def discard(self) -> None:
        """Forget the gradients kept for an optimizer step that does not come."""
        self._window.take()

    def non_colliding(self, now: PipelinedBatch) -> None:
        """Send the gradients that nobody waits for, and apply them if an optimizer step follows."""
        shared = now.after or self._nothing(now)
        rows, gradients = self._gather(now, shared.others(now.request, now.served), "non_colliding")
        now.gradient = None
        if now.updates:
            self._update(now, rows, gradients, None)
        else:
            self._window.add(rows, gradients)

    def _per_row(self, now: PipelinedBatch, gradient: Tensor | None) -> Tensor:
        rows = torch.zeros(len(now.request.rows), self.local.dim, device=now.request.rows.device)
        if gradient is None:
            return rows
        self._count_needs(now.request)
        if not self.dedup:
            rows[now.request.place] = gradient
            return rows
        return rows.index_add_(0, now.request.place, gradient)

    def _count_needs(self, request: RowRequest) -> None:
        """What the batch needs, and what plain TorchRec would move for it."""
        start = sum(request.sizes[: self.group.rank()])
        end = start + request.sizes[self.group.rank()]
        mine = int(((request.place >= start) & (request.place < end)).sum())
        per_row = 8 + 2 * 4 * self.local.dim  # an id of 64 bits, there the row and back its gradient
        self.statistics.count("tokens", len(request.place))
        self.statistics.count("rows", len(request.rows))
        self.statistics.count("plain_bytes", (len(request.place) - mine) * per_row)
        self.statistics.count("dedup_bytes", (len(request.rows) - (end - start)) * per_row)

    def _gather(self, now: PipelinedBatch, rows: CollidingRows, kind: str) -> tuple[Tensor, Tensor]:
        """Some rows that this rank owns, and their gradients, in the order of summation."""
        assert now.gradient is not None
        gradients = self._exchange_rows(now.gradient[rows.mine.mask], rows.mine.sizes, rows.served.sizes, kind)
        if get_gradient_division():
            gradients /= self.group.size()
        order = now.served.by_slot(rows.served.mask)
        return now.served.rows[rows.served.mask][order], gradients[order]

    def _update(self, now: PipelinedBatch, rows: Tensor, gradients: Tensor, kept: Tensor | None) -> None:
        if self._window.rows:
            held = self._window.take(kept)
            rows, gradients = torch.cat([*held[0], rows]), torch.cat([*held[1], gradients])
        self.local.update(rows, gradients, now.rates, now.step)

    # -- transport

    def _exchange_ids(self, request: RowRequest, counts: Tensor) -> list[Tensor]:
        outgoing = list(request.rows.to(self._id_type).split(request.sizes))
        incoming = [outgoing[0].new_empty(size) for size in counts.sum(dim=1).tolist()]
        self._exchange(outgoing, incoming, "ids")
        return incoming

    def _exchange_rows(self, values: Tensor, gives: list[int], gets: list[int], kind: str) -> Tensor:
        received = values.new_empty(sum(gets), self.local.dim)
        self._exchange(values.contiguous().split(gives), received.split(gets), kind)
        return received

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], kind: str) -> None:
        with self.statistics.transfer():
            dist.all_to_all(list(incoming), list(outgoing), group=self.group)
        rank = self.group.rank()
        self.statistics.count(f"{kind}_bytes", sum(part.nbytes for peer, part in enumerate(outgoing) if peer != rank))

    def _room(self, request: RowRequest) -> Tensor:
        return torch.empty(len(request.rows), self.local.dim, device=request.rows.device)
