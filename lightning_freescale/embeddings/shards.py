"""The sharded tables of a module: what of them this rank owns, and how backward updates them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.fused import FusedOptimizerModule

from lightning_freescale.embeddings.collections import Collection, Table, find_collections
from lightning_freescale.embeddings.optimizer import TableOptimizer


@dataclass(frozen=True)
class Shard:
    """The part of a table that this rank owns.

    Attributes:
        table: the table.
        weight: view of the live weights, shape ``[rows, columns]`` of the shard.
        state: views of the live optimizer state by torch's names; each ``[rows, columns]``, ``[rows]`` or one value.
        rows: which rows of the table it holds.
        columns: which columns of the table it holds.
    """

    table: Table
    weight: Tensor
    state: dict[str, Tensor]
    rows: slice
    columns: slice


@dataclass(frozen=True)
class ShardingRecord:
    """What a sharded collection carries along (as its attribute ``freescale``), for the next time it is sharded.

    Attributes:
        collection: what it was made from.
        plan: TorchRec's plan for its tables.
        optimizers: how each table is updated, by table key.
        given: those of ``optimizers`` that the user applied in backward.
    """

    collection: Collection
    plan: Any
    optimizers: dict[str, TableOptimizer]
    given: dict[str, TableOptimizer]


class ShardedTables:
    """All sharded tables of a module.

    Attributes:
        modules: the sharded collections.
        tables: their tables.
        optimizers: how each table is updated, by table key.
        group: process group of the embedding exchange.
        device: where the shards live.
    """

    def __init__(self, modules: list[tuple[Collection, Any]], optimizers: Mapping[str, TableOptimizer]) -> None:
        self.modules, self.optimizers = modules, dict(optimizers)
        self.tables = [table for collection, _ in modules for table in collection.tables]
        self.group: dist.ProcessGroup = modules[0][1]._env.process_group
        self.device: torch.device = modules[0][1]._device

    @classmethod
    def found_in(cls, root: nn.Module) -> ShardedTables | None:
        """The tables that were sharded earlier under ``root``; None if any collection is unsharded or there is none."""
        found: list[tuple[Collection, Any]] = list(find_collections(root))
        if not found or not all(hasattr(module, "freescale") for _, module in found):
            return None
        return cls(found, {key: how for _, module in found for key, how in module.freescale.optimizers.items()})

    def shards(self) -> Iterator[Shard]:
        """Every shard that this rank owns."""
        for collection, module in self.modules:
            tables = {table.name: table for table in collection.tables}
            for kernel in kernels(module):
                specs = kernel._config.embedding_tables
                states = _states(kernel, [spec.name for spec in specs])
                for spec, weight, state in zip(specs, kernel.emb_module.split_embedding_weights(), states):
                    place = zip(spec.local_metadata.shard_offsets, spec.local_metadata.shard_sizes)
                    rows, columns = (slice(start, start + size) for start, size in place)
                    kept = {name: value for name, value in state.items() if value.numel()}
                    yield Shard(tables[spec.name], weight, kept, rows, columns)

    def keys(self) -> dict[str, str]:
        """The key of every table by every name it has in the module's state dict, also where it is held a second time."""
        found = {}
        for collection, _ in self.modules:
            for table in collection.tables:
                inner = table.key.removeprefix(f"{collection.path}.")
                found.update(
                    {f"{path}.{inner}" if path else inner: table.key for path in (collection.path, *collection.aliases)}
                )
        return found

    def sharded_weights(self) -> dict[str, ShardedTensor]:
        """Every table's weight as a ShardedTensor, under every name it has in the module's state dict."""
        by_key = {}
        for collection, module in self.modules:
            state = module.state_dict()
            by_key.update({t.key: state[t.key.removeprefix(f"{collection.path}.")] for t in collection.tables})
        return {name: by_key[key] for name, key in self.keys().items()}

    def prepare_update(self, rate_of_group: Callable[[int], float], step: int, leave: Container[str] = ()) -> None:
        """Before a forward in training: the learning rate of each table's parameter group, and the number of updates so far.

        FBGEMM counts forwards, also those of validation; its bias corrections need the updates. The collections whose paths
        are in ``leave`` are updated by somebody else.
        """
        for collection, module in self.modules:
            if collection.path in leave:
                continue
            module.freescale_lookups.begin_step()
            keys = {table.name: table.key for table in collection.tables}
            for kernel in kernels(module):
                optimizer = self.optimizers[keys[kernel._config.embedding_tables[0].name]]
                if optimizer.group is not None:
                    kernel.emb_module.set_learning_rate(rate_of_group(optimizer.group))
                kernel.emb_module.iter.fill_(step)

    def update_counts(self) -> list[int]:
        """FBGEMM's count of updates, one per kernel."""
        return [int(kernel.emb_module.iter) for _, module in self.modules for kernel in kernels(module)]


def _states(kernel: Any, tables: list[str]) -> list[dict[str, Tensor]]:
    if hasattr(kernel, "freescale_states"):
        return [kernel.freescale_states[table] for table in tables]
    return kernel.emb_module.get_optimizer_state() or [{}] * len(tables)


def kernels(module: Any) -> Iterator[Any]:
    """The fused kernels of a sharded collection on this rank, each with some of its tables."""
    for lookup in module._lookups:
        for kernel in lookup.modules():
            if isinstance(kernel, FusedOptimizerModule):
                yield kernel
