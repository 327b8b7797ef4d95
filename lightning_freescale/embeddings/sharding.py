"""Shard the embedding collections of a module with TorchRec. TorchRec's internals are touched in this file alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.fused import FusedOptimizerModule

from lightning_freescale.embeddings.bounds import check_ids
from lightning_freescale.embeddings.collections import Collection, Table, find_collections, replace_everywhere, weights
from lightning_freescale.embeddings.optimizer import FROZEN, TableOptimizer


@dataclass(frozen=True)
class Shard:
    """The part of a table that this rank owns.

    Attributes:
        weight: view of the live weights, shape ``[rows, columns]`` of the shard.
        state: views of the live optimizer state by torch's names; each ``[rows, columns]``, ``[rows]`` or one value.
        rows, columns: which part of the table it is.
    """

    table: Table
    weight: Tensor
    state: dict[str, Tensor]
    rows: slice
    columns: slice


class ShardedTables:
    """All sharded tables of a module: their shards, their learning rates, their step count."""

    def __init__(self, modules: list[tuple[Collection, nn.Module]], optimizers: Mapping[str, TableOptimizer]) -> None:
        self.modules, self.optimizers = modules, dict(optimizers)
        self.tables = [table for collection, _ in modules for table in collection.tables]
        self.group: dist.ProcessGroup = modules[0][1]._env.process_group  # type: ignore[union-attr, assignment]
        self.device: torch.device = modules[0][1]._device  # type: ignore[assignment]

    def shards(self) -> Iterator[Shard]:
        """Every shard that this rank owns."""
        for collection, module in self.modules:
            tables = {table.name: table for table in collection.tables}
            for kernel in _kernels(module):
                specs = kernel._config.embedding_tables
                states = kernel.emb_module.get_optimizer_state() or [{}] * len(specs)
                for spec, weight, state in zip(specs, kernel.emb_module.split_embedding_weights(), states):
                    rows, columns = (
                        slice(start, start + size)
                        for start, size in zip(spec.local_metadata.shard_offsets, spec.local_metadata.shard_sizes)
                    )
                    kept = {name: value for name, value in state.items() if value.numel()}
                    yield Shard(tables[spec.name], weight, kept, rows, columns)

    def sharded_weights(self) -> dict[str, ShardedTensor]:
        """Every table's weight as a ShardedTensor, under its key in the whole module's state dict."""
        found = {}
        for collection, module in self.modules:
            state = module.state_dict()
            for table in collection.tables:
                found[table.key] = state[table.key.removeprefix(f"{collection.path}.")]
        return found

    def prepare_update(self, rate_of_group: Callable[[int], float], step: int) -> None:
        """Before a forward in training: the learning rate of each table's parameter group, and the number of updates so far.

        FBGEMM counts forwards, also those of validation; its bias corrections need the updates.
        """
        for kernel, optimizer in self._updates():
            if optimizer.group is not None:
                kernel.emb_module.set_learning_rate(rate_of_group(optimizer.group))
            kernel.emb_module.iter.fill_(step)

    def _updates(self) -> Iterator[tuple[Any, TableOptimizer]]:
        for collection, module in self.modules:
            keys = {table.name: table.key for table in collection.tables}
            for kernel in _kernels(module):
                yield kernel, self.optimizers[keys[kernel._config.embedding_tables[0].name]]


class TableSharding:
    """Takes the embedding collections out of a module, and puts TorchRec's sharded ones in their places.

    Creating it replaces every collection under ``root`` by a copy on the meta device, so that optimizers can be built over
    the unsharded parameters without their memory. Then either :meth:`shard` or :meth:`restore` must follow.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._originals = find_collections(root)
        self._blueprints: dict[str, nn.Module] = {}
        for collection, module in self._originals:
            blueprint = collection.blueprint()
            _copy_settings(module, blueprint, collection)
            self._blueprints[collection.path] = blueprint
            replace_everywhere(root, module, blueprint)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The meta-device weight of every table, under its key in the state dict of ``root``."""
        found = {}
        for collection, _ in self._originals:
            by_name = dict(weights(self._blueprints[collection.path]))
            found.update({table.key: by_name[table.name] for table in collection.tables})
        return found

    def given_optimizers(self) -> dict[str, TableOptimizer]:
        """The optimizers that the user has applied in backward, by table key."""
        return {
            key: TableOptimizer(weight._optimizer_classes[0], dict(weight._optimizer_kwargs[0]))
            for key, weight in self.parameters.items()
            if hasattr(weight, "_optimizer_classes")
        }

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
            ValueError: the plan misses a collection or a table.
        """
        collections = [collection for collection, _ in self._originals]
        chosen = {t.key: (optimizers or {}).get(t.key, FROZEN) for c in collections for t in c.tables}
        plan = plan or self._earlier_plan()
        if plan is None:
            planner = planner or row_wise_planner(collections, device, group.size(), local_world_size)
            plan = planner.collective_plan(self.root, [c.sharder for c in collections], group)
        # creating shards draws random numbers that an unsharded run would not draw
        with torch.random.fork_rng(devices=[device.index] if device.type == "cuda" else []):
            torch.manual_seed(torch.initial_seed() + 1 + group.rank())  # shards must not start as copies of each other
            modules = [(c, self._shard_one(c, plan, chosen, group, device)) for c in collections]
            tables = ShardedTables(modules, chosen)
            _fill(tables, {collection.path: _Source.of(module) for collection, module in self._originals})
        for collection, module in modules:
            replace_everywhere(self.root, self._blueprints[collection.path], module)
        return tables

    def _earlier_plan(self) -> ShardingPlan | None:
        plans = {c.path: getattr(module, "freescale_plan", None) for c, module in self._originals}
        return ShardingPlan(plans) if all(plans.values()) else None  # type: ignore[arg-type]

    def _shard_one(
        self,
        collection: Collection,
        plan: ShardingPlan,
        chosen: Mapping[str, TableOptimizer],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> nn.Module:
        tables = plan.plan.get(collection.path)
        if tables is None or any(table.name not in tables for table in collection.tables):
            raise ValueError(
                f"the sharding plan has no entry for collection {collection.path!r} with tables "
                f"{[table.name for table in collection.tables]}, only for {sorted(plan.plan)}: add it, or leave out plan="
            )
        blueprint = self._blueprints[collection.path]
        given = self.given_optimizers()
        _attach_optimizers(collection, blueprint, chosen)
        env = ShardingEnv.from_process_group(group)
        module = collection.sharder.shard(blueprint, tables, env, device)  # type: ignore[arg-type]
        check_ids(collection, module)
        module.register_forward_hook(_wait)
        module.freescale_collection, module.freescale_plan = collection, tables  # type: ignore[assignment]
        module.freescale_optimizers = {table.key: chosen[table.key] for table in collection.tables}  # type: ignore[assignment]
        module.freescale_given = {k: given[k] for k in module.freescale_optimizers if k in given}  # type: ignore
        return module


def sharded_tables(root: nn.Module) -> ShardedTables | None:
    """The tables that an earlier call has sharded under ``root``; None if any collection is unsharded or there is none."""
    found = find_collections(root)
    if not found or not all(hasattr(module, "freescale_plan") for _, module in found):
        return None
    optimizers: dict[str, TableOptimizer] = {}
    for _, module in found:
        optimizers.update(module.freescale_optimizers)  # type: ignore[arg-type]
    return ShardedTables(found, optimizers)


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


def _attach_optimizers(collection: Collection, blueprint: nn.Module, chosen: Mapping[str, TableOptimizer]) -> None:
    keys = {table.name: table.key for table in collection.tables}
    for name, weight in weights(blueprint):
        optimizer = chosen[keys[name]]
        # TorchRec reads these two attributes; _batch_key keeps the tables of different parameter groups in different
        # kernels, each of which has one learning rate
        weight._optimizer_classes = [optimizer.fused_class]  # type: ignore[attr-defined]
        weight._optimizer_kwargs = [{**optimizer.arguments, "_batch_key": str(optimizer.group)}]  # type: ignore[attr-defined]


def _copy_settings(module: nn.Module, blueprint: nn.Module, collection: Collection) -> None:
    """What the user has set on the weights: requires_grad, and optimizers applied in backward."""
    if hasattr(module, "freescale_given"):
        for name, weight in weights(blueprint):
            optimizer = {t.name: module.freescale_given.get(t.key) for t in collection.tables}[name]  # type: ignore[operator]
            if optimizer is not None:
                weight._optimizer_classes, weight._optimizer_kwargs = [optimizer.fused_class], [optimizer.arguments]  # type: ignore
        return
    for (_, old), (_, new) in zip(weights(module), weights(blueprint)):
        new.requires_grad_(old.requires_grad)
        for attribute in ("_optimizer_classes", "_optimizer_kwargs", "_in_backward_optimizers"):
            if hasattr(old, attribute):
                setattr(new, attribute, getattr(old, attribute))


@dataclass(frozen=True)
class _Source:
    """Where the weights of a collection come from: whole tables, or shards already cut the same way."""

    whole: dict[str, Tensor]
    shards: dict[tuple[str, int, int], Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> _Source:
        if hasattr(module, "freescale_collection"):
            old = ShardedTables([(module.freescale_collection, module)], {})  # type: ignore[list-item]
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


def _kernels(module: nn.Module) -> Iterator[Any]:
    for lookup in module._lookups:  # type: ignore[union-attr]
        for kernel in lookup.modules():
            if isinstance(kernel, FusedOptimizerModule):
                yield kernel
