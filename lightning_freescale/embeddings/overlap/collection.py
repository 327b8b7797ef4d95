"""The tables of a sharded collection that are exchanged together, as the training thread uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.id_prediction import GivesUp
from lightning_freescale.embeddings.optimizer import TableOptimizer, UpdateSettings
from lightning_freescale.embeddings.overlap.batch_state import Lookup, StepUpdate
from lightning_freescale.embeddings.overlap.exchange import ExchangeStep
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.lookup_handshake import Route
from lightning_freescale.embeddings.overlap.proxy_route import Nodes, ProxyGroups, ProxyRoute
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.routes import DirectRoute
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import RowRequest
from lightning_freescale.embeddings.overlap.transport import FAREWELL, ExchangeObserver, ExchangeWorker, LaunchOrder, Transport


class OverlappedCollection:
    """The rows of a collection in every step, from its lookups to the gradients of the rows, and between steps.

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
        order: in which it takes turns with other collections; None if it need not.
        nodes: which ranks share a node; None if that is unknown.
        proxies: groups of this collection alone for the two-level exchange; None for the direct route.

    Attributes:
        others: the module's other collections. A rank that waits in one of them for other ranks answers them in all, because
            one of them may wait in another collection for this rank.
        local: this rank's rows.
        statistics: totals since it was made.
        step: the current step; between steps, the last.
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
        self.path, self.local, self._optimizers, self._hold_gradients = collection.path, local, optimizers, hold_gradients
        self.others: list[OverlappedCollection] = []
        self.statistics = ExchangeStatistics()
        shared = (local.dim, local.layout.device, self.statistics, order)
        self._transport = Transport(group, *shared, [] if nodes is None else nodes.others(group.rank()))
        self._groups, self._transports = [group], [self._transport]
        route: Route = DirectRoute(self._transport, local, RowRequest.empty(local.layout, dedup))
        if nodes is not None and proxies is not None:
            between = [node != proxies.far.rank() for node in range(nodes.count)]
            hops = Transport(proxies.near, *shared), Transport(proxies.far, *shared, between)
            self._groups, self._transports = [group, proxies.near, proxies.far], [self._transport, *hops]
            route = ProxyRoute(*hops, local, route.no_rows)
        # a thread and a group per collection: all that happens to its rows happens there
        self._worker = ExchangeWorker(collection.path, local.layout.device, self.statistics, order, self._groups[1:])
        exchange = RowExchange(collection.path, local, group, dedup, route, self.statistics, collection.pooled)
        self._exchange, self.step = exchange, ExchangeStep(exchange, self._worker)
        self._settings: Sequence[UpdateSettings] = [UpdateSettings(0)] * len(collection.tables)
        self._step_number = 0
        self._write_counts: list[int] | None = None
        self._whole_used = False  # by a loss of an earlier step

    @property
    def layout(self) -> RowLayout:
        """Where its rows live."""
        return self.local.layout

    def observe(self, observer: ExchangeObserver) -> None:
        """Tell ``observer`` of every exchange, and when training waits for rows."""
        self._worker.observer = observer
        for transport in self._transports:
            transport.observer = observer

    # -- a step

    def begin_step(
        self, updates: bool, settings: Sequence[UpdateSettings], step: int, restart: bool, gives_up: GivesUp
    ) -> bool:
        """Begin the step of a batch before its forward. Return whether any rank gave up the prediction of ids."""
        before = self.step
        before.end()
        before.apply_gradients()
        self._settings, self._step_number = settings, step
        self._refuse_writes()
        self._refuse_uneven_end(step)
        trained = [optimizer for optimizer, given in zip(self._optimizers, settings) if not given.frozen]
        moves = any(optimizer.moves_without_gradient for optimizer in trained)
        now = self.step = ExchangeStep(self._exchange, self._worker, before, gives_up, moves, bool(self.others))
        if restart and not before.current.update.updates:
            self._worker.submit(self._exchange.discard_accumulated, now.current, now.unsent)
        changes_all = updates and self._whole_used
        held = changes_all or (updates and self._hold_gradients)
        now.current.update = StepUpdate(settings, updates, held, changes_all)
        return now.current.announced.given_up

    def change_settings(self, settings: Sequence[UpdateSettings]) -> None:
        """Update the rows of the current batch with other settings, before its backward has reached them."""
        self._settings = self.step.current.update.settings = settings

    def note(self, features: KeyedJaggedTensor) -> Lookup:
        """Note a lookup that the model makes, before anything is waited for."""
        self._refuse_late_lookup()
        step = self.step
        lookup = step.lookups.note(features, announced=step.announced is not None)
        kind = {None: "unpredicted_lookups", True: "predicted_lookups", False: "mispredicted_lookups"}[lookup.predicted]
        self.statistics.count(**{kind: 1})
        if self._exchange.bag_traffic is not None:
            step.pooled_rows = step.pooled_rows + self._exchange.bag_traffic.pooled_rows(features)
        return lookup

    def rows(self, lookup: Lookup) -> Tensor:
        """Return the rows of a lookup, shape ``[ids, dim]``, in the layout's order of features."""
        step = self.step
        comes = lookup.index is not None or (lookup.first and not lookup.announced)
        if lookup.first and (comes or step.announced_submitted):
            all_submitted = step.current.announced.all_submitted
            self._receive(alone=not all_submitted or (lookup.index is None and not lookup.announced))
        if not comes:
            step.announce()
            rows, places = self._fetch_more(lookup.features)
            step.lookups.receive(rows, places, [places.numel()], asked_for=False)
        return step.lookups.give_out(lookup)

    def rows_again(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows of a lookup of the forward in backward, where activation checkpointing computes something again."""
        rows = self.step.lookups.made_before(features)
        if rows is None:
            raise ValueError(
                f"embedding collection {self.path!r} is looked up during backward, which the forward had not done with these "
                "ids: for activation checkpointing pass use_reentrant=False, and change no ids meanwhile"
            )
        return rows

    def rows_without_gradient(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows of a lookup under ``torch.no_grad()`` in a step, as they are before it; shape ``[ids, dim]``."""
        self._refuse_late_lookup()
        self.step.announce_in_time()
        rows, places = self._fetch_more(features)
        return rows.index_select(0, places)

    def _receive(self, alone: bool) -> None:
        """Wait for the rows submitted ahead, or, if the first lookup is none of those, for its own.

        If these are others, or some rank had submitted none, rows come with this announcement, and an error of one rank has to
        be an error of all (``alone``); else it can wait for the next ids.
        """
        step, batch = self.step, self.step.current
        if step.next_is_known:
            step.prefetch()
        announced = step.announce() if alone else None
        if announced is not None:
            for other in self.others:
                other.step.announce_in_time()
        self._worker.await_rows(step.ready, announced)
        rows = batch.rows
        self._worker.hand_over(rows.values, rows.places)
        step.lookups.receive(rows.values, rows.places, batch.requested.request.of_lookup, asked_for=True)
        rows.values = rows.values.new_empty(0)  # memory: the next batch's rows come while this one computes

    def _fetch_more(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Fetch the rows of a lookup that was not submitted, when all other ranks have come as far as to serve it."""
        job = self.step.fetch_more([features])
        for other in self.others:
            other.step.serve_in_time()
        rows, places = self._worker.await_rows(job)
        self._worker.hand_over(rows, places)
        return rows, places

    # -- clipping, between backward and the optimizer step

    def submit_square_sum(self) -> Future[Any] | None:
        """Submit the sum of the squares of the step's whole gradient; None if it is not held. Collective."""
        if self.step.held is None:
            return None
        settings = self.step.held.update.settings
        return self._worker.submit(self._exchange.row_updates.sum_squares, self._transport, settings)

    def square_sum(self, job: Future[Any]) -> Tensor:
        """Wait for the sum, and return it: float64, without dimensions, the same on all ranks."""
        square_sum: Tensor = self._worker.await_rows(job)
        self._worker.hand_over(square_sum)
        return square_sum

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients that are held."""
        if self.step.held is not None:
            self._worker.submit(self._exchange.row_updates.scale, factor, self.step.held.update.settings)

    def clamp_gradients(self, limit: float) -> None:
        """Limit every element of the gradients that are held."""
        if self.step.held is not None:
            self._worker.submit(self._exchange.row_updates.clamp, limit, self.step.held.update.settings)

    # -- a loss over all rows of a table

    def begin_whole_use(self, table: int) -> None:
        """Bring all updates of the steps before into the tables, for a loss of this step over all rows of one. Collective.

        From this step on the owners hold all gradients until the loss's are there, so that a row has one update per step.
        """
        self._refuse_late_lookup()
        for each in (self, *self.others):
            each.step.announce_in_time()
        self._worker.await_rows(self.step.updated)
        if not self.is_frozen(table):
            update = self.step.current.update
            self._whole_used = update.whole_used = True
            update.held, update.compared = update.updates, not update.updates

    def add_gradient(self, table: int, gradient: Tensor) -> None:
        """Add a gradient of all rows of a table that this rank owns, shape ``[rows, dim]``, to those of the step."""
        first = self.local.first_row(table)
        rows = torch.arange(first, first + len(gradient), device=gradient.device)
        self._worker.submit(self._exchange.row_updates.kept.accumulate, rows, gradient)

    def is_frozen(self, table: int) -> bool:
        """Return whether the current step leaves a table as it is."""
        return self._settings[table].frozen

    # -- between steps

    def submit_evaluation(self, module: int, features: KeyedJaggedTensor | None) -> Future[Any]:
        """Submit a lookup outside of steps, see :meth:`LookupHandshake.evaluate`. Drain first. Collective."""
        return self._worker.submit(self._exchange.evaluate, module, features)

    def evaluated(self, job: Future[Any]) -> tuple[list[int], Tensor]:
        """Return the numbers of the modules that the ranks look up, and the rows of this rank's lookup, shape ``[ids, dim]``.

        Raises:
            ValueError: the ids of a rank are wrong; on every rank. The next lookup may be right.
        """
        modules, rows, places, error = self._worker.wait(job)
        if error is not None:
            raise error
        self._worker.hand_over(rows, places)
        return modules, rows.index_select(0, places)

    def drain(self) -> None:
        """Wait until every update of the steps before is in the tables. Collective between two steps."""
        if self.step.unsent is not None and not self.step.open:
            self._refuse_uneven_end(self._step_number + 1)  # a rank that has another batch is not here
        self.step.drain()

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
            raise ValueError(
                f"the checkpoint was written between two optimizer steps, and embedding collection {self.path!r} is sharded "
                "otherwise than it was then: resume with the same plan=, or from a checkpoint that was written after an "
                "optimizer step"
            )
        device = self.local.layout.device
        rows, gradients = ([each.to(device) for each in kept[name]] for name in ("rows", "gradients"))
        self._worker.wait(self._worker.submit(self._exchange.restore_accumulated, rows, gradients, kept["moved"]))
        self.step.current.update.updates = False  # so that a window which begins now is one without them

    def _sharding(self) -> dict[str, Any]:
        """Return what the numbers of rows depend on."""
        layout = self.local.layout
        return {"first_rows": layout.first_row, "row_orders": [(order.multiplier, order.offset) for order in layout.orders]}

    @property
    def error(self) -> Exception | None:
        """What has gone wrong in the background, on this rank or another."""
        return self._worker.error

    def discard_prefetched(self) -> None:
        """Throw away rows fetched ahead, because the tables have been written. Call it on every rank, after a drain."""
        self.step.forget_next()
        self._write_counts = None

    def close(self, farewell: bool) -> None:
        """End its exchanges; without waiting for ranks that may be gone.

        After a drain, ranks say farewell if asked to: one that closed its connections at once could cut off another that still
        reads.
        """
        if farewell and self.error is None and self.step.unsent is None and not self.step.open:
            self._worker.submit(self._transport.say_farewell)
        stopped = self._worker.stop(timeout=1.0 + FAREWELL.total_seconds())
        for group in self._groups:
            if stopped:
                dist.destroy_process_group(group)
            else:  # its exchange waits for a rank that may be gone
                group.abort()

    # -- what cannot be exact

    def _refuse_late_lookup(self) -> None:
        if self.step.gradient_sent:
            raise ValueError(
                f"embedding collection {self.path!r} is looked up after the backward of its step has reached its other "
                "lookups, or after a training_step without any: look everything up in training_step, before backward"
            )

    def _refuse_uneven_end(self, number: int) -> None:
        prefetched, following = self.step.prefetched, self.step.following
        if prefetched is not None:  # done long ago, unless compute is shorter than the exchange
            with self.statistics.timed("exposed_s"):
                self._worker.wait(prefetched)
        ended = following.announced.ended_ranks
        if ended and following.announced.any_submitted:
            raise RuntimeError(
                f"ranks {ended} have no batch after step {number}, others have: give every rank the same number of batches"
            )

    def _refuse_writes(self) -> None:
        # noticed, not followed: what was fetched ahead sits on other ranks
        counts = self.local.write_counts()
        if self._write_counts is not None and counts != self._write_counts:
            raise RuntimeError(
                f"the tables of embedding collection {self.path!r} were written while updates were still under way or rows "
                "fetched ahead: write them inside `with trainer.strategy.writing_tables():`, or `with engine.writing():` in a "
                "loop of your own, on every rank"
            )
        self._write_counts = counts
