"""The worker thread's side of the exchange: the work of each job of a step. :mod:`.exchange` describes their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division

from lightning_freescale.embeddings.overlap.batch_state import (
    Announced,
    Batch,
    BatchGradients,
    BatchRows,
    RequestedRows,
    SomeRows,
)
from lightning_freescale.embeddings.overlap.id_exchange import Head, IdsToSend, KnownIds, LookedUp, NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.lookup_handshake import EvaluatedRows, LookupHandshake, Route
from lightning_freescale.embeddings.overlap.report import BagTraffic, ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest
from lightning_freescale.embeddings.overlap.row_updates import Collisions, RowUpdates


class RowExchange:
    """Does the work of each job on the worker thread. No other thread touches the rows, so they need no lock.

    Attributes:
        path: the path of the collection.
        local: the rows of this rank.
        row_updates: applies or keeps received gradients.
        bag_traffic: counts the bytes that TorchRec would send for bags; None for collections without bags.
    """

    def __init__(
        self,
        path: str,
        local: LocalRows,
        group: dist.ProcessGroup,
        dedup: bool,
        route: Route,
        statistics: ExchangeStatistics,
        pooled: bool = False,
    ) -> None:
        self.path, self.local, self._route, self._statistics = path, local, route, statistics
        self._rank, self._ranks = group.rank(), group.size()
        self.row_updates, self._collisions = RowUpdates(local), Collisions(local, statistics)
        self.bag_traffic = BagTraffic(local.layout, self._rank, local.dim) if pooled else None
        self._handshake = LookupHandshake(path, group, local, dedup, route)
        self._batches = 0
        self._heads: list[Head] = []

    def new_batch(self) -> Batch:
        """Return a batch in its initial state."""
        self._batches += 1
        nothing, route = self._handshake.no_values, self._route
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
        """Do exchange A: send the owners the rows that the next batch needs, and patient gradients.

        Args:
            following: the next batch.
            current: the batch that computes.
            previous: the batch whose patient gradients are unsent; None if there is none.
            looked_up: the lookups of ``current`` so far.
            predicted: whether they were submitted ahead.
            known: what this rank knows of ``following``.
        """
        current.rows.passing = None  # memory: all its rows have arrived
        lookup, request, wrong = LookedUp.PREDICTED, self._route.no_rows, None
        if not (predicted and current.announced.submitted):
            lookup, request, wrong = self._handshake.ask_for(looked_up, LookedUp.OTHERS)
        sent = self._handshake.ids_to_send(known)
        self._heads, incoming = self._send_ids(sent, current.update.updates, previous, lookup, request.sizes)
        following.requested = RequestedRows(sent.request, incoming)
        self._handshake.raise_errors(self._heads, wrong)
        if any(head.lookup == LookedUp.OTHERS for head in self._heads):
            self._serve_anew(current, request)

    def drain(self, previous: Batch) -> None:
        """Send the patient gradients of a batch now. Collective."""
        sent = IdsToSend(NextIds.DRAINING, self._route.no_rows)
        self._handshake.raise_errors(self._send_ids(sent, previous.update.updates, previous)[0])

    def _send_ids(
        self,
        sent: IdsToSend,
        updates: bool,
        previous: Batch | None,
        lookup: LookedUp = LookedUp.PREDICTED,
        other_ids: Sequence[int] | None = None,
    ) -> tuple[list[Head], IncomingRows]:
        """Exchange heads, ids and the unsent gradients of ``previous``, apply these, and return heads and incoming rows."""
        given, gradients = self._route.nothing_given, self._handshake.no_values
        if previous is not None:
            given = previous.gradients.patient or self._route.all_of(previous.requested)
            gradients = gradients if previous.gradients.sums is None else previous.gradients.sums
        heads, incoming, came = self._route.exchange_ids(sent, updates, lookup, given, gradients, other_ids)
        self._route.count_gradients("non_colliding", given)
        if previous is not None:
            previous.gradients.sums = None
            self.row_updates.take(previous, given, came)
        return heads, incoming

    def _serve_anew(self, current: Batch, request: RowRequest) -> None:
        """Serve the ranks whose lookup differs from the submitted ids, before rows are compared with this batch."""
        asks = [head.lookup == LookedUp.OTHERS for head in self._heads]
        new, values = self._route.serve_anew(current.requested, request, current.update.updates, self._heads, asks)
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
            self._hear_later(following, current, self._handshake.ids_to_send(known))
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
        sent = replace(sent, before=requested.incoming)
        nothing = (LookedUp.PREDICTED, self._route.nothing_given, self._handshake.no_values)
        heads, incoming, _ = self._handshake.exchange_until_served(sent, current.update.updates, *nothing)
        self._heads = [new if is_later else old for new, old, is_later in zip(heads, self._heads, later)]
        request = sent.request if later[self._rank] else requested.request
        following.requested = RequestedRows(request, requested.incoming.replaced(incoming, later))

    # -- between B and C

    def fetch_more(self, current: Batch, lookups: Sequence[KeyedJaggedTensor]) -> tuple[Tensor, Tensor]:
        """Fetch the rows of lookups that were not submitted. Other ranks serve them in the message that they are at.

        Without lookups, serve those of other ranks. Return the rows, and the index of the row of each id.
        """
        # other ranks may send gradients in the same message: provide their slots
        nothing = self._route.nothing_given
        given = nothing if self._waits_for_ids() else replace(self._given_in_time(current), requested=nothing.requested)
        return self._handshake.fetch_more(lookups, current.update.updates, given)

    # -- C and D

    def exchange_colliding(
        self,
        current: Batch,
        following: Batch,
        gradient: Tensor | None,
        anew: Sequence[KeyedJaggedTensor] | None,
        pooled_rows: np.ndarray | int,
    ) -> None:
        """Do exchanges C and D: send the gradients that the next batch waits for, and fetch its last rows.

        Args:
            current: the batch whose backward has run.
            following: the next batch.
            gradient: the gradient of the rows of its lookups, shape ``[ids, dim]``; None means zero.
            anew: the lookups of ``gradient``, if the owners know of different ones.
            pooled_rows: see :attr:`ExchangeStep.pooled_rows`.
        """
        lookup, request, update = LookedUp.PREDICTED, self._route.no_rows, current.update
        if anew is not None:
            lookup, request = LookedUp.OTHERS, self._handshake.request(anew)
            current.requested = replace(current.requested, request=request)
        sums = current.gradients.sums = self._sum_per_row(current.requested.request, gradient, pooled_rows)
        given, incoming = self._given_in_time(current), current.requested.incoming
        if anew is not None:
            given = replace(given, requested=self._route.nothing_given.requested)
        sent = IdsToSend(NextIds.ANNOUNCED, request, moves=gradient is not None or update.whole_used, before=incoming)
        heads, new, came = self._handshake.exchange_until_served(sent, update.updates, lookup, given, sums)
        self.row_updates.count_step(current, any(head.moves for head in heads))
        self._route.count_gradients("colliding", given)
        changed = [head.lookup == LookedUp.OTHERS for head in heads]
        if any(changed):
            self._update_anew(current, following, incoming.replaced(new, changed))
        elif update.updates and (update.held or following.rows.awaited is None):
            self.row_updates.take(current, given, came)
            current.gradients = BatchGradients(patient=self._route.nothing_given)
        elif update.updates:
            kept = self.row_updates.kept.rows
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

    def _sum_per_row(self, request: RowRequest, gradient: Tensor | None, pooled_rows: np.ndarray | int) -> Tensor:
        if gradient is None:
            return torch.zeros(sum(request.sizes), self.local.dim, device=self._handshake.no_values.device)
        pooled = None if self.bag_traffic is None else self.bag_traffic.torchrec_bytes(request, pooled_rows)
        self._statistics.count_lookup(request, self.local.layout.places[self._rank], self.local.dim, pooled)
        sums = request.sum_per_row(gradient)
        return sums.div_(self._ranks) if get_gradient_division() else sums

    # -- between steps

    def evaluate(self, module: int, features: KeyedJaggedTensor | None) -> EvaluatedRows:
        """Call :meth:`LookupHandshake.evaluate` without counting it in the statistics."""
        with self._statistics.suspended():
            return self._handshake.evaluate(module, features)

    def restore_accumulated(self, rows: list[Tensor], gradients: list[Tensor], moved: bool) -> None:
        """Continue a window with saved gradients, before the first batch."""
        self.row_updates.kept.rows, self.row_updates.kept.gradients, self.row_updates.moved = rows, gradients, moved
        for each in rows:
            self._collisions.mark(each, 1)  # they are updated at the end of the window

    def discard_accumulated(self, current: Batch, previous: Batch | None) -> None:
        """Discard the gradients kept for an optimizer step that will not follow, and start a window with ``current``."""
        self.row_updates.discard()
        self._collisions.begin_window(current.number)
        if previous is not None:
            previous.gradients.patient = self._route.nothing_given
