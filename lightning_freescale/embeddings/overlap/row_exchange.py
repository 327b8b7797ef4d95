"""The worker thread's side of the exchange: the work of each job of a step. :mod:`.exchange` describes their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.embeddings.overlap.batch_state import (
    Announced,
    Batch,
    BatchGradients,
    BatchRows,
    RequestedRows,
    SomeRows,
)
from lightning_freescale.embeddings.overlap.hot_route import HotRoute
from lightning_freescale.embeddings.overlap.id_exchange import (
    Head,
    IdsToSend,
    KnownIds,
    LookedUp,
    NextIds,
    refuse_ranks_out_of_step,
)
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics, bag_senders
from lightning_freescale.embeddings.overlap.routes import DirectRoute
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest
from lightning_freescale.embeddings.overlap.row_updates import Collisions, RowUpdates

Route: TypeAlias = DirectRoute | HotRoute


class RowExchange:
    """Does the work of each job on the worker thread. No other thread touches the rows, so they need no lock."""

    def __init__(
        self,
        path: str,
        local: LocalRows,
        group: dist.ProcessGroup,
        dedup: bool,
        route: Route,
        statistics: ExchangeStatistics,
        pooled: bool,
    ) -> None:
        self.path, self.local, self._route, self._statistics = path, local, route, statistics
        self._rank, self._ranks = group.rank(), group.size()
        self.row_updates, self._collisions = RowUpdates(local), Collisions(local, statistics)
        self._group, self._dedup = group, dedup
        self._bag_senders = bag_senders(local.layout, self._rank) if pooled else None
        self._no_values = local.layout.starts.new_empty(0, local.dim, dtype=torch.float32)
        self._batches = 0
        self._heads: list[Head] = []

    def new_batch(self) -> Batch:
        self._batches += 1
        nothing, route = self._no_values, self._route
        return Batch(self._batches, RequestedRows(route.no_rows, route.no_incoming), BatchRows(nothing, route.no_rows.inverse))

    # -- A

    def announce(
        self,
        following: Batch,
        current: Batch,
        previous: Batch | None,
        looked_up: Sequence[KeyedJaggedTensor],
        predicted: bool,
        known: KnownIds,
    ) -> None:
        """Do exchange A: send the owners the rows that ``following`` needs, and the patient gradients of ``previous``.

        ``looked_up`` are the lookups of ``current`` so far, and ``predicted`` tells whether they were submitted ahead.
        """
        lookup, request, wrong = LookedUp.PREDICTED, self._route.no_rows, None
        if not (predicted and current.announced.submitted):
            lookup, request, wrong = self._ask_for(looked_up, LookedUp.OTHERS)
        sent = self._ids_to_send(known)
        self._heads, incoming = self._send_ids(sent, current.update.updates, previous, lookup)
        following.requested = RequestedRows(sent.request, incoming)
        self._raise_errors(self._heads, wrong)
        if any(head.lookup == LookedUp.OTHERS for head in self._heads):
            self._serve_anew(current, request)

    def drain(self, previous: Batch) -> None:
        """Send the patient gradients of a batch now. Collective."""
        sent = IdsToSend(NextIds.DRAINING, self._route.no_rows)
        self._raise_errors(self._send_ids(sent, previous.update.updates, previous)[0])

    def _send_ids(
        self,
        sent: IdsToSend,
        updates: bool,
        previous: Batch | None,
        lookup: LookedUp = LookedUp.PREDICTED,
    ) -> tuple[list[Head], IncomingRows]:
        """Exchange heads, ids and the unsent gradients of ``previous``, apply these, and return heads and incoming rows."""
        given, gradients = self._route.nothing_given, self._no_values
        if previous is not None:
            given = previous.gradients.patient or self._route.all_of(previous.requested)
            gradients = gradients if previous.gradients.sums is None else previous.gradients.sums
        heads, incoming, came = self._route.exchange_ids(sent, updates, lookup, given, gradients)
        self._route.count_gradients("non_colliding", given)
        if previous is not None:
            previous.gradients.sums = None
            self.row_updates.take(previous, given, came)
        return heads, incoming

    def _serve_anew(self, current: Batch, request: RowRequest) -> None:
        """Serve the ranks whose lookup differs from the submitted ids, before rows are compared with this batch."""
        asks = [head.lookup == LookedUp.OTHERS for head in self._heads]
        lookup = LookedUp.OTHERS if asks[self._rank] else LookedUp.PREDICTED
        sent = IdsToSend(NextIds.ANNOUNCED, request, before=current.requested)
        nothing = (self._route.nothing_given, self._no_values)
        _, new, _ = self._route.exchange_ids(sent, current.update.updates, lookup, *nothing)
        # a proxy requests rows for its whole node, so with hot rows the other ranks of a node get their former rows again
        values = self._route.give_rows(RequestedRows(request, new))
        if asks[self._rank]:
            current.rows = BatchRows(values, request.inverse)
        request = request if asks[self._rank] else current.requested.request
        current.requested = RequestedRows(request, current.requested.incoming.replaced(new, asks))
        self._collisions.mark(new.rows, current.number)

    # -- B

    def prefetch(self, following: Batch, current: Batch, known: KnownIds, forward_first: Lock | None) -> None:
        """Do exchange B: learn which rows of ``following`` are updated before it, and fetch all others, once.

        If ids of other ranks are late, a rank in its forward does not wait for them: the first event takes ``forward_first``,
        and the job is submitted again after the forward.
        """
        if following.announced.heard:
            return
        if self._waits_for_ids():
            if forward_first is not None and forward_first.acquire(blocking=False):
                return
            self._hear_later(following, current, self._ids_to_send(known))
        if self._route.hot_list is not None:
            self._route.hot_list.count(following.requested.incoming)
        states, updates = [head.state for head in self._heads], current.update.updates
        any_submitted = NextIds.REQUESTED in states
        following.announced = Announced(
            heard=True,
            submitted=states[self._rank] == NextIds.REQUESTED,
            any_submitted=any_submitted,
            all_submitted=set(states) == {NextIds.REQUESTED},
            ended_ranks=[rank for rank, state in enumerate(states) if state == NextIds.ENDED],
            given_up=any(head.gives_up for head in self._heads),
        )
        if current.update.changes_all:
            current.update.compared = False
        elif any_submitted:
            colliding = self._collisions.compare(following, current)
            following.rows, split = self._route.give_others(following.requested, current.requested, *colliding)
            if split is not None:
                current.gradients.urgent, current.gradients.patient = split
        if not any_submitted:
            following.requested = RequestedRows(self._route.no_rows, self._route.no_incoming)
        if updates:
            self._collisions.begin_window(following.number)

    def _waits_for_ids(self) -> bool:
        """Return whether the next message contains late ids of any rank."""
        return any(head.state == NextIds.LATER for head in self._heads)

    def _hear_later(self, following: Batch, current: Batch, sent: IdsToSend) -> None:
        """Exchange the late ids: of ranks that did not know them when they needed the rows of the current batch."""
        later, requested = [head.state == NextIds.LATER for head in self._heads], following.requested
        if not later[self._rank]:
            sent = IdsToSend(NextIds.ANNOUNCED, self._route.no_rows)
        sent = replace(sent, before=requested)
        nothing = (LookedUp.PREDICTED, self._route.nothing_given, self._no_values)
        heads, incoming, _ = self._exchange_until_served(sent, current.update.updates, *nothing)
        self._heads = [new if is_later else old for new, old, is_later in zip(heads, self._heads, later)]
        request = sent.request if later[self._rank] else requested.request
        following.requested = RequestedRows(request, requested.incoming.replaced(incoming, later))

    # -- between B and C

    def fetch_more(self, current: Batch, lookups: Sequence[KeyedJaggedTensor]) -> tuple[Tensor, Tensor]:
        """Fetch the rows of lookups that were not submitted. Other ranks serve them in the message that they are at.

        Without lookups, serve those of other ranks. Return the rows, and the index of the row of each id.
        """
        # other ranks may send gradients in the same message: provide their slots
        given = self._route.nothing_given if self._waits_for_ids() else self._route.withheld(self._given_in_time(current))
        kind, request, wrong = self._ask_for(lookups, LookedUp.MORE)
        sent, updates = IdsToSend(NextIds.ANNOUNCED, request), current.update.updates
        heads, incoming, _ = self._route.exchange_ids(sent, updates, kind, given, self._no_values)
        self._raise_errors(heads, wrong)
        return self._serve_more(heads, incoming, request), request.inverse

    # -- C and D

    def exchange_colliding(
        self,
        current: Batch,
        following: Batch,
        gradient: Tensor | None,
        anew: Sequence[KeyedJaggedTensor] | None,
    ) -> None:
        """Do exchanges C and D: send the gradients that ``following`` waits for, and fetch its last rows.

        ``gradient`` is the gradient of the rows of ``current``, shape ``[ids, dim]``; None means zero. ``anew`` are its lookups
        if the owners know of different ones.
        """
        lookup, request, update = LookedUp.PREDICTED, self._route.no_rows, current.update
        if anew is not None:
            lookup, request = LookedUp.OTHERS, self._request(anew)
            current.requested = replace(current.requested, request=request)
        sums = self.local.wire.gradients.encode(self._sum_per_row(current.requested, gradient))
        current.gradients.sums = sums
        given, requested = self._given_in_time(current), current.requested
        if anew is not None:
            given = self._route.withheld(given)
        sent = IdsToSend(NextIds.ANNOUNCED, request, moves=gradient is not None or update.whole_used, before=requested)
        heads, new, came = self._exchange_until_served(sent, update.updates, lookup, given, sums)
        self.row_updates.count_step(current, any(head.moves for head in heads))
        self._route.count_gradients("colliding", given)
        changed = [head.lookup == LookedUp.OTHERS for head in heads]
        if any(changed):
            self._update_anew(current, following, requested.incoming.replaced(new, changed))
        elif update.updates and (update.held or following.rows.awaited is None):
            self.row_updates.take(current, given, came)
            current.gradients = BatchGradients(patient=self._route.nothing_given)
        elif update.updates:
            kept = self.row_updates.kept_rows
            due = self._collisions.asked_by(following.number, kept[0]) if kept else None
            self.row_updates.take(current, given, came, due)
            self._route.give_last(following.requested.incoming, following.rows)

    def apply_held(self, current: Batch, following: Batch) -> None:
        """Update rows with the held gradients, and do D."""
        self.row_updates.apply_held(current)
        if not current.update.compared:
            self._give_all(following)
        elif following.rows.awaited is not None:
            self._route.give_last(following.requested.incoming, following.rows)

    def _given_in_time(self, current: Batch) -> SomeRows:
        """Return the rows whose gradients go with C: those that the next batch needs; all if they are unknown, or held."""
        if not current.update.updates:
            return self._route.nothing_given
        urgent = None if current.update.held else current.gradients.urgent
        return self._route.all_of(current.requested) if urgent is None else urgent

    def _update_anew(self, current: Batch, following: Batch, incoming: IncomingRows) -> None:
        """Update all rows and fetch all rows of ``following``, because some rows were not compared."""
        current.requested, current.update.compared = replace(current.requested, incoming=incoming), False
        self._collisions.mark(incoming.rows, current.number)
        if not current.update.updates:
            return
        assert current.gradients.sums is not None
        came = self._route.take_gradients(current.gradients.sums, current.requested)
        self.row_updates.take(current, self._route.all_of(current.requested), came)
        current.gradients = BatchGradients(patient=self._route.nothing_given)
        if not current.update.held:
            self._give_all(following)

    def _give_all(self, following: Batch) -> None:
        """Send the values of all rows, because it is unknown which of them were just updated."""
        if following.announced.any_submitted:
            requested = following.requested
            following.rows = BatchRows(self._route.give_rows(requested), requested.request.inverse)

    def _sum_per_row(self, requested: RequestedRows, gradient: Tensor | None) -> Tensor:
        request = requested.request
        if gradient is None:
            return torch.zeros(sum(request.sizes), self.local.dim, device=self._no_values.device)
        self._statistics.count_lookup(request, self._rank, self.local.dim, self._bag_senders)
        if (through := requested.incoming.forwarded) is not None:
            wire = self.local.wire
            self._statistics.count_hot(through, 4 * (wire.rows.words + wire.gradients.words))
        sums = request.sum_per_row(gradient)
        return sums.div_(self._ranks) if get_gradient_division() else sums

    # -- between steps

    def evaluate(self, module: int, features: KeyedJaggedTensor | None) -> tuple[list[int], Tensor, Tensor, ValueError | None]:
        """Fetch the rows of a lookup outside of steps, and serve those of other ranks. Collective.

        ``module`` is the number of the module that this rank looks up, from 1 on; 0 for none. ``features`` are its ids; None if
        this rank looks up nothing in this collection. Return the numbers of all ranks, the rows in the form of messages, the
        index of the row of each id, and the error of the ids of any rank.
        """
        with self._statistics.suspended():
            kind, request, wrong = self._ask_for([] if features is None else [features], LookedUp.MORE)
            sent, nothing = IdsToSend(NextIds.EVALUATING, request, evaluated=module), self._route.nothing_given
            heads, incoming, _ = self._route.exchange_ids(sent, False, kind, nothing, self._no_values)
            modules, rows = [head.evaluated for head in heads], self._no_values
            try:
                self._raise_errors(heads, wrong)
            except ValueError as error:  # raised on all ranks, so they stay in step
                return modules, rows, request.inverse, error.with_traceback(None)
            if any(head.most_ids for head in heads):
                rows = self._serve_more(heads, incoming, request)
            return modules, rows, request.inverse, None

    def restore_accumulated(self, rows: list[Tensor], gradients: list[Tensor], moved: bool) -> None:
        """Continue a window with saved gradients, before the first batch."""
        self.row_updates.kept_rows, self.row_updates.kept_gradients, self.row_updates.moved = rows, gradients, moved
        for each in rows:
            self._collisions.mark(each, 1)  # they are updated at the end of the window

    def discard_accumulated(self, current: Batch, previous: Batch | None) -> None:
        """Discard the gradients kept for an optimizer step that will not follow, and start a window with ``current``."""
        self.row_updates.kept_rows, self.row_updates.kept_gradients, self.row_updates.moved = [], [], False
        self._collisions.begin_window(current.number)
        if previous is not None:
            previous.gradients.patient = self._route.nothing_given

    # -- messages about lookups

    def _request(self, lookups: Sequence[KeyedJaggedTensor]) -> RowRequest:
        return RowRequest.from_lookups(lookups, self.local.layout, self._dedup)

    def _ids_to_send(self, known: KnownIds) -> IdsToSend:
        """Return the message for the next batch. Wrong ids count as unknown, because the model may never look them up."""
        state, request = known.state, self._route.no_rows
        if state == NextIds.REQUESTED:
            try:
                request = self._request(known.lookups)
            except ValueError:
                state = NextIds.UNKNOWN
        return IdsToSend(state, request, known.gives_up)

    def _ask_for(self, lookups: Sequence[KeyedJaggedTensor], kind: LookedUp) -> tuple[LookedUp, RowRequest, ValueError | None]:
        """Return ``kind``, or WRONG for wrong ids, with the request and the error of lookups that were not submitted."""
        try:
            return kind, self._request(lookups), None
        except ValueError as error:
            return LookedUp.WRONG, self._route.no_rows, error.with_traceback(None)  # no reference cycle through this frame

    def _exchange_until_served(
        self, sent: IdsToSend, updates: bool, lookup: LookedUp, given: SomeRows, gradients: Tensor
    ) -> tuple[list[Head], IncomingRows, Tensor]:
        """Repeat a message until no rank sends a request for more rows of the current batch in its place."""
        while True:
            heads, incoming, came = self._route.exchange_ids(sent, updates, lookup, given, gradients)
            self._raise_errors(heads)
            if all(head.lookup != LookedUp.MORE for head in heads):
                return heads, incoming, came
            self._serve_more(heads, incoming, self._route.no_rows)

    def _serve_more(self, heads: Sequence[Head], incoming: IncomingRows, request: RowRequest) -> Tensor:
        """Serve the ranks that request more rows; return the rows of this rank's request."""
        wanted = self._route.no_incoming.replaced(incoming, [head.lookup == LookedUp.MORE for head in heads])
        return self._route.give_rows(RequestedRows(request, wanted))

    def _raise_errors(self, heads: Sequence[Head], wrong: Exception | None = None) -> None:
        """Raise the errors of any rank's lookup on every rank. Collective if there are any."""
        refuse_ranks_out_of_step(heads)
        if LookedUp.WRONG in {head.lookup for head in heads}:
            texts = gather_objects(str(wrong) if wrong else None, self._group)
            found = [f"rank {rank}: {text.removesuffix('.')}" for rank, text in enumerate(texts) if text is not None]
            raise ValueError(f"Embedding collection {self.path!r}, {'; '.join(found)}") from wrong
