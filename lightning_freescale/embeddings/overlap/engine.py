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
from lightning_freescale.embeddings.overlap.evaluation import Evaluation
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.module_forward import ModuleForward
from lightning_freescale.embeddings.overlap.proxy_route import Nodes, ProxyGroups, nodes_with_proxies
from lightning_freescale.embeddings.overlap.report import COUNTS
from lightning_freescale.embeddings.overlap.row_layout import RowLayout, parts_by_width
from lightning_freescale.embeddings.overlap.transport import LaunchOrder, new_group, refuse_one_queue
from lightning_freescale.embeddings.shards import ShardedTables

Ids: TypeAlias = "KeyedJaggedTensor | Sequence[KeyedJaggedTensor]"
"""The ids of one lookup, or of each of several."""


class OverlapEngine:
    """Fetches the rows of the next batch while this one computes, with the numbers of plain TorchRec.

    Creating it is collective. One step is::

        engine.begin_step({"path.of.collection": ids_of_the_next_batch})
        loss = model(batch)
        loss.backward()
        engine.end_backward()

    Args:
        tables: sharded tables; their collections are taken over until :meth:`close`.
        dedup: send every row once per rank and batch, and its gradients summed up. Without it the numbers are bitwise those of
            plain TorchRec, with it they differ by the order of summation.
        timeout: of every exchange.
        transport: what moves rows and ids, see :class:`lightning_freescale.comm.ProcessGroupFreeScaleOptions`.
        clip_value: limit of every element of a row's gradient, summed over ranks and batches; None for none.
        hold_gradients: update no row before :meth:`apply_gradients`, so that gradients can be clipped by their norm. Costs
            overlap: no gradient travels under the next forward. Clipping leaves tables alone that no parameter group holds.
        exchange: ``"flat"``: every rank asks the owners. ``"two_level"``: what several ranks of a node need crosses the network
            once, and back its gradient, by proxies in the node. Pays with several nodes of several ranks each, where the
            network between nodes is slower than what connects the ranks of one; needs ``dedup`` and ``ranks_per_node``.
        ranks_per_node: ranks of every node, one node's after the other's; tells the report which bytes cross between nodes.

    Raises:
        ValueError: ``exchange`` and ``ranks_per_node`` do not fit each other, ``dedup`` or the number of ranks.

    Attributes:
        tables: the sharded tables.
        clip_value: as given.
        modules: the overlapped collections, by path.
        collections: their tables, those of one width together: by path, or, if there are several, ``"path (dim 8)"``. A table
            whose columns are split is one table for each part.
        plain: why each of the others is left to plain TorchRec, by path.
    """

    def __init__(
        self,
        tables: ShardedTables,
        dedup: bool = True,
        timeout: timedelta | None = None,
        transport: str = "auto",
        clip_value: float | None = None,
        hold_gradients: bool = False,
        exchange: str = "flat",
        ranks_per_node: int | None = None,
    ) -> None:
        self.tables, self._steps = tables, 0
        self._nodes = None if ranks_per_node is None else Nodes(tables.group.size(), ranks_per_node)
        self._proxied = nodes_with_proxies(exchange, self._nodes, dedup)
        self.clip_value, self._hold_gradients = clip_value, hold_gradients
        self._dedup, self._timeout, self._transport = dedup, timeout, transport
        self.collections: dict[str, OverlappedCollection] = {}
        self.modules: dict[str, ModuleForward] = {}
        self.plain: dict[str, str] = {}
        self._table_keys: dict[str, list[str]] = {}
        self._in_window, self._steps_counted = False, 0
        self._totals_of_closed: list[dict[str, float]] = []
        layouts = [(collection, module, self._layouts(collection, module)) for collection, module in tables.modules]
        several = sum(len(parts) for *_, parts in layouts) > 1
        order = LaunchOrder(timeout or default_pg_timeout) if several else None
        self._evaluation = Evaluation()
        for collection, module, found in layouts:
            parts = [self._overlapped(part, module, layout, order) for part, layout in found]
            if parts:
                forward = ModuleForward(collection, module, parts, self._evaluation, tables)
                self.modules[collection.path] = forward
                self._evaluation.modules[collection.path] = parts
        for path, overlapped in self.collections.items():
            overlapped.others = [other for name, other in self.collections.items() if name != path]

    def _overlapped(
        self, collection: Collection, module: Any, layout: RowLayout, order: LaunchOrder | None
    ) -> OverlappedCollection:
        local = LocalRows.from_module(layout, collection, module, self.tables, self.clip_value)
        made = (collection.path, self._transport, self._timeout)
        group, proxies = new_group(*made), None
        group.connect()  # now, not in a step
        if self._proxied is not None:
            proxies = ProxyGroups.connect(self._proxied, *made, take_turns=order is not None)
        if group.waits_on_device and group.size() > 1:
            refuse_one_queue()
        optimizers = [self.tables.optimizers[table.key] for table in collection.tables]
        turns = order if group.moves_by_nccl and group.size() > 1 else None
        options = (self._dedup, self._hold_gradients, turns, self._nodes, proxies)
        overlapped = OverlappedCollection(collection, local, group, optimizers, *options)
        self.collections[collection.path] = overlapped
        self._table_keys[collection.path] = [table.key for table in collection.tables]
        return overlapped

    def _layouts(self, collection: Collection, module: Any) -> list[tuple[Collection, RowLayout]]:
        """Return the parts of a collection, each of tables of one width; none if TorchRec exchanges its rows."""
        if collection.managed:
            self.plain[collection.path] = "the model remaps its ids, so its rows are not known before the lookup"
            return []
        record, nodes = module.freescale_sharding, 1 if self._proxied is None else self._proxied.count
        widths = parts_by_width(collection, record.plan)
        several = len(widths) > 1
        parts = [
            replace(collection, path=f"{collection.path} (dim {each[0].dim})" if several else collection.path, tables=each)
            for each in widths
        ]
        where = (record.plan, record.orders, self.tables.group.size(), self.tables.device, nodes)
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
            upcoming: ids of the next batch by collection, of each lookup if there are several; None if there is no next
                batch. Those of collections that are left out may be given to :meth:`submit_next_ids` before backward.
            updates: whether an optimizer step follows this batch; else its gradients are added to those of the next.
            settings: what each table is updated with, by table key; others keep the options they were sharded with.
            step: optimizer steps done so far, for tables without ``settings``; counted here if not given.
            restart: forget gradients that were kept for an optimizer step which did not come.
            gives_up: whether this rank gives up the prediction of ids, by collection.

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
                given = [(settings or {}).get(key, default) for key in self._table_keys[part.path]]
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
        """Update tables after the current batch with settings that have changed since the step began, before its backward.

        Args:
            used: what each table of the module would be updated with, by table key.
            now: what it is to be updated with.

        Returns:
            What each table will be updated with: those that TorchRec updates, with the options before.
        """
        keys = [key for path in self.collections for key in self._table_keys[path]]
        if all(now[key] == used[key] for key in keys):
            return dict(used)
        for path, part in self.collections.items():
            part.change_settings([now[key] for key in self._table_keys[path]])
        return {**used, **{key: now[key] for key in keys}}

    def lookups(self) -> dict[str, list[Lookup]]:
        """Return what the model has looked up in this step so far, in its order, by collection."""
        made = {path: module.parts[0].step.lookups.made for path, module in self.modules.items()}
        return {path: lookups for path, lookups in made.items() if lookups}

    def submit_next_ids(self, upcoming: Mapping[str, Ids], gave_up: Mapping[str, bool] | None = None) -> None:
        """Submit ids of the next batch that were not known before the forward, and whether this rank gave up, by collection."""
        for path, has in (gave_up or {}).items():
            for part in self.modules[path].parts:
                part.step.gives_up = has, has
        for path, lookups in upcoming.items():
            if path in self.modules:
                module, several = self.modules[path], [lookups] if isinstance(lookups, KeyedJaggedTensor) else lookups
                ids = [module.ids_of(features) for features in several]
                for part in module.parts:
                    part.step.submit_next_ids(ids)

    def end_forward(self) -> None:
        """Say, before backward, that the model has looked everything up in this step and that no other next ids will be known.

        Needed where a collection may be looked up on some ranks only: a rank that waits for rows would wait for one whose
        backward waits for the first. With several collections, next ids that any rank submits after its first lookup travel
        from here on, and without this call only once backward comes to the embeddings.
        """
        for collection in self.collections.values():
            collection.step.end_forward()

    def end_backward(self) -> None:
        """Hand over, after backward, what it has not handed over itself."""
        for collection in self.collections.values():
            collection.step.end()
            if not self._hold_gradients:  # those of a loss over all rows are whole now
                collection.step.apply_gradients()

    @property
    def updates(self) -> bool:
        """Whether an optimizer step follows the current batch."""
        return all(collection.step.current.update.updates for collection in self.collections.values())

    @property
    def holds_gradients(self) -> bool:
        """Whether the gradients of the current batch are kept after backward, to be clipped."""
        return self._hold_gradients and self.updates

    def square_sum(self) -> Tensor:
        """Return the sum of the squares of the tables' gradients that are held: float64, the same on all ranks. Collective."""
        submitted = [(each, each.submit_square_sum()) for each in self.collections.values()]
        found = [collection.square_sum(job) for collection, job in submitted if job is not None]
        return sum(found, torch.zeros((), dtype=torch.float64, device=self.tables.device))

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the tables' gradients that are held by one number."""
        for collection in self.collections.values():
            collection.scale_gradients(factor)

    def clamp_gradients(self, limit: float) -> None:
        """Limit every element of the tables' gradients that are held."""
        for collection in self.collections.values():
            collection.clamp_gradients(limit)

    def apply_gradients(self) -> None:
        """Update the tables by the gradients that are held; the next :meth:`begin_step` would do it, too. Collective."""
        for collection in self.collections.values():
            collection.step.apply_gradients()

    def raise_errors(self) -> None:
        """After anything has failed, raise what has gone wrong in an exchange: it may be the cause, on another rank."""
        for collection in self.collections.values():
            if collection.error is not None:
                raise collection.error

    def drain(self) -> None:
        """Wait until every update of the steps that :meth:`end_backward` has ended is in the tables. Collective."""
        for collection in self.collections.values():
            collection.drain()

    def take_idle_steps(self) -> dict[str, int]:
        """Return how many optimizer steps since the last call had no gradient for a table, on any rank, by table key.

        They are no updates; until they are taken, the engine takes them off the ``settings`` that it is given. Drain first.
        """
        taken: dict[str, int] = {}
        for path, each in self.collections.items():
            taken |= zip(self._table_keys[path], each.take_idle_steps())
        return taken

    def accumulated_gradients(self) -> dict[str, dict[str, Any]]:
        """Return what this rank keeps, as an owner, for the optimizer step of the current window, by collection.

        None of it is on the device. Drain first.
        """
        return {path: collection.accumulated_gradients() for path, collection in self.collections.items()}

    def restore_accumulated(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on in the window that :meth:`accumulated_gradients` was called in, before the first step.

        Raises:
            ValueError: the tables are sharded otherwise than they were.
        """
        for path, gradients in kept.items():
            self.collections[path].restore_accumulated(gradients)

    def serve_evaluation(self) -> None:
        """Give the other ranks the rows that they look up outside of steps, until every rank has called this method.

        Needed where ranks may make different numbers of lookups outside of steps: each calls it after its last one. Collective.
        """
        self._evaluation.serve()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let other code write to the tables inside: pending updates are applied first, rows fetched ahead are discarded.

        Enter it on every rank.
        """
        self.drain()
        yield
        for module in self.modules.values():
            module.forget_copies()
        for collection in self.collections.values():
            collection.discard_prefetched()

    def close(self, farewell: bool = True) -> None:
        """Give the collections back to TorchRec. Drain first; what is under way is lost.

        Args:
            farewell: wait, for 2 seconds at most, until all ranks close. Not needed where they have met since the drain.
        """
        for module in self.modules.values():
            module.close(farewell)
        self._totals_of_closed += [collection.statistics.totals() for collection in self.collections.values()]
        self.modules, self.collections = {}, {}
        self._evaluation.modules.clear()
        self._evaluation.tables.clear()

    def mean_statistics(self) -> dict[str, float]:
        """Return what :meth:`statistics` returns, as the mean over all ranks. Collective; drain first."""
        mine, group = self.statistics(), self.tables.group
        values = torch.tensor(list(mine.values()), dtype=torch.float64, device=self.tables.device)
        everyone = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(everyone, values, group=group)  # the lane moves it; to reduce, gloo would have to be connected
        return dict(zip(mine, torch.stack(everyone).mean(dim=0).tolist()))

    def statistics(self) -> dict[str, float]:
        """Return totals on this rank since the start, over all collections, see :data:`report.COUNTS`, and ``steps``.

        Those are the optimizer steps that have begun while any collection was overlapped.
        """
        totals = self._totals_of_closed + [collection.statistics.totals() for collection in self.collections.values()]
        return {"steps": self._steps_counted, **{name: sum(total[name] for total in totals) for name in COUNTS}}
