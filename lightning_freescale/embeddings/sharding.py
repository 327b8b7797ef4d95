"""Shard the embedding collections of a module with TorchRec."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_freescale.embeddings.collections import Collection, find_collections, replace_everywhere, weights
from lightning_freescale.embeddings.id_checks import LookupCount, check_ids
from lightning_freescale.embeddings.id_remapping import fill_maps
from lightning_freescale.embeddings.managed_collision import complete, frozen
from lightning_freescale.embeddings.optimizer import FROZEN, TableOptimizer, applied_in_backward
from lightning_freescale.embeddings.planning import check_plan, row_wise_planner
from lightning_freescale.embeddings.shards import Shard, ShardedTables, ShardingRecord, kernels
from lightning_freescale.embeddings.sparse_adam import new_state


class TableSharding:
    """Takes the embedding collections out of a module, and puts TorchRec's sharded ones in their places.

    Creating it replaces every collection under ``root`` by a copy on the meta device, so that optimizers can be built over
    the unsharded parameters without their memory. Then either :meth:`shard` or :meth:`restore` must follow.

    Args:
        root: the module, changed in place.
        device: where the shards will live.
        overlap: whether the overlap engine will run, which updates some tables that FBGEMM cannot.

    Attributes:
        given: optimizers that the user has applied in backward, by table key.
        by_row: keys of the tables that the overlap engine can update.

    Raises:
        ValueError: an optimizer that the user has applied in backward cannot update a sharded table on ``device``.
    """

    def __init__(self, root: nn.Module, device: torch.device, overlap: bool = False) -> None:
        self.root, self.device = root, device
        self._originals: list[tuple[Collection, Any]] = list(find_collections(root))
        able = [collection for collection, _ in self._originals if overlap and not (collection.pooled or collection.managed)]
        self.by_row = frozenset(table.key for collection in able for table in collection.tables)
        self._blueprints: dict[str, nn.Module] = {}
        self.given: dict[str, TableOptimizer] = {}
        for collection, module in self._originals:
            self.given.update(_given(collection, module, device, self.by_row))
            blueprint = self._blueprints[collection.path] = collection.blueprint()
            if not hasattr(module, "freescale"):
                for (_, old), (_, new) in zip(weights(module), weights(blueprint)):
                    new.requires_grad_(old.requires_grad)
            replace_everywhere(root, module, blueprint)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The meta-device weight of every table, under its key in the state dict of ``root``.

        With them the parameters in which TorchRec keeps ids, which no optimizer updates.
        """
        found = {}
        for collection, _ in self._originals:
            if collection.managed:
                found.update(frozen(collection.path, self._blueprints[collection.path]))
            by_name = dict(weights(self._blueprints[collection.path]))
            found.update({table.key: by_name[table.name] for table in collection.tables})
        return found

    def restore(self) -> None:
        """Put the collections back that were there before."""
        for collection, module in self._originals:
            replace_everywhere(self.root, self._blueprints[collection.path], module)

    def shard(
        self,
        *,
        group: dist.ProcessGroup,
        local_world_size: int,
        plan: ShardingPlan | None = None,
        planner: Any = None,
        optimizers: Mapping[str, TableOptimizer] | None = None,
    ) -> ShardedTables:
        """Shard every collection, keeping its weights.

        Nothing unsharded is built on the device: shards are created empty there and filled from the unsharded weights, from
        the shards of an earlier call, or, for collections on the meta device, by each table's own initialiser.

        Args:
            group: process group of the embedding exchange, over all ranks.
            local_world_size: ranks per node, for the planner.
            plan: TorchRec sharding plan with an entry for every collection; made by ``planner`` if not given.
            planner: TorchRec planner; a row-wise one if not given.
            optimizers: for each table's key how backward updates it; tables left out are frozen.

        Raises:
            ValueError: the plan misses a collection or a table, or differs from the one that sharded them earlier.
        """
        collections, device = [collection for collection, _ in self._originals], self.device
        chosen = {table.key: (optimizers or {}).get(table.key, FROZEN) for c in collections for table in c.tables}
        plan = plan or self._earlier_plan()
        if plan is None:
            planner = planner or row_wise_planner(collections, device, group.size(), local_world_size)
            plan = planner.collective_plan(self.root, [c.sharder for c in collections], group)
        # creating shards draws random numbers that an unsharded run would not draw
        with torch.random.fork_rng(devices=[device.index] if device.type == "cuda" else []):
            torch.manual_seed(torch.initial_seed() + 1 + group.rank())  # shards must not start as copies of each other
            env = ShardingEnv.from_process_group(group)
            modules = [(c, self._shard_one(c, plan, chosen, env, device)) for c in collections]
            tables = ShardedTables(modules, chosen)
            _fill(tables, {collection.path: _Source.of(collection, module) for collection, module in self._originals})
            fill_maps(tables, {collection.path: module for collection, module in self._originals})
        for collection, module in modules:
            replace_everywhere(self.root, self._blueprints[collection.path], module)
        return tables

    def _earlier_plan(self) -> ShardingPlan | None:
        placed = {c.path: getattr(module, "freescale", None) for c, module in self._originals}
        return ShardingPlan({path: p.plan for path, p in placed.items() if p}) if all(placed.values()) else None

    def _shard_one(
        self,
        collection: Collection,
        plan: ShardingPlan,
        chosen: Mapping[str, TableOptimizer],
        env: ShardingEnv,
        device: torch.device,
    ) -> Any:
        tables: Any = plan.plan.get(collection.path)
        if tables is None or any(table.name not in tables for table in collection.tables):
            raise ValueError(
                f"the sharding plan has no entry for collection {collection.path!r} with tables "
                f"{[table.name for table in collection.tables]}, only for {sorted(plan.plan)}: add it, or leave out plan="
            )
        blueprint = self._blueprints[collection.path]
        mine = {table.key: chosen[table.key] for table in collection.tables}
        check_plan(collection, tables, mine)
        _attach_optimizers(collection, blueprint, mine)
        module: Any = collection.sharder.shard(blueprint, tables, env, device)
        _add_states(collection, module, mine)
        module.freescale = ShardingRecord(collection, tables, mine, {key: self.given[key] for key in mine if key in self.given})
        if collection.managed:
            complete(module)
        else:
            check_ids(collection, module)
        module.freescale_lookups = LookupCount(collection, mine)
        module.register_forward_pre_hook(module.freescale_lookups)
        module.register_forward_hook(_wait)
        return module


