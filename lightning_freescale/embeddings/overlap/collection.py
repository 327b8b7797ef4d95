"""Tables of a sharded collection whose exchange runs behind the model's compute: what the training thread does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.lookahead.probe import ModeProposal
from lightning_freescale.embeddings.optimizer import TableOptimizer, UpdateSettings
from lightning_freescale.embeddings.overlap import errors
from lightning_freescale.embeddings.overlap.batch_state import EvaluationLookup, FurtherLookup
from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.proxy_route import Nodes, ProxyGroups
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.step_jobs import StepJobs
from lightning_freescale.embeddings.overlap.transport import FAREWELL, ExchangeObserver, LaunchOrder


@dataclass(frozen=True)
class NotedLookup:
    """A lookup of the model, before its rows are waited for.

    Attributes:
        features: the ids.
        index: which of those submitted ahead it is; None if it is none of them.
        first: whether it is the first of its step.
        told: whether this rank had announced its lookups before it, because it waits or has waited elsewhere.
    """

    features: KeyedJaggedTensor
    index: int | None
    first: bool
    told: bool


class OverlappedCollection:
    """The rows of a collection in one step after the other, from its lookups to the gradients of what they have returned.

    Shards, kernels, fused updates and state dicts are TorchRec's; the exchange of ids and rows and the routing of gradients
    are ours. TorchRec's own pipeline for this is made for CUDA and fx-traceable models and gives other numbers; its exchange
    of ids needs feature-wise bucketing.

    Args:
        collection: what is sharded, all its tables of one width.
        local: this rank's rows.
        group: for this collection alone.
        optimizers: of its tables.
        dedup: request each row once per rank and batch.
        hold_gradients: keep the gradients of a step until :meth:`apply_gradients`, so that they can be clipped.
        order: in which it takes turns with other collections; None: it need not.
        nodes: which ranks share a node; None if nobody knows.
        proxies: groups of the way through the node's proxies, for this collection alone; None for the way to the owners.

    Attributes:
        group: process group of this collection alone.
        others: the module's other collections. Whoever waits in one of them for other ranks answers them in all, because one of
            them may wait in another collection for this rank.
        statistics: totals since it was made.
        jobs: of the current step; between steps, of the last.
    """

    def __init__(
        self,
        collection: Collection,
        local: LocalRows,
        group: dist.ProcessGroup,
        optimizers: Sequence[TableOptimizer],
        dedup: bool,
        hold_gradients: bool = False,
        order: LaunchOrder | None = None,
        nodes: Nodes | None = None,
        proxies: ProxyGroups | None = None,
    ) -> None:
        self.path, self.group = collection.path, group
        self._groups = [group] if proxies is None else [group, proxies.near, proxies.far]
        self.others: list[OverlappedCollection] = []
        self.statistics = ExchangeStatistics()
        # a thread and a group per collection: all that happens to its rows happens there
        hops = [] if proxies is None else [proxies.near, proxies.far]
        self._worker = ExchangeWorker(collection.path, local.layout.device, self.statistics, order, hops)
        exchanged = (self.statistics, order, collection.pooled, nodes, proxies)
        self._exchange = RowExchange(collection.path, local, group, dedup, *exchanged)
        self.jobs = StepJobs(self._exchange, self._worker)
        self._local = local
        self._optimizers = optimizers
        self._hold_gradients = hold_gradients
        self._settings: Sequence[UpdateSettings] = [UpdateSettings(0)] * len(collection.tables)
        self._step = 0
        self._write_counts: list[int] | None = None
        self._whole_used = False  # by a loss of an earlier step

    @property
    def layout(self) -> RowLayout:
        """Where its rows live."""
        return self._local.layout

    def observe(self, observer: ExchangeObserver) -> None:
        """Tell ``observer`` of every exchange, and when training waits for rows."""
        self._worker.observer = observer
        for transport in self._exchange.transports:
            transport.observer = observer

    # -- a step

    def begin_step(
        self, updates: bool, settings: Sequence[UpdateSettings], step: int, restart: bool, mode: ModeProposal
    ) -> int:
        """Begin the step of a batch, before its forward; see :meth:`OverlapEngine.begin_step`. Return the agreed mode."""
        before = self.jobs
        before.end()
        before.apply_gradients()
        self._settings, self._step = settings, step
        self._refuse_writes()
        self._refuse_uneven_end(step)
        moves, beside_others = self._moves_without_gradient(), bool(self.others)
        jobs = self.jobs = StepJobs(self._exchange, self._worker, before, mode, moves, beside_others)
        if restart and not before.current.updates:
            self._worker.submit(self._exchange.discard_accumulated, jobs.current, jobs.unsent)
        jobs.current.updates, jobs.current.settings = updates, settings
        jobs.current.held = updates and (self._hold_gradients or self._whole_used)
        jobs.current.changes_all = updates and self._whole_used
        return jobs.current.mode

    def change_settings(self, settings: Sequence[UpdateSettings]) -> None:
        """Update the rows of the current batch with other settings, before its backward has come to them."""
        self._settings = self.jobs.current.settings = settings

    def note(self, features: KeyedJaggedTensor) -> NotedLookup:
        """Note a lookup that the model makes, before anything is waited for."""
        jobs, batch = self.jobs, self.jobs.current
        if batch.gradient_sent:
            errors.late_lookup(self.path)
        index = jobs.lookups.note(features)
        predicted = jobs.lookups.made[-1].predicted
        kind = {None: "unpredicted_lookups", True: "predicted_lookups", False: "mispredicted_lookups"}[predicted]
        self.statistics.count(**{kind: 1})
        if self._exchange.bag_traffic is not None:
            batch.pooled_rows = batch.pooled_rows + self._exchange.bag_traffic.pooled_rows(features)
        first, batch.looked_up = not batch.looked_up, True
        return NotedLookup(features, index, first, told=jobs.announced is not None)

    def rows(self, lookup: NotedLookup) -> Tensor:
        """Return the rows of a lookup, shape ``[ids, dim]``, in the layout's order of features."""
        jobs, batch = self.jobs, self.jobs.current
        comes = lookup.index is not None or (lookup.first and not lookup.told)
        if lookup.first and (comes or jobs.announced_submitted):
            self._receive(alone=not batch.all_submitted or (lookup.index is None and not lookup.told))
        if not comes:
            jobs.announce()
            more = self._fetch_more(lookup.features)
            jobs.lookups.receive(more.rows, more.places, [more.places.numel()], asked_for=False)
        return jobs.lookups.give_out(lookup.index, lookup.features)

    def rows_again(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows of a lookup of the forward in backward, where activation checkpointing computes something again."""
        rows = self.jobs.lookups.made_before(features)
        if rows is None:
            errors.lookup_in_backward(self.path)
        return rows

    def rows_without_gradient(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows of a lookup under ``torch.no_grad()`` in a step, as they are before it; shape ``[ids, dim]``."""
        if self.jobs.current.gradient_sent:
            errors.late_lookup(self.path)
        self.jobs.announce_in_time()
        lookup = self._fetch_more(features)
        return lookup.rows.index_select(0, lookup.places)

    def submit_evaluation(self, lookup: EvaluationLookup) -> Future[Any]:
        """Have the rows of a lookup outside of steps fetched, or those of other ranks served. Drain first. Collective."""
        return self._worker.submit(self._exchange.evaluate, lookup)

    def wait_for_evaluation(self, job: Future[Any], lookup: EvaluationLookup) -> Tensor:
        """Return the rows of a lookup that was submitted, shape ``[ids, dim]``.

        Raises:
            ValueError: the ids of a rank are wrong; on every rank. The next lookup may be right.
        """
        self._worker.wait(job)
        if lookup.error is not None:
            raise lookup.error
        self._worker.hand_over(lookup.rows, lookup.places)
        return lookup.rows.index_select(0, lookup.places)

    # -- a loss over all rows of a table

    def begin_whole_use(self, table: int) -> None:
        """Bring all updates of the steps before into the tables, for a loss of this step over all rows of one. Collective.

        From this step on the owners hold all gradients until the loss's are there, so that a row has one update per step.
        """
        jobs, batch = self.jobs, self.jobs.current
        if batch.gradient_sent:
            errors.late_lookup(self.path)
        for each in (self, *self.others):
            each.jobs.announce_in_time()
        self._worker.await_rows(jobs.updated)
        if not self.is_frozen(table):
            self._whole_used = batch.whole_used = True
            batch.held, batch.compared = batch.updates, not batch.updates

    def add_gradient(self, table: int, gradient: Tensor) -> None:
        """Add a gradient of all rows of a table that this rank owns, shape ``[rows, dim]``, to those of the step."""
        first = self._local.first_row(table)
        rows = torch.arange(first, first + len(gradient), device=gradient.device)
        self._worker.submit(self._exchange.row_updates.kept.accumulate, rows, gradient)

    def is_frozen(self, table: int) -> bool:
        """Return whether the current step leaves a table as it is."""
        return self._settings[table].frozen

    def local_weight(self, table: int) -> Tensor:
        """Return this rank's rows of a table: a live view, shape ``[rows, dim]``.

        Raises:
            ValueError: they are in a cache of the GPU.
        """
        return self._local.weight(table)

    def local_rows(self, table: int, ids: Tensor) -> Tensor:
        """Return at which place among this rank's rows of a table each row is; no place of one for those of other ranks."""
        first = self.layout.starts[self.layout.places[self._local.rank]] + self._local.first_row(table)
        return self.layout.keys(table, ids) - first

    # -- between steps

    def drain(self) -> None:
        """Wait until every update of the steps before is in the tables. Collective between two steps."""
        if self.jobs.unsent is not None and not self.jobs.open:
            self._refuse_uneven_end(self._step + 1)  # a rank that has another batch is not here
        self.jobs.drain()

    def take_idle_steps(self) -> list[int]:
        """Return, by table, how many optimizer steps since the last call had no gradient on any rank. Drain first."""
        updates = self._exchange.row_updates
        counts, updates.idle_steps = updates.idle_steps, [0] * len(updates.idle_steps)
        return counts

    def accumulated_gradients(self) -> dict[str, Any]:
        """Return what :meth:`restore_accumulated` takes. Drain first."""
        updates = self._exchange.row_updates
        rows, gradients = ([each.cpu() for each in kept] for kept in (updates.kept.rows, updates.kept.gradients))
        return {"rows": rows, "gradients": gradients, "moved": updates.moved, **self._sharding()}

    def restore_accumulated(self, kept: Mapping[str, Any]) -> None:
        """Go on in a window, before the first step."""
        now = self._sharding()
        # files from before rows could be hashed have them in blocks
        orders = kept.get("row_orders", [(1, 0)] * len(now["row_orders"]))
        if not torch.equal(kept["first_rows"], now["first_rows"]) or orders != now["row_orders"]:
            errors.other_sharding(self.path)
        device = self._local.layout.device
        rows, gradients = ([each.to(device) for each in kept[name]] for name in ("rows", "gradients"))
        self._worker.wait(self._worker.submit(self._exchange.restore_accumulated, rows, gradients, kept["moved"]))
        self.jobs.current.updates = False  # so that a window which begins now is one without them

    def _sharding(self) -> dict[str, Any]:
        """Return what the numbers of rows depend on."""
        layout = self._local.layout
        return {"first_rows": layout.first_row, "row_orders": [(order.multiplier, order.offset) for order in layout.orders]}

    @property
    def error(self) -> Exception | None:
        """What has gone wrong in the background, on this rank or another."""
        return self._worker.error

    def discard_prefetched(self) -> None:
        """Throw away rows fetched ahead, because the tables have been written. Call it on every rank, after a drain."""
        self.jobs.following, self._write_counts = self._exchange.new_batch(), None

    def close(self, farewell: bool) -> None:
        """End its exchanges; without waiting for ranks that may be gone.

        After a drain, ranks say farewell if asked to: one that closed its connections at once could cut off another that still
        reads.
        """
        if farewell and self.error is None and self.jobs.unsent is None and not self.jobs.open:
            self._worker.submit(self._exchange.transport.say_farewell)
        stopped = self._worker.stop(timeout=1.0 + FAREWELL.total_seconds())
        for group in self._groups:
            if stopped:
                dist.destroy_process_group(group)
            else:  # its exchange waits for a rank that may be gone
                group.abort()

    # -- a lookup

    def _receive(self, alone: bool) -> None:
        """Wait for the rows submitted ahead, or, if the first lookup is none of those, for its own.

        If these are others, or some rank had submitted none, rows come with this announcement, and an error of one rank has to
        be an error of all (``alone``); else it can wait for the next ids.
        """
        jobs, batch = self.jobs, self.jobs.current
        if jobs.next_is_known:
            jobs.prefetch()
        announced = jobs.announce() if alone else None
        if announced is not None:
            for other in self.others:
                other.jobs.announce_in_time()
        self._worker.await_rows(batch.ready, announced)
        self._worker.hand_over(batch.rows, batch.places)
        jobs.lookups.receive(batch.rows, batch.places, batch.request.of_lookup, asked_for=True)
        batch.rows = batch.rows.new_empty(0)  # memory: the next batch's rows come while this one computes

    def _fetch_more(self, features: KeyedJaggedTensor) -> FurtherLookup:
        """Fetch the rows of a lookup that was not submitted, when all other ranks have come as far as to serve it."""
        lookup = FurtherLookup(features)
        job = self.jobs.fetch_more(lookup)
        for other in self.others:
            other.jobs.serve_in_time()
        self._worker.await_rows(job)
        self._worker.hand_over(lookup.rows, lookup.places)
        return lookup

    def _moves_without_gradient(self) -> bool:
        return any(optimizer.moves_without_gradient for optimizer in self._trained())

    def _trained(self) -> list[TableOptimizer]:
        """Return the optimizers of the tables that are not frozen in this step."""
        return [optimizer for optimizer, given in zip(self._optimizers, self._settings) if not given.frozen]

    # -- what cannot be exact

    def _refuse_uneven_end(self, step: int) -> None:
        jobs = self.jobs
        if jobs.prefetched is not None:  # done long ago, unless compute is shorter than the exchange
            with self.statistics.timed("exposed_s"):
                self._worker.wait(jobs.prefetched)
        if jobs.following.ended_ranks and jobs.following.any_submitted:
            errors.uneven_ends(jobs.following.ended_ranks, step)

    def _refuse_writes(self) -> None:
        # noticed, not followed: what was fetched ahead sits on other ranks
        counts = self._local.write_counts()
        if self._write_counts is not None and counts != self._write_counts:
            errors.unannounced_write(self.path)
        self._write_counts = counts
