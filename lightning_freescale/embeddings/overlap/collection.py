"""The tables of a sharded collection that are exchanged together, for use by the training thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.comm.shared_lane import discard_group
from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.id_prediction import GivesUp
from lightning_freescale.embeddings.optimizer import TableOptimizer, UpdateSettings
from lightning_freescale.embeddings.overlap.batch_state import Lookup, StepUpdate
from lightning_freescale.embeddings.overlap.exchange import ExchangeStep
from lightning_freescale.embeddings.overlap.hot_route import HotRouting
from lightning_freescale.embeddings.overlap.hot_rows import Nodes
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.routes import DirectRoute
from lightning_freescale.embeddings.overlap.row_exchange import Route, RowExchange
from lightning_freescale.embeddings.overlap.row_requests import RowRequest
from lightning_freescale.embeddings.overlap.transport import (
    FAREWELL,
    ExchangeWorker,
    LaunchOrder,
    RowTransport,
)


class OverlappedCollection:
    """The exchange of the rows of a collection's tables of one width, during steps and between them.

    Attributes:
        hot_list: the list of hot rows; None if no row can be hot.
        others: the other collections of the module. A rank that waits in one of them for other ranks answers them in all,
            because they may wait for this rank in another collection.
        step: the current step; between steps, the last one.
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
        hot: HotRouting | None = None,
        near: dist.ProcessGroup | None = None,
    ) -> None:
        self.table_keys = [table.key for table in collection.tables]
        self.path, self.local, self._optimizers, self._hold_gradients = collection.path, local, optimizers, hold_gradients
        self.others: list[OverlappedCollection] = []
        self.statistics = ExchangeStatistics()
        self._decode = local.wire.rows.decode
        shared = (local.wire, local.layout.device, self.statistics, order)
        self.transport = RowTransport(group, *shared, [] if nodes is None else nodes.others(group.rank()))
        self._groups, self._transports = [group], [self.transport]
        no_rows = RowRequest.empty(local.layout, dedup)
        route: Route = DirectRoute(self.transport, local, no_rows)
        if hot is not None and near is not None:
            self._groups.append(near)
            self._transports.append(RowTransport(near, *shared, near=True))
            route = hot.route(self._transports[1], self.transport, local, no_rows)
        self.hot_list = route.hot_list
        # one thread and one process group per collection: they do everything that affects its rows
        self._worker = ExchangeWorker(collection.path, local.layout.device, self.statistics, order, self._groups[1:])
        exchange = RowExchange(collection.path, local, group, dedup, route, self.statistics, collection.pooled)
        self._exchange, self.step = exchange, ExchangeStep(exchange, self._worker)
        self._settings: Sequence[UpdateSettings] = [UpdateSettings(0)] * len(self.table_keys)
        self._step_number = 0
        self._write_counts: list[int] | None = None
        self._whole_used = False  # whether a loss of an earlier step was over all rows

    def hot_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the ids in the current list and their accesses, most first, by table, see :meth:`.OverlapEngine.hot_rows`."""
        found = {}
        for index, table in enumerate(self.local.layout.tables if self.hot_list is not None else ()):
            if table.first_column == 0 and self.hot_list is not None:  # all parts of a table have the same accesses
                keys, counts = self.hot_list.rows
                inside, ids = self.local.layout.ids(index, keys)
                counts, order = counts[inside].sort(descending=True, stable=True)
                found[table.key.removesuffix(".weight")] = ids[order], counts
        return found

    def observe(self, timeline: Any) -> None:
        self._worker.observer = timeline
        for transport in self._transports:
            transport.observer = timeline

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
        self._settings = self.step.current.update.settings = settings

    def note(self, features: KeyedJaggedTensor) -> Lookup:
        self._refuse_late_lookup()
        step = self.step
        lookup = step.lookups.note(features, announced=step.announced is not None)
        kind = {None: "unpredicted_lookups", True: "predicted_lookups", False: "mispredicted_lookups"}[lookup.predicted]
        self.statistics.count(**{kind: 1})
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
        """Return the rows of a lookup of the forward during backward, where activation checkpointing recomputes a module."""
        rows = self.step.lookups.made_before(features)
        if rows is None:
            raise ValueError(
                f"Embedding collection {self.path!r}: a lookup during backward has ids that the forward did not look up. Pass "
                "use_reentrant=False for activation checkpointing, and do not change ids between forward and backward."
            )
        return rows

    def rows_without_gradient(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows of a lookup under ``torch.no_grad()`` in a step, as before its update; shape ``[ids, dim]``."""
        self._refuse_late_lookup()
        self.step.announce_in_time()
        rows, places = self._fetch_more(features)
        return rows.index_select(0, places)

    def _receive(self, alone: bool) -> None:
        """Wait for the rows submitted ahead or, if the first lookup differs from them, for its own rows.

        If the first lookup differs, or any rank submitted nothing, the rows follow this announcement and an error of one rank
        has to be raised on all ranks (``alone``). Otherwise the announcement can wait for the next ids.
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
        step.lookups.receive(self._decode(rows.values), rows.places, batch.requested.request.of_lookup, asked_for=True)
        rows.values = rows.values.new_empty(0)  # memory: the next batch's rows arrive while this one computes

    def _fetch_more(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Fetch the rows of a lookup that was not submitted, once all other ranks can serve it."""
        job = self.step.fetch_more([features])
        for other in self.others:
            other.step.serve_in_time()
        rows, places = self._worker.await_rows(job)
        self._worker.hand_over(rows, places)
        return self._decode(rows), places

    # -- clipping, between backward and the optimizer step

    def submit_clipping(self, job: Callable[..., Any], *args: Any) -> Future[Any] | None:
        """Submit a method of :class:`RowUpdates` for the held gradients; None if the step holds none."""
        held = self.step.held
        return None if held is None else self._worker.submit(job, self._exchange.row_updates, *args, held.update.settings)

    def square_sum(self, job: Future[Any]) -> Tensor:
        """Return the result of :meth:`RowUpdates.sum_squares`."""
        square_sum: Tensor = self._worker.await_rows(job)
        self._worker.hand_over(square_sum)
        return square_sum

    # -- a loss over all rows of a table

    def begin_whole_use(self, table: int) -> None:
        """Apply all updates of earlier steps, for a loss of this step over all rows of a table. Collective.

        From this step on the owners hold all gradients until those of the loss are complete, so a row has one update per step.
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
        """Add a gradient of all rows of a table that this rank owns, shape ``[rows, dim]``, to the gradients of the step."""
        first = self.local.first_row(table)
        rows = torch.arange(first, first + len(gradient), device=gradient.device)
        self._worker.submit(self._exchange.row_updates.keep, rows, gradient)

    def is_frozen(self, table: int) -> bool:
        return self._settings[table].frozen

    # -- between steps

    def submit_evaluation(self, module: int, features: KeyedJaggedTensor | None) -> Future[Any]:
        """Submit a lookup outside of steps, after :meth:`drain`. Collective. See :meth:`RowExchange.evaluate`."""
        return self._worker.submit(self._exchange.evaluate, module, features)

    def evaluated(self, job: Future[Any]) -> tuple[list[int], Tensor]:
        """Return the numbers of the modules that the ranks look up, and the rows of this rank's lookup, shape ``[ids, dim]``.

        An error in the ids of any rank is raised on every rank. Later lookups are possible.
        """
        modules, rows, places, error = self._worker.wait(job)
        if error is not None:
            raise error
        self._worker.hand_over(rows, places)
        return modules, self._decode(rows).index_select(0, places)

    def drain(self) -> None:
        """Wait until every update of earlier steps is in the tables. Collective between two steps."""
        if self.step.unsent is not None and not self.step.open:
            self._refuse_uneven_end(self._step_number + 1)  # a rank with another batch does not get here
        self.step.drain()

    def take_idle_steps(self) -> list[int]:
        updates = self._exchange.row_updates
        counts, updates.idle_steps = updates.idle_steps, [0] * len(updates.idle_steps)
        return counts

    def accumulated_gradients(self) -> dict[str, Any]:
        updates = self._exchange.row_updates
        rows, gradients = ([each.cpu() for each in kept] for kept in (updates.kept_rows, updates.kept_gradients))
        return {"rows": rows, "gradients": gradients, "moved": updates.moved, **self._sharding()}

    def restore_accumulated(self, kept: Mapping[str, Any]) -> None:
        now = self._sharding()
        if not torch.equal(kept["first_rows"], now["first_rows"]) or kept["row_orders"] != now["row_orders"]:
            raise ValueError(
                f"The checkpoint was written between two optimizer steps, with another sharding of embedding collection "
                f"{self.path!r}. Resume with the same plan=, or from a checkpoint that was written after an optimizer step."
            )
        device = self.local.layout.device
        rows, gradients = ([each.to(device) for each in kept[name]] for name in ("rows", "gradients"))
        self._worker.wait(self._worker.submit(self._exchange.restore_accumulated, rows, gradients, kept["moved"]))
        self.step.current.update.updates = False  # so that a restart discards them

    def _sharding(self) -> dict[str, Any]:
        layout = self.local.layout
        return {"first_rows": layout.first_row, "row_orders": [(order.multiplier, order.offset) for order in layout.orders]}

    @property
    def error(self) -> Exception | None:
        return self._worker.error

    def discard_prefetched(self) -> None:
        """Discard prefetched rows because the tables have been written. Call it on every rank, after :meth:`drain`."""
        self.step.forget_next()
        self._write_counts = None

    def close(self, farewell: bool) -> None:
        """End the exchanges without a wait for ranks that may have failed.

        After a drain, ranks optionally say farewell: a rank that closes its connections early could cut off another that still
        reads.
        """
        if farewell and self.error is None and self.step.unsent is None and not self.step.open:
            self._worker.submit(self.transport.say_farewell)
        stopped = self._worker.stop(timeout=1.0 + FAREWELL.total_seconds())
        for group in self._groups:
            if stopped:
                dist.destroy_process_group(group)
            else:  # its exchange waits for a rank that may have failed
                discard_group(group)

    # -- refusals

    def _refuse_late_lookup(self) -> None:
        if self.step.gradient_sent:
            raise ValueError(
                f"Embedding collection {self.path!r}: a lookup came after backward had reached the other lookups of its step, "
                "or after a training_step without lookups. Make all lookups in training_step, before backward."
            )

    def _refuse_uneven_end(self, number: int) -> None:
        prefetched, following = self.step.prefetched, self.step.following
        if prefetched is not None:  # usually done, unless compute is shorter than the exchange
            with self.statistics.timed("exposed_s"):
                self._worker.wait(prefetched)
        ended = following.announced.ended_ranks
        if ended and following.announced.any_submitted:
            raise RuntimeError(
                f"Ranks {ended} have no batch after step {number}, and other ranks have one. Use the same number of batches on "
                "every rank."
            )

    def _refuse_writes(self) -> None:
        # a write is detected but not followed: other ranks hold the prefetched rows
        counts = self.local.write_counts()
        if self._write_counts is not None and counts != self._write_counts:
            raise RuntimeError(
                f"The tables of embedding collection {self.path!r} were written while updates were pending or rows were "
                "fetched ahead. Write them inside `with trainer.strategy.writing_tables():` on every rank. In a loop of your "
                "own, use `with engine.writing():`."
            )
        self._write_counts = counts
