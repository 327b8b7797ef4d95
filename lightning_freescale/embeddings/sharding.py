"""Shard the embedding collections of a module with TorchRec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_freescale.embeddings.bounds import check_ids
from lightning_freescale.embeddings.collections import Collection, find_collections, replace_everywhere, weights
from lightning_freescale.embeddings.optimizer import FROZEN, TableOptimizer
from lightning_freescale.embeddings.shards import Placed, Shard, ShardedTables


class TableSharding:
    """Takes the embedding collections out of a module, and puts TorchRec's sharded ones in their places.

    Creating it replaces every collection under ``root`` by a copy on the meta device, so that optimizers can be built over
    the unsharded parameters without their memory. Then either :meth:`shard` or :meth:`restore` must follow.

    Attributes:
        given: optimizers that the user has applied in backward, by table key.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._originals: list[tuple[Collection, Any]] = list(find_collections(root))
        self._blueprints: dict[str, nn.Module] = {}
        self.given: dict[str, TableOptimizer] = {}
        for collection, module in self._originals:
            self.given.update(_given(collection, module))
            blueprint = self._blueprints[collection.path] = collection.blueprint()
            if not hasattr(module, "freescale"):
                for (_, old), (_, new) in zip(weights(module), weights(blueprint)):
                    new.requires_grad_(old.requires_grad)
            replace_everywhere(root, module, blueprint)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The meta-device weight of every table, under its key in the state dict of ``root``."""
        found = {}
        for collection, _ in self._originals:
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
        device: torch.device,
        group: dist.ProcessGroup,
        local_world_size: int,
        plan: ShardingPlan | None = None,
        planner: Any = None,
        optimizers: Mapping[str, TableOptimizer] | None = None,
    ) -> ShardedTables:
        """Shard every collection, keeping its weights.

        Nothing unsharded is built on ``device``: shards are created empty there and filled from the unsharded weights, from
        the shards of an earlier call, or, for collections on the meta device, by each table's own initialiser.

        Args:
            device: where the shards live.
            group: process group of the embedding exchange, over all ranks.
            local_world_size: ranks per node, for the planner.
            plan: TorchRec sharding plan with an entry for every collection; made by ``planner`` if not given.
            planner: TorchRec planner; a row-wise one if not given.
            optimizers: for each table's key how backward updates it; tables left out are frozen.

        Raises:
            ValueError: the plan misses a collection or a table, or differs from the one that sharded them earlier.
        """
        collections = [collection for collection, _ in self._originals]
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
        _attach_optimizers(collection, blueprint, mine)
        module: Any = collection.sharder.shard(blueprint, tables, env, device)
        module.freescale = Placed(collection, tables, mine, {key: self.given[key] for key in mine if key in self.given})
        check_ids(collection, module)
        module.register_forward_hook(_wait)
        return module


def row_wise_planner(
    collections: list[Collection], device: torch.device, world_size: int, local_world_size: int
) -> EmbeddingShardingPlanner:
    """TorchRec's planner, held to row-wise sharding with the optimizer fused into backward.

    EmbeddingBagCollections may be sharded table-wise as well: on CPU, TorchRec plans nothing else for them.
    """
    constraints = {}
    for collection in collections:
        types = ["row_wise", "table_wise"] if collection.pooled else ["row_wise"]
        rule = ParameterConstraints(sharding_types=types, compute_kernels=["fused"])
        constraints.update({table.name: rule for table in collection.tables})
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=local_world_size),
        kernel_config=KernelConfig(compute_device=device.type),
    )
    # 15 % is TorchRec's own default share; its default estimate of the dense part warns that it is unreliable
    return EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, storage_reservation=FixedPercentageStorageReservation(0.15)
    )


def _wait(module: nn.Module, args: Any, output: Any) -> Any:
    # TorchRec's lazy result is no dict, and a rank that never looks at it would leave the others waiting
    return output.wait() if hasattr(output, "wait") else output


def _given(collection: Collection, module: Any) -> dict[str, TableOptimizer]:
    if hasattr(module, "freescale"):
        return dict(module.freescale.given)
    by_name: dict[str, Any] = dict(weights(module))
    return {
        table.key: TableOptimizer(by_name[table.name]._optimizer_classes[0], dict(by_name[table.name]._optimizer_kwargs[0]))
        for table in collection.tables
        if hasattr(by_name[table.name], "_optimizer_classes")
    }


def _attach_optimizers(collection: Collection, blueprint: nn.Module, chosen: Mapping[str, TableOptimizer]) -> None:
    by_name: dict[str, Any] = dict(weights(blueprint))
    for table in collection.tables:
        weight, optimizer = by_name[table.name], chosen[table.key]
        # TorchRec reads these two attributes; _batch_key keeps the tables of different parameter groups in different
        # kernels, each of which has one learning rate
        weight._optimizer_classes = [optimizer.fused_class]
        weight._optimizer_kwargs = [{**optimizer.arguments, "_batch_key": str(optimizer.group)}]


@dataclass(frozen=True)
class _Source:
    """Where the weights of a collection come from: whole tables, or shards already cut the same way."""

    whole: dict[str, Tensor]
    shards: dict[tuple[str, int, int], Tensor]

    @classmethod
    def of(cls, collection: Collection, module: Any) -> _Source:
        if hasattr(module, "freescale"):
            old = ShardedTables([(collection, module)], {})
            return cls({}, {(s.table.name, s.rows.start, s.columns.start): s.weight for s in old.shards()})
        return cls({name: weight.detach() for name, weight in weights(module) if not weight.is_meta}, {})

    def part(self, shard: Shard) -> Tensor | None:
        if shard.table.name in self.whole:
            return self.whole[shard.table.name][shard.rows, shard.columns]
        if not self.shards:
            return None
        part = self.shards.get((shard.table.name, shard.rows.start, shard.columns.start))
        if part is None or part.shape != shard.weight.shape:
            raise ValueError(
                f"table {shard.table.name!r} is sharded already, by another plan: save a checkpoint and load it into a new "
                "module to use this one"
            )
        return part


@torch.no_grad()
def _fill(tables: ShardedTables, sources: dict[str, _Source]) -> None:
    path_of = {table.key: collection.path for collection, _ in tables.modules for table in collection.tables}
    for shard in tables.shards():
        part = sources[path_of[shard.table.key]].part(shard)
        if part is None:
            shard.table.init(shard.weight)
        else:
            shard.weight.copy_(part)
        if "sum" in shard.state:
            shard.state["sum"].fill_(tables.optimizers[shard.table.key].initial_state)