def _wait(module: nn.Module, args: Any, output: Any) -> Any:
    # TorchRec's lazy result is no dict, and a rank that never looks at it would leave the others waiting
    if isinstance(output, tuple):
        return tuple(part.wait() if hasattr(part, "wait") else part for part in output)
    return output.wait() if hasattr(output, "wait") else output


def _given(collection: Collection, module: Any, device: torch.device, by_row: Set[str]) -> dict[str, TableOptimizer]:
    if hasattr(module, "freescale"):
        return dict(module.freescale.given)
    by_name: dict[str, Any] = dict(weights(module))
    return {
        table.key: applied_in_backward(
            by_name[table.name]._optimizer_classes,
            by_name[table.name]._optimizer_kwargs,
            table.key,
            device,
            table.key in by_row,
        )
        for table in collection.tables
        if hasattr(by_name[table.name], "_optimizer_classes")
    }


def _attach_optimizers(collection: Collection, blueprint: nn.Module, chosen: Mapping[str, TableOptimizer]) -> None:
    by_name: dict[str, Any] = dict(weights(blueprint))
    for table in collection.tables:
        weight, optimizer = by_name[table.name], chosen[table.key]
        # TorchRec reads these two attributes; _batch_key keeps the tables of different parameter groups in different
        # kernels, each of which has one learning rate
        weight._optimizer_classes = [torch.optim.SGD if optimizer.by_row else optimizer.fused_class]
        arguments = {"lr": 0.0} if optimizer.by_row else optimizer.arguments
        own = sorted(optimizer.arguments.items()) if optimizer.by_row else ""
        weight._optimizer_kwargs = [{**arguments, "_batch_key": f"{optimizer.group} {own}"}]


def _add_states(collection: Collection, module: Any, chosen: Mapping[str, TableOptimizer]) -> None:
    """Optimizer state that FBGEMM does not hold."""
    keys = {table.name: table.key for table in collection.tables}
    for kernel in kernels(module):
        names = [spec.name for spec in kernel._config.embedding_tables]
        if chosen[keys[names[0]]].by_row:
            weights_here = kernel.emb_module.split_embedding_weights()
            kernel.freescale_states = {name: new_state(weight) for name, weight in zip(names, weights_here)}


@dataclass(frozen=True)
class _Source:
    """Where the weights of a collection come from: whole tables, or shards already cut the same way.

    ``given`` are the tables that keep an optimizer of their own, and with it its state.
    """

    whole: dict[str, Tensor]
    shards: dict[tuple[str, int, int], Shard]
    given: frozenset[str]

    @classmethod
    def of(cls, collection: Collection, module: Any) -> _Source:
        if hasattr(module, "freescale"):
            old = ShardedTables([(collection, module)], {})
            shards = {(s.table.name, s.rows.start, s.columns.start): s for s in old.shards()}
            return cls({}, shards, frozenset(module.freescale.given))
        return cls({name: weight.detach() for name, weight in weights(module) if not weight.is_meta}, {}, frozenset())

    def fill(self, shard: Shard, initial_state: float) -> None:
        """The shard's weight and state as its first step should find them."""
        if "sum" in shard.state:
            shard.state["sum"].fill_(initial_state)
        if self.shards:
            self._copy(shard)
        elif shard.table.name in self.whole:
            shard.weight.copy_(self.whole[shard.table.name][shard.rows, shard.columns])
        else:
            shard.table.init(shard.weight)

    def _copy(self, shard: Shard) -> None:
        old = self.shards.get((shard.table.name, shard.rows.start, shard.columns.start))
        if old is None or old.weight.shape != shard.weight.shape:
            raise ValueError(
                f"table {shard.table.name!r} is sharded already, by another plan: save a checkpoint and load it into a new "
                "module to use this one"
            )
        shard.weight.copy_(old.weight)
        if shard.table.key in self.given:
            for name, value in shard.state.items():
                value.copy_(old.state[name])


@torch.no_grad()
def _fill(tables: ShardedTables, sources: dict[str, _Source]) -> None:
    path_of = {table.key: collection.path for collection, _ in tables.modules for table in collection.tables}
    for shard in tables.shards():
        sources[path_of[shard.table.key]].fill(shard, tables.optimizers[shard.table.key].initial_state)
