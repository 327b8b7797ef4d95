"""The overlap engine: the exchange of all collections of a module, step by step, for any training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.id_prediction import GivesUp
from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap.batch_state import Lookup
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection
from lightning_freescale.embeddings.overlap.hot_route import HotRouting
from lightning_freescale.embeddings.overlap.hot_rows import HotRowsOption, Nodes
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.module_forward import Evaluation, ModuleForward, without_weights
from lightning_freescale.embeddings.overlap.report import COUNTS, Heat
from lightning_freescale.embeddings.overlap.row_codec import Wire, wire_types
from lightning_freescale.embeddings.overlap.row_layout import RowLayout, parts_by_width
from lightning_freescale.embeddings.overlap.row_updates import RowUpdates
from lightning_freescale.embeddings.overlap.transport import LaunchOrder, new_group, refuse_one_queue
from lightning_freescale.embeddings.shards import ShardedTables

Ids: TypeAlias = "KeyedJaggedTensor | Sequence[KeyedJaggedTensor]"
"""The ids of one lookup, or a sequence with the ids of each lookup."""


class OverlapEngine:
    """Fetches the rows of the next batch while the current batch computes, with the results of plain TorchRec.

    Construction is collective. One step is::

        engine.begin_step({"path.of.collection": ids_of_the_next_batch})
        loss = model(batch)
        loss.backward()
        engine.end_backward()

    Args:
        tables: the sharded tables. The engine replaces the forward of their collections until :meth:`close`.
        dedup: send every row once per rank and batch, and the sum of its gradients. Results then differ from those of plain
            TorchRec by the order of summation; without ``dedup`` they are bitwise equal.
        timeout: the timeout of every exchange.
        transport: the transport of rows and ids, see :class:`lightning_freescale.comm.ProcessGroupFreeScaleOptions`.
        clip_value: the limit of every element of a row's gradient, summed over ranks and batches; None for no limit.
        hold_gradients: update no row before :meth:`apply_gradients`, so that gradients can be clipped by their norm. This costs
            overlap, because no gradient is sent during the next forward. Tables outside all parameter groups are not clipped.
        hot_rows: see :class:`lightning_freescale.FreeScaleStrategy`. Other values than ``"auto"`` and 0 require
            ``ranks_per_node`` and ``dedup``.
        rerank_every_n_steps: see :class:`lightning_freescale.FreeScaleStrategy`.
        ranks_per_node: the number of ranks of every node, with ranks numbered node by node. The report then counts the bytes
            that cross between nodes.
        wire: see :class:`lightning_freescale.FreeScaleStrategy`.

    Raises:
        ValueError: ``wire`` is unknown, or ``hot_rows``, ``ranks_per_node``, ``dedup`` and the number of ranks do not fit
            together.
    """

    def __init__(
        self,
        tables: ShardedTables,
        dedup: bool = True,
        timeout: timedelta | None = None,
        transport: str = "auto",
        clip_value: float | None = None,
        hold_gradients: bool = False,
        hot_rows: HotRowsOption = "auto",
        rerank_every_n_steps: int = 200,
        ranks_per_node: int | None = None,
        wire: Wire = "float32",
    ) -> None:
        wire_types(wire)
        self._wire = wire
        self.tables, self._steps = tables, 0
        self._nodes = None if ranks_per_node is None else Nodes(tables.group.size(), ranks_per_node)
        self.hot_routing = HotRouting.of(hot_rows, rerank_every_n_steps, self._nodes, dedup)  # None if no row can be hot
        self.clip_value, self._hold_gradients = clip_value, hold_gradients
        self._dedup, self._timeout, self._transport = dedup, timeout, transport
        # the groups of tables of one width and type, by the path of their collection, or by "path (dim 8)" or "path (dim 8,
        # FP16)" if it has several. A table that is split by columns is one table per part
        self.collections: dict[str, OverlappedCollection] = {}
        self.modules: dict[str, ModuleForward] = {}  # the overlapped collections, by path
        self.plain: dict[str, str] = {}  # the reasons why TorchRec exchanges the other collections, by path
        self._in_window, self._steps_counted = False, 0
        self._totals_of_closed: list[dict[str, float]] = []
        layouts = [(collection, module, self._layouts(collection, module)) for collection, module in tables.modules]
        several = sum(len(parts) for *_, parts in layouts) > 1
        order = LaunchOrder(timeout or default_pg_timeout) if several else None
        self._evaluation = Evaluation(self.modules)
        for collection, module, found in layouts:
            parts = [self._overlapped(part, module, layout, order) for part, layout in found]
            if parts:
                self.modules[collection.path] = ModuleForward(collection, module, parts, self._evaluation, tables)
        for path, overlapped in self.collections.items():
            overlapped.others = [other for name, other in self.collections.items() if name != path]

    def _overlapped(
        self, collection: Collection, module: Any, layout: RowLayout, order: LaunchOrder | None
    ) -> OverlappedCollection:
        local = LocalRows.from_module(layout, collection, module, self.tables, self.clip_value, self._wire)
        made = (collection.path, self._transport, self._timeout)
        group, near = new_group(*made), None
        group.connect()  # now instead of in a step
        if self.hot_routing is not None:
            near = self.hot_routing.near_group(*made, group, take_turns=order is not None)
        if group.waits_on_device and group.size() > 1:
            refuse_one_queue()
        optimizers = [self.tables.optimizers[table.key] for table in collection.tables]
        turns = order if group.moves_by_nccl and group.size() > 1 else None
        options = (self._dedup, self._hold_gradients, turns, self._nodes, self.hot_routing, near)
        overlapped = OverlappedCollection(collection, local, group, optimizers, *options)
        self.collections[collection.path] = overlapped
        return overlapped

    def _layouts(self, collection: Collection, module: Any) -> list[tuple[Collection, RowLayout]]:
        """Return the parts of a collection, grouped by width and type; none if TorchRec exchanges its rows."""
        if collection.managed:
            self.plain[collection.path] = "The model remaps its ids, so its rows are unknown before the lookup."
            return []
        record, tables = module.freescale_sharding, parts_by_width(collection, module.freescale_sharding.plan)
        names = [f" (dim {each[0].dim})" for each in tables]
        if len(set(names)) < len(names):
            names = [f" (dim {each[0].dim}, {each[0].data_type.name})" for each in tables]
        names = names if len(names) > 1 else [""]
        parts = [replace(collection, path=f"{collection.path}{name}", tables=each) for name, each in zip(names, tables)]
        where = (record.plan, record.orders, self.tables.group.size(), self.tables.device)
        return [(each, RowLayout.from_plan(each, *where)) for each in parts]

    def begin_step(
        self,
        upcoming: Mapping[str, Ids] | None = None,
        *,
        updates: bool = True,
        settings: Mapping[str, UpdateSettings] | None = None,
        step: int | None = None,
        restart: bool = False,
        gives_up: Mapping[str, GivesUp] | None = None,
    ) -> set[str]:
        """Begin the step of a batch, before its forward.

        Args:
            upcoming: the ids of the next batch by collection, or a list with the ids of each lookup; None if there is no next
                batch. Ids of collections that are missing can be passed to :meth:`submit_next_ids` before backward.
            updates: whether an optimizer step follows this batch. Otherwise its gradients are added to those of the next batch.
            settings: the settings of each table's update, by table key. Other tables use the options of their sharding.
            step: the number of completed optimizer steps, for tables without ``settings``; by default the engine counts them.
            restart: discard gradients kept for an optimizer step that did not follow.
            gives_up: whether this rank gives up the prediction of ids, by collection: if the ids of the current batch are not
                mispredicted, and if they are.

        Returns:
            The paths of the collections for which any rank gave up in the step before.
        """
        step = self._steps if step is None else step
        self._steps = step + updates
        begins, self._in_window = restart or not self._in_window, not updates
        self._steps_counted += begins and bool(self.collections)
        given_up: set[str] = set()
        default = UpdateSettings(step)
        for path, module in self.modules.items():
            module.forget_copies()
            proposed = (gives_up or {}).get(path, (False, False))
            for part in module.parts:
                given = [(settings or {}).get(key, default) for key in part.table_keys]
                if part.begin_step(updates, given, step, restart, proposed):
                    given_up.add(path)
        if upcoming is None:
            for collection in self.collections.values():
                collection.step.submit_end()
        else:
            self.submit_next_ids(upcoming)
        return given_up

    def follow_settings(
        self, used: Mapping[str, UpdateSettings], now: Mapping[str, UpdateSettings]
    ) -> dict[str, UpdateSettings]:
        """Change the settings of the current batch's update from ``used`` to ``now``, by table key, before its backward.

        Return the settings of each table's update. Tables that TorchRec updates keep those of ``used``.
        """
        keys = [key for part in self.collections.values() for key in part.table_keys]
        if all(now[key] == used[key] for key in keys):
            return dict(used)
        for part in self.collections.values():
            part.change_settings([now[key] for key in part.table_keys])
        return {**used, **{key: now[key] for key in keys}}

    def lookups(self) -> dict[str, list[Lookup]]:
        """Return the lookups of the model in this step so far, in order, by collection."""
        made = {path: module.parts[0].step.lookups.made for path, module in self.modules.items()}
        return {path: lookups for path, lookups in made.items() if lookups}

    def submit_next_ids(self, upcoming: Mapping[str, Ids], gave_up: Mapping[str, bool] | None = None) -> None:
        """Submit ids of the next batch that were unknown before the forward, and whether this rank has given up."""
        for path, has in (gave_up or {}).items():
            for part in self.modules[path].parts:
                part.step.gives_up = has, has
        for path, lookups in upcoming.items():
            if path in self.modules:
                several = [lookups] if isinstance(lookups, KeyedJaggedTensor) else lookups
                ids = [without_weights(features) for features in several]
                for part in self.modules[path].parts:
                    part.step.submit_next_ids(ids)

    def end_forward(self) -> None:
        """End the lookups of this step, before backward. The engine will not learn other ids of the next batch.

        This is required if only some ranks look up a collection: their waits for rows and the backward of other ranks would
        block each other. With several collections, ids that any rank submits after its first lookup are sent at this call.
        Without it, they are sent once backward reaches the embeddings.
        """
        for collection in self.collections.values():
            collection.step.end_forward()

    def end_backward(self) -> None:
        """Submit, after backward, the gradients that backward has not submitted."""
        for collection in self.collections.values():
            collection.step.end()
            if not self._hold_gradients:  # gradients of a loss over all rows are complete now
                collection.step.apply_gradients()

    @property
    def updates(self) -> bool:
        """Whether an optimizer step follows the current batch."""
        return all(collection.step.current.update.updates for collection in self.collections.values())

    @property
    def holds_gradients(self) -> bool:
        """Whether the gradients of the current batch are held after backward, to be clipped."""
        return self._hold_gradients and self.updates

    def square_sum(self) -> Tensor:
        """Return the sum of squares of the tables' held gradients: float64, equal on all ranks. Collective."""
        every = self.collections.values()
        submitted = [(each, each.submit_clipping(RowUpdates.sum_squares, each.transport)) for each in every]
        found = [collection.square_sum(job) for collection, job in submitted if job is not None]
        return sum(found, torch.zeros((), dtype=torch.float64, device=self.tables.device))

    def scale_gradients(self, factor: Tensor) -> None:
        for collection in self.collections.values():
            collection.submit_clipping(RowUpdates.scale, factor)

    def clamp_gradients(self, limit: float) -> None:
        for collection in self.collections.values():
            collection.submit_clipping(RowUpdates.clamp, limit)

    def apply_gradients(self) -> None:
        """Update the tables with the held gradients. Otherwise the next :meth:`begin_step` does. Collective."""
        for collection in self.collections.values():
            collection.step.apply_gradients()

    def raise_errors(self) -> None:
        """Raise the error of any exchange. After a failure it may be the cause, possibly on another rank."""
        for collection in self.collections.values():
            if collection.error is not None:
                raise collection.error

    def drain(self) -> None:
        """Wait until every update of the steps ended by :meth:`end_backward` is in the tables. Collective."""
        for collection in self.collections.values():
            collection.drain()

    def take_idle_steps(self) -> dict[str, int]:
        """Return the number of optimizer steps since the last call without a gradient on any rank, by table key.

        These steps are not updates. Until this call, the engine subtracts them from the steps in ``settings``. Drain first.
        """
        taken: dict[str, int] = {}
        for each in self.collections.values():
            taken |= zip(each.table_keys, each.take_idle_steps())
        return taken

    def accumulated_gradients(self) -> dict[str, dict[str, Any]]:
        """Return the gradients that this rank holds as an owner for the current window, by collection, on the CPU.

        Drain first.
        """
        return {path: collection.accumulated_gradients() for path, collection in self.collections.items()}

    def restore_accumulated(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue the window of :meth:`accumulated_gradients`, before the first step. Another sharding is a ValueError."""
        for path, gradients in kept.items():
            self.collections[path].restore_accumulated(gradients)

    def serve_evaluation(self) -> None:
        """Send other ranks the rows of their lookups outside of steps until every rank has called this method. Collective.

        This is required if ranks make different numbers of lookups outside of steps. Call it after the last lookup.
        """
        self._evaluation.serve()

    def hot_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the ids in the current lists of hot rows and their numbers of accesses, by table; no communication.

        The names of the tables are those of the state dict, without ``.weight``. Ids are int64 and accesses float32, both on
        the host and sorted by the accesses, most first. Accesses are the requests of all ranks, each weighted by one half per
        list since. Tables whose rows cannot be hot are missing.
        """
        return {name: rows for part in self.collections.values() for name, rows in part.hot_rows().items()}

    def heats(self) -> list[Heat]:
        """Return the accesses to the rows of each collection at its last list of hot rows, for those that have had one."""
        lists = [part.hot_list for part in self.collections.values()]
        return [each.heat for each in lists if each is not None and each.heat is not None]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Allow other code to write to the tables inside the context. Enter it on every rank.

        It applies pending updates first, and discards prefetched rows.
        """
        self.drain()
        yield
        for module in self.modules.values():
            module.forget_copies()
        for collection in self.collections.values():
            collection.discard_prefetched()

    def close(self, farewell: bool = True) -> None:
        """Return the collections to TorchRec. Pending work is lost, so drain first.

        With ``farewell``, wait up to 2 seconds until all ranks close. This is unnecessary if they have met since the drain.
        """
        for module in self.modules.values():
            module.close(farewell)
        self._totals_of_closed += [collection.statistics.totals() for collection in self.collections.values()]
        self.modules.clear()
        self.collections.clear()
        self._evaluation.tables.clear()

    def mean_statistics(self) -> dict[str, float]:
        """Return the mean of :meth:`statistics` over all ranks. Collective; drain first."""
        mine, group = self.statistics(), self.tables.group
        values = torch.tensor(list(mine.values()), dtype=torch.float64, device=self.tables.device)
        everyone = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(everyone, values, group=group)  # over the lane; an all-reduce would need a gloo connection
        return dict(zip(mine, torch.stack(everyone).mean(dim=0).tolist()))

    def statistics(self) -> dict[str, float]:
        """Return totals on this rank over all collections, named as in :data:`report.COUNTS`, and ``steps``.

        ``steps`` is the number of optimizer steps that began while a collection was overlapped.
        """
        totals = self._totals_of_closed + [collection.statistics.totals() for collection in self.collections.values()]
        return {"steps": self._steps_counted, **{name: sum(total[name] for total in totals) for name in COUNTS}}
