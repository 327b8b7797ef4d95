"""The exchanges of a collection: what its worker does with every batch, in the same order on every rank.

A step takes four of them, in three jobs::

    announce     A  ids of the next batch, and the gradients of the batch before for which nobody waits      to the owners
    prefetch     B  which rows the current batch still updates (colliding), and the values of all others     from the owners
    exchange_    C  gradients of the current batch for the colliding rows                                    to the owners
    colliding    D  values of the colliding rows                                                             from the owners

A and B run while the current batch computes, C and D between its backward and the lookup of the next one. An owner applies
the gradients that come with A before it reads the rows that go with B, so a row has all updates of the batches before.

No sizes travel ahead: A's head tells its own, B's are bounded by what was asked, those of C and D are known from B. Two things
add exchanges: a rank whose model looks up other ids than it had submitted is served anew, and a rank that does not know the
next ids when it needs the current ones sends them in a message of their own; the heads of A tell all ranks of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division

from lightning_freescale.embeddings.overlap.batch_state import GradientAccumulator, PipelinedBatch, SomeRows
from lightning_freescale.embeddings.overlap.handshake import Head, IdsToSend, LookedUp, LookupHandshake, NextIds
from lightning_freescale.embeddings.overlap.id_exchange import IdExchange
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.messages import PartLayout, put, ranges, take
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, RowSubset
from lightning_freescale.embeddings.overlap.transport import Transport


class RowExchange:
    """Runs on the collection's worker only, so that its rows need no lock.

    Args:
        path: of the collection, for errors.
        local: this rank's rows.
        group: process group of this collection alone.
        dedup: request each row once per rank and batch.
        statistics: what to count in.

    Attributes:
        transport: of its messages.
        accumulator: gradients kept for a later optimizer step.
    """

    def __init__(
        self, path: str, local: LocalRows, group: dist.ProcessGroup, dedup: bool, statistics: ExchangeStatistics
    ) -> None:
        self.local, self.statistics = local, statistics
        self.accumulator = GradientAccumulator()
        self.transport = Transport(group, local.dim, local.layout.device, statistics)
        self._rank, self._device = self.transport.rank, self.transport.device
        self._handshake = LookupHandshake(path, group, local.layout, dedup)
        nothing = self._no_rows = self._handshake.no_rows
        self._no_incoming = IncomingRows(nothing.rows.long(), nothing.sizes, nothing.slots)
        self._ids = IdExchange(self.transport, nothing.slots.shape[1])
        self._messages = self._batches = 0
        # the number of the last batch that asked for each row: two batches are compared without sorting, and nothing is reset
        self._last_batch = torch.zeros(local.count, dtype=torch.int32, device=self._device)
        self._window_start = 1  # rows that no batch has asked for have 0
        self._heads: list[Head] = []
        self._nothing = self.new_batch()
        self._nothing.updates = False  # nor brings it about that of the kept gradients

    def new_batch(self) -> PipelinedBatch:
        """Return the state of a batch that nothing is known of."""
        self._batches += 1
        rows = self.transport.rows(0)
        return PipelinedBatch(self._batches, self._no_rows, self._no_incoming, rows, self._no_rows.inverse)

    # -- the jobs of a step

    def announce(
        self,
        following: PipelinedBatch,
        current: PipelinedBatch,
        previous: PipelinedBatch | None,
        looked_up: KeyedJaggedTensor | None,
        predicted: bool,
        state: NextIds,
        features: KeyedJaggedTensor | None,
        mode: int,
    ) -> None:
        """A: tell the owners which rows the batch after ``current`` needs, and send gradients that nobody waits for.

        Args:
            following: the batch after ``current``.
            current: the batch that computes.
            previous: the batch whose last gradients have not been sent; None if there is none.
            looked_up: what the model has looked up in ``current``, None if nothing.
            predicted: whether that was submitted ahead.
            state: of the ids of ``following``.
            features: these ids.
            mode: how this rank comes to know ids.
        """
        lookup, request, wrong = LookedUp.PREDICTED, self._no_rows, None
        if not (predicted and current.submitted):
            lookup, current.digest = LookedUp.OTHERS, 0
            try:
                if looked_up is not None:
                    request, current.digest = self._handshake.request(looked_up)
            except ValueError as error:
                lookup, wrong = LookedUp.WRONG, error.with_traceback(None)  # no circle through this frame
        sent = self._handshake.ids_to_send(state, features, mode)
        self._heads, following.incoming = self._send_ids(sent, current, previous, lookup, request.sizes)
        following.request, following.digest = sent.request, sent.digest
        self._handshake.raise_errors(self._heads, wrong, looked_up)
        if any(head.lookup == LookedUp.OTHERS for head in self._heads):
            self._serve_anew(current, request)

    def prefetch(
        self,
        following: PipelinedBatch,
        current: PipelinedBatch,
        state: NextIds,
        features: KeyedJaggedTensor | None,
        mode: int,
    ) -> None:
        """B: learn which rows of ``following`` are updated before it, and fetch all others."""
        if any(head.state == NextIds.LATER for head in self._heads):
            self._hear_later(following, current, self._handshake.ids_to_send(state, features, mode))
        states = [head.state for head in self._heads]
        agree = len({head.digest for head in self._heads if head.digest}) <= 1
        following.mode = max(head.mode for head in self._heads)
        following.ended_ranks = [rank for rank, each in enumerate(states) if each == NextIds.ENDED]
        # ranks that disagree on the features are all asked again at the lookup, where it is an error
        following.any_submitted = agree and NextIds.REQUESTED in states
        following.submitted = agree and states[self._rank] == NextIds.REQUESTED
        following.all_submitted = agree and set(states) == {NextIds.REQUESTED}
        if following.any_submitted:
            self._send_rows(following, current, *self._find_collisions(following, current))
        else:
            following.request, following.incoming, following.digest = self._no_rows, self._no_incoming, 0
        if current.updates:
            self._window_start = following.number

    def exchange_colliding(self, current: PipelinedBatch, following: PipelinedBatch, gradient: Tensor | None) -> None:
        """C and D: send what the next batch waits for of a gradient (``[ids, dim]``; None is zero), and fetch its last rows."""
        current.gradient = self._sum_per_row(current, gradient)
        urgent, awaited = current.urgent, following.awaited
        if urgent is None or awaited is None:
            return
        first = current.gradient.index_select(0, urgent.requested.index)
        gradients = self.transport.exchange_rows(first, urgent.requested.sizes, urgent.incoming.sizes)
        kept = self.accumulator.rows
        due = self._last_batch[kept[0]] == following.number if kept else None
        self._update(current, urgent, gradients, due)
        values = self.local.read(following.incoming.rows.index_select(0, awaited.incoming.index))
        last = self.transport.exchange_rows(values, awaited.incoming.sizes, awaited.requested.sizes)
        following.rows[following.late_places] = last

    # -- between steps

    def drain(self, previous: PipelinedBatch) -> None:
        """Send the gradients of a batch that nobody waits for, now. Collective."""
        self._handshake.raise_errors(self._send_ids(IdsToSend(NextIds.DRAINING, self._no_rows), previous, previous)[0])

    def discard_accumulated(self, current: PipelinedBatch, previous: PipelinedBatch | None) -> None:
        """Forget the gradients kept for an optimizer step that does not come; a window begins with ``current``."""
        self.accumulator.pop()
        self._window_start = current.number
        if previous is not None:
            previous.patient = self._all_of(self._nothing)

    # -- A

    def _send_ids(
        self,
        sent: IdsToSend,
        current: PipelinedBatch,
        previous: PipelinedBatch | None,
        lookup: LookedUp = LookedUp.PREDICTED,
        other_ids: Sequence[int] | None = None,
    ) -> tuple[list[Head], IncomingRows]:
        """Exchange heads, ids and the last gradients of ``previous``, and apply these; return what all ranks have told."""
        previous = previous or self._nothing
        self._messages = (self._messages + 1) & 0x7FFFFFFF
        most, updates = max(sent.request.sizes), int(current.updates)
        head = Head(self._messages, sent.state, lookup, 0, most, 0, sent.digest, current.digest, updates, sent.mode)
        given = previous.patient or self._all_of(previous)
        gradients = self.transport.rows(0) if previous.gradient is None else previous.gradient
        heads, incoming, came = self._ids.exchange(sent, head, other_ids or self._no_rows.sizes, given, gradients)
        previous.gradient = None
        if previous.updates:
            self._update(previous, given, came, None)
        else:
            self.accumulator.accumulate(*self._in_order(previous, given, came))
        return heads, incoming

    def _hear_later(self, following: PipelinedBatch, current: PipelinedBatch, sent: IdsToSend) -> None:
        """Hear the ids of the ranks that did not know them when they needed the rows of the current batch."""
        later = [head.state == NextIds.LATER for head in self._heads]
        if later[self._rank]:
            following.request, following.digest = sent.request, sent.digest
        else:
            sent = IdsToSend(NextIds.TOLD, self._no_rows)
        heads, incoming = self._send_ids(sent, current, None)
        self._handshake.raise_errors(heads)
        self._heads = [new if is_later else old for new, old, is_later in zip(heads, self._heads, later)]
        following.incoming = following.incoming.replaced(incoming, later)

    def _serve_anew(self, current: PipelinedBatch, request: RowRequest) -> None:
        """Serve the ranks whose model has looked up others than were submitted, before rows are compared with this batch."""
        asks = [head.lookup == LookedUp.OTHERS for head in self._heads]
        new = self._ids.exchange_other(request, self._heads, asks)
        values = self.transport.exchange_rows(self.local.read(new.rows), new.sizes, request.sizes)
        if asks[self._rank]:
            current.request, current.rows, current.places = request, values, request.inverse
        current.incoming = current.incoming.replaced(new, asks)
        self._last_batch[new.rows] = current.number

    # -- B

    def _find_collisions(self, following: PipelinedBatch, current: PipelinedBatch) -> tuple[Tensor, Tensor]:
        """Owner: return which incoming rows of ``following`` are updated before it, and which of ``current`` it needs."""
        rows = following.incoming.rows
        # a row collides if any batch of the window has it
        awaited = self._last_batch[rows] >= self._window_start if current.updates else torch.zeros_like(rows, dtype=torch.bool)
        self._last_batch[rows] = following.number
        self.statistics.count_collisions(rows, awaited)
        return awaited, self._last_batch[current.incoming.rows] == following.number

    def _send_rows(self, following: PipelinedBatch, current: PipelinedBatch, awaited: Tensor, urgent: Tensor) -> None:
        """Exchange which rows collide, and the values of those that do not: ``[flags of following, of current | rows]``."""
        dim, none = self.transport.dim, self._no_rows.sizes
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

    # -- gradients

    def _sum_per_row(self, current: PipelinedBatch, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return torch.zeros(sum(current.request.sizes), self.transport.dim, device=self._device)
        self.statistics.count_lookup(current.request, self._rank, self.transport.dim)
        sums = current.request.sum_per_row(gradient)
        return sums.div_(self.transport.ranks) if get_gradient_division() else sums

    def _all_of(self, batch: PipelinedBatch) -> SomeRows:
        sizes = (batch.request.sizes, batch.incoming.sizes)
        return SomeRows(*(RowSubset.all_of(each, self._device) for each in sizes))

    def _update(self, batch: PipelinedBatch, chosen: SomeRows, gradients: Tensor, due: Tensor | None) -> None:
        """Update some rows of a batch, and of the kept gradients those marked in ``due``, or all."""
        rows, gradients = self._in_order(batch, chosen, gradients)
        if self.accumulator.rows:
            kept_rows, kept_gradients = self.accumulator.pop(due)
            rows, gradients = torch.cat([*kept_rows, rows]), torch.cat([*kept_gradients, gradients])
        self.local.update(rows, gradients, batch.settings)

    def _in_order(self, batch: PipelinedBatch, chosen: SomeRows, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return some rows that this rank owns, and their gradients, in the order of summation."""
        rows = batch.incoming.rows.index_select(0, chosen.incoming.index)
        order = batch.incoming.order_by_slot(chosen.incoming.index)
        return (rows, gradients) if order is None else (rows[order], gradients[order])
