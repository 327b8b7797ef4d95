"""The exchanges of a collection: what its worker does with every batch, in the same order on every rank.

A step takes four of them, in three jobs::

    announce     A  ids of the next batch, and the gradients of the batch before for which nobody waits      to the owners
    prefetch     B  which rows the current batch still updates (colliding), and the values of all others     from the owners
    exchange_    C  gradients of the current batch for the colliding rows                                    to the owners
    colliding    D  values of the colliding rows                                                             from the owners

A and B run while the current batch computes, C and D between its backward and the lookup of the next one. An owner applies
the gradients that come with A before it reads the rows that go with B, so a row has all updates of the batches before.

No sizes travel ahead: A's head tells its own, B's are bounded by what was asked, those of C and D are known from B. The heads
of A and C tell all ranks of what adds exchanges: a rank whose model first looks up other ids than it had submitted is served
anew; one that does not know the next ids when it needs the current ones sends them in a message of their own, with several
collections once its forward has ended; and one that looks up more than it had submitted asks for it in place of that message,
or of C. Its rows were not compared with those of the next batch, so in that step all rows count as colliding.

Where gradients are clipped by more than their own row, or a loss is over all rows of a table, all go with C, the owners hold
them, and update and D wait until they are whole. After such a loss all rows have changed: none is compared, and all go with D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division

from lightning_freescale.embeddings.overlap.batch_state import EvaluationLookup, FurtherLookup, PipelinedBatch, SomeRows
from lightning_freescale.embeddings.overlap.id_exchange import Head, IdsToSend, LookedUp, LookupHandshake, NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.proxy_route import Nodes, ProxyGroups, ProxyRoute
from lightning_freescale.embeddings.overlap.report import BagTraffic, ExchangeStatistics
from lightning_freescale.embeddings.overlap.routes import DirectRoute, Route
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest
from lightning_freescale.embeddings.overlap.row_updates import Collisions, HeldGradients, RowUpdates
from lightning_freescale.embeddings.overlap.transport import LaunchOrder, Transport


class RowExchange:
    """Runs on the collection's worker only, so that its rows need no lock.

    Args:
        path: of the collection, for errors.
        local: this rank's rows.
        group: process group of this collection alone.
        dedup: request each row once per rank and batch.
        statistics: what to count in.
        order: as for :class:`Transport`.
        pooled: whether the rows are those of bags.
        nodes: which ranks share a node; None if nobody knows.
        proxies: the groups of the way through them; None for the direct one.

    Attributes:
        path: of the collection.
        local: this rank's rows.
        transport: of its messages between all ranks.
        transports: all of its messages.
        row_updates: what becomes of the gradients that come.
        held: those that are clipped first.
        bag_traffic: counts the bytes of bags in TorchRec; None for rows that are not of bags.
    """

    def __init__(
        self,
        path: str,
        local: LocalRows,
        group: dist.ProcessGroup,
        dedup: bool,
        statistics: ExchangeStatistics,
        order: LaunchOrder | None = None,
        pooled: bool = False,
        nodes: Nodes | None = None,
        proxies: ProxyGroups | None = None,
    ) -> None:
        self.path, self.local, self.statistics = path, local, statistics
        self.row_updates = RowUpdates(local)
        common = (local.dim, local.layout.device, statistics, order)
        self.transport = Transport(group, *common, [] if nodes is None else nodes.others(group.rank()))
        self.transports = [self.transport]
        self.held = HeldGradients(self.row_updates.kept, local, self.transport)
        self._rank, self._device = self.transport.rank, self.transport.device
        self.bag_traffic = BagTraffic(local.layout, self._rank, local.dim) if pooled else None
        self._place = local.layout.places[self._rank]
        self._handshake = LookupHandshake(path, group, local.layout, dedup)
        self._no_rows = self._handshake.no_rows
        self._route: Route
        if nodes is None or proxies is None:
            self._route = DirectRoute(self.transport, local, self._no_rows)
        else:
            near = Transport(proxies.near, *common)
            between = Transport(proxies.far, *common, [node != proxies.far.rank() for node in range(nodes.count)])
            self._route = ProxyRoute(near, between, local, self._no_rows)
            self.transports += [near, between]
        self._batches, self._collisions = 0, Collisions(local, statistics)
        self._heads: list[Head] = []
        self._nothing = self.new_batch()
        self._nothing.updates = False  # nor brings it about that of the kept gradients
        self._nothing_given = self._route.nothing_given

    def new_batch(self) -> PipelinedBatch:
        """Return the state of a batch that nothing is known of."""
        self._batches += 1
        rows = self.transport.rows(0)
        return PipelinedBatch(self._batches, self._no_rows, self._route.no_incoming, rows, self._no_rows.inverse)

    # -- the jobs of a step

    def announce(
        self,
        following: PipelinedBatch,
        current: PipelinedBatch,
        previous: PipelinedBatch | None,
        looked_up: Sequence[KeyedJaggedTensor],
        predicted: bool,
        state: NextIds,
        upcoming: Sequence[KeyedJaggedTensor],
        mode: int,
    ) -> None:
        """A: tell the owners which rows the batch after ``current`` needs, and send gradients that nobody waits for.

        Args:
            following: the batch after ``current``.
            current: the batch that computes.
            previous: the batch whose last gradients have not been sent; None if there is none.
            looked_up: what the model has looked up in ``current`` so far.
            predicted: whether that was submitted ahead.
            state: of the ids of ``following``.
            upcoming: these ids, by lookup.
            mode: how this rank comes to know ids.
        """
        current.passing = None  # memory: all its rows have come
        lookup, request, wrong = LookedUp.PREDICTED, self._no_rows, None
        if not (predicted and current.submitted):
            lookup = LookedUp.OTHERS
            try:
                request = self._handshake.request(looked_up)
            except ValueError as error:
                lookup, wrong = LookedUp.WRONG, error.with_traceback(None)  # no circle through this frame
        sent = self._handshake.ids_to_send(state, upcoming, mode)
        self._heads, following.incoming = self._send_ids(sent, current, previous, lookup, request.sizes)
        following.request = sent.request
        self._handshake.raise_errors(self._heads, wrong)
        if any(head.lookup == LookedUp.OTHERS for head in self._heads):
            self._serve_anew(current, request)

    def prefetch(
        self,
        following: PipelinedBatch,
        current: PipelinedBatch,
        state: NextIds,
        upcoming: Sequence[KeyedJaggedTensor],
        mode: int,
        looks_up: bool,
    ) -> None:
        """B: learn which rows of ``following`` are updated before it, and fetch all others; done once.

        If ranks did not know its ids before, not while this one still looks up (``looks_up``): it is given again after that.
        """
        if following.heard:
            return
        if self._waits_for_ids():
            if looks_up and following.forward_first.acquire(blocking=False):
                return
            self._hear_later(following, current, self._handshake.ids_to_send(state, upcoming, mode))
        following.heard = True
        states = [head.state for head in self._heads]
        following.mode = max(head.mode for head in self._heads)
        following.ended_ranks = [rank for rank, each in enumerate(states) if each == NextIds.ENDED]
        following.any_submitted = NextIds.REQUESTED in states
        following.submitted = states[self._rank] == NextIds.REQUESTED
        following.all_submitted = set(states) == {NextIds.REQUESTED}
        if current.changes_all:
            current.compared = False
        elif following.any_submitted:
            self._route.give_others(following, current, *self._collisions.compare(following, current))
        if not following.any_submitted:
            following.request, following.incoming = self._no_rows, self._route.no_incoming
        if current.updates:
            self._collisions.begin_window(following.number)

    def fetch_more(self, current: PipelinedBatch, lookup: FurtherLookup | None = None) -> None:
        """Fetch the rows of a lookup of ``current`` that was not submitted; other ranks serve it in the message they are at.

        Without a lookup, serve those of others in the same way.
        """
        kind, request, wrong = self._ask_for([] if lookup is None else [lookup.features])
        # others may be sending gradients: their slots have to be there
        given = self._nothing_given if self._waits_for_ids() else self._given_in_time(current)
        given = replace(given, requested=self._nothing_given.requested)
        sent = IdsToSend(NextIds.TOLD, request)
        heads, incoming, _ = self._route.exchange_ids(sent, current, kind, given, self.transport.rows(0))
        self._handshake.raise_errors(heads, wrong)
        rows = self._serve_more(heads, incoming, request)
        if lookup is not None:
            lookup.rows, lookup.places = rows, request.inverse

    def exchange_colliding(
        self,
        current: PipelinedBatch,
        following: PipelinedBatch,
        gradient: Tensor | None,
        anew: Sequence[KeyedJaggedTensor] | None,
    ) -> None:
        """C and D: send what the next batch waits for of a gradient, and fetch its last rows.

        Args:
            current: the batch whose backward has run.
            following: the batch after it.
            gradient: of the rows of its lookups, shape ``[ids, dim]``; None is zero.
            anew: the lookups that it is of, if they are not those that the owners know of.
        """
        lookup, request = LookedUp.PREDICTED, self._no_rows
        if anew is not None:
            lookup = LookedUp.OTHERS
            request = current.request = self._handshake.request(anew)
        current.gradient = self._sum_per_row(current, gradient)
        given = self._given_in_time(current)
        if anew is not None:
            given = replace(given, requested=self._nothing_given.requested)
        sent = IdsToSend(NextIds.TOLD, request, moves=gradient is not None or current.whole_used, before=current.incoming)
        heads, incoming, gradients = self._until_served(sent, current, lookup, given, current.gradient)
        self.row_updates.count_step(current, any(head.moves for head in heads))
        self._route.count_gradients("colliding", given)
        changed = [head.lookup == LookedUp.OTHERS for head in heads]
        if any(changed):
            self._update_anew(current, following, incoming, changed)
        elif current.updates and (current.held or following.awaited is None):
            self.row_updates.take(current, given, gradients)
            current.gradient, current.patient = None, self._nothing_given
        elif current.updates:
            kept = self.row_updates.kept.rows
            due = self._collisions.asked_by(following.number, kept[0]) if kept else None
            self.row_updates.take(current, given, gradients, due)
            self._route.give_last(following)

    def apply_held(self, current: PipelinedBatch, following: PipelinedBatch) -> None:
        """Update rows by the gradients that are held, and D."""
        self.row_updates.apply_held(current)
        if not current.compared:
            self._send_all_rows(following)
        elif following.awaited is not None:
            self._route.give_last(following)

    # -- between steps

    def evaluate(self, lookup: EvaluationLookup) -> None:
        """Fetch the rows of a lookup outside of steps, and serve those of the other ranks. Collective."""
        with self.statistics.suspended():
            kind, request, wrong = self._ask_for([] if lookup.features is None else [lookup.features])
            sent = IdsToSend(NextIds.EVALUATING, request, evaluated=lookup.module)
            given, none = self._nothing_given, self.transport.rows(0)
            heads, incoming, _ = self._route.exchange_ids(sent, self._nothing, kind, given, none)
            lookup.modules = [head.evaluated for head in heads]
            try:
                self._handshake.raise_errors(heads, wrong)
            except ValueError as error:  # that of all ranks, which stay in step
                lookup.error = error.with_traceback(None)
                return
            asked = any(head.most_ids for head in heads)
            lookup.rows = self._serve_more(heads, incoming, request) if asked else none
            lookup.places = request.inverse

    def drain(self, previous: PipelinedBatch) -> None:
        """Send the gradients of a batch that nobody waits for, now. Collective."""
        self._handshake.raise_errors(self._send_ids(IdsToSend(NextIds.DRAINING, self._no_rows), previous, previous)[0])

    def restore_accumulated(self, rows: list[Tensor], gradients: list[Tensor], moved: bool) -> None:
        """Go on in a window whose gradients so far were saved; before the first batch."""
        self.row_updates.kept.rows, self.row_updates.kept.gradients, self.row_updates.moved = rows, gradients, moved
        for each in rows:
            self._collisions.mark(each, 1)  # they are updated when the window ends

    def discard_accumulated(self, current: PipelinedBatch, previous: PipelinedBatch | None) -> None:
        """Forget the gradients kept for an optimizer step that does not come; a window begins with ``current``."""
        self.row_updates.discard()
        self._collisions.begin_window(current.number)
        if previous is not None:
            previous.patient = self._nothing_given

    # -- messages with a head

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
        given = previous.patient or self._all_of(previous)
        gradients = self.transport.rows(0) if previous.gradient is None else previous.gradient
        heads, incoming, came = self._route.exchange_ids(sent, current, lookup, given, gradients, other_ids)
        self._route.count_gradients("non_colliding", given)
        previous.gradient = None
        self.row_updates.take(previous, given, came)
        return heads, incoming

    def _until_served(
        self, sent: IdsToSend, current: PipelinedBatch, lookup: LookedUp, given: SomeRows, gradients: Tensor
    ) -> tuple[list[Head], IncomingRows, Tensor]:
        """Exchange a message, again and again until no rank has had to ask for more rows of ``current`` instead."""
        while True:
            heads, incoming, came = self._route.exchange_ids(sent, current, lookup, given, gradients)
            self._handshake.raise_errors(heads)
            if all(head.lookup != LookedUp.MORE for head in heads):
                return heads, incoming, came
            self._serve_more(heads, incoming, self._no_rows)

    def _ask_for(self, lookups: Sequence[KeyedJaggedTensor]) -> tuple[LookedUp, RowRequest, Exception | None]:
        """Return how to ask for the rows of lookups that were not submitted, the request, and what is wrong with it."""
        try:
            return LookedUp.MORE, self._handshake.request(lookups), None
        except ValueError as error:
            return LookedUp.WRONG, self._no_rows, error.with_traceback(None)

    def _serve_more(self, heads: Sequence[Head], incoming: IncomingRows, request: RowRequest) -> Tensor:
        """Serve the ranks that have asked for more rows; return those of this rank's own request."""
        wanted = self._route.no_incoming.replaced(incoming, [head.lookup == LookedUp.MORE for head in heads])
        return self._route.give_rows(wanted, request)

    def _waits_for_ids(self) -> bool:
        """Whether the next message is the one with the ids of ranks that did not know them before."""
        return any(head.state == NextIds.LATER for head in self._heads)

    def _hear_later(self, following: PipelinedBatch, current: PipelinedBatch, sent: IdsToSend) -> None:
        """Hear the ids of the ranks that did not know them when they needed the rows of the current batch."""
        later = [head.state == NextIds.LATER for head in self._heads]
        if later[self._rank]:
            following.request = sent.request
        else:
            sent = IdsToSend(NextIds.TOLD, self._no_rows)
        none = self.transport.rows(0)
        sent = replace(sent, before=following.incoming)
        heads, incoming, _ = self._until_served(sent, current, LookedUp.PREDICTED, self._nothing_given, none)
        self._heads = [new if is_later else old for new, old, is_later in zip(heads, self._heads, later)]
        following.incoming = following.incoming.replaced(incoming, later)

    def _serve_anew(self, current: PipelinedBatch, request: RowRequest) -> None:
        """Serve the ranks whose model has looked up others than were submitted, before rows are compared with this batch."""
        asks = [head.lookup == LookedUp.OTHERS for head in self._heads]
        new, values = self._route.serve_anew(current, request, self._heads, asks)
        if asks[self._rank]:
            current.request, current.rows, current.places = request, values, request.inverse
        current.incoming = current.incoming.replaced(new, asks)
        self._collisions.mark(new.rows, current.number)

    # -- D

    def _send_all_rows(self, following: PipelinedBatch) -> None:
        """Exchange the values of all rows: nobody knows which of them have just been updated."""
        if following.any_submitted:
            following.rows = self._route.give_rows(following.incoming, following.request)
            following.places = following.request.inverse

    # -- gradients

    def _given_in_time(self, current: PipelinedBatch) -> SomeRows:
        """Return the rows whose gradients go with C: those that the next batch needs; all if nobody knows which, or clips."""
        if not current.updates:
            return self._nothing_given
        return self._all_of(current) if current.held or current.urgent is None else current.urgent

    def _update_anew(
        self, current: PipelinedBatch, following: PipelinedBatch, incoming: IncomingRows, changed: Sequence[bool]
    ) -> None:
        """Update rows of which some were not compared with those of ``following``: all of them, and fetch all of those."""
        current.incoming, current.compared = current.incoming.replaced(incoming, changed), False
        self._collisions.mark(current.incoming.rows, current.number)
        if not current.updates:
            return
        assert current.gradient is not None
        gradients = self._route.take_gradients(current.gradient, current.request, current.incoming)
        self.row_updates.take(current, self._all_of(current), gradients)
        current.gradient, current.patient = None, self._nothing_given
        if not current.held:
            self._send_all_rows(following)

    def _sum_per_row(self, current: PipelinedBatch, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return torch.zeros(sum(current.request.sizes), self.transport.dim, device=self._device)
        pooled = None if self.bag_traffic is None else self.bag_traffic.torchrec_bytes(current.request, current.pooled_rows)
        self.statistics.count_lookup(current.request, self._place, self.transport.dim, pooled)
        sums = current.request.sum_per_row(gradient)
        return sums.div_(self.transport.ranks) if get_gradient_division() else sums

    def _all_of(self, batch: PipelinedBatch) -> SomeRows:
        return self._route.all_of(batch.request, batch.incoming)
