"""The sharded tables of a module: what of them this rank owns, and what drives their updates."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.optim.fused import FusedOptimizerModule

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.id_checks import LookupChecks
from lightning_freescale.embeddings.optimizer import TableOptimizer


@dataclass(frozen=True)
class Shard:
    """The part of a table that this rank owns.

    Attributes:
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
    """What TorchRec's sharded module carries as its attribute ``freescale_sharding``, also for the next time it is sharded.

    Attributes:
        collection: what it was made from.
        plan: TorchRec's plan for its tables.
        optimizers: how each table is updated, by table key.
        in_backward: those of ``optimizers`` that the user applied in backward.
        frozen: keys of the tables whose weights needed no gradient, which TorchRec's cannot say.
        checks: of its lookups.
    """

    collection: Collection
    plan: Any
    optimizers: dict[str, TableOptimizer]
    in_backward: dict[str, TableOptimizer]
    frozen: frozenset[str]
    checks: LookupChecks


class ShardedTables:
    """All sharded tables of a module.

    Attributes:
        modules: the sharded collections, each with TorchRec's sharded module.
        tables: their tables.
        optimizers: how each table is updated, by table key.
        group: process group of the embedding exchange.
        device: where the shards live.
    """

    def __init__(self, modules: Sequence[tuple[Collection, Any]]) -> None:
        self.modules = list(modules)
        self.optimizers = {key: how for _, module in modules for key, how in module.freescale_sharding.optimizers.items()}
        self.tables = [table for collection, _ in modules for table in collection.tables]
        self.group: dist.ProcessGroup = modules[0][1]._env.process_group
        self.device: torch.device = modules[0][1]._device

    @classmethod
    def from_collections(cls, found: Sequence[tuple[Collection, Any]]) -> ShardedTables | None:
        """Return the tables of collections that were sharded earlier; None if any is unsharded, or there is none."""
        return cls(found) if found and all(hasattr(module, "freescale_sharding") for _, module in found) else None

    def shards(self) -> Iterator[Shard]:
        """Yield every shard that this rank owns."""
        for collection, module in self.modules:
            yield from shards_of(collection, module)

    def names_in_module(self) -> list[str]:
        """Return the names of all parameters and buffers of the module that DDP must leave alone, because they are sharded."""
        found = [table.key for table in self.tables]
        for collection, module in self.modules:
            if collection.managed:
                tensors = [*module.named_parameters(), *module.named_buffers()]
                found += [collection.names(name)[0] for name, _ in tensors]
        return found

    def state_dict_keys(self) -> dict[str, str]:
        """Return the key of every table by every name it has in the module's state dict, also where it is held again."""
        found: dict[str, str] = {}
        for collection, _ in self.modules:
            for table in collection.tables:
                found |= dict.fromkeys(collection.names(table.key.removeprefix(f"{collection.path}.")), table.key)
        return found

    @torch.no_grad()
    def full_weight(self, path: str) -> Tensor:
        """Return a copy of a whole table, shape ``[rows, dim]``, on every rank. Collective; drain first.

        Args:
            path: its name in the module's state dict, without ``.weight`` if you like.

        Raises:
            ValueError: no sharded table has that name.
        """
        keys = self.state_dict_keys()
        key = keys.get(path, keys.get(f"{path}.weight"))
        if key is None:
            known = [name.removesuffix(".weight") for name in keys]
            near = get_close_matches(path, known, n=1)
            raise ValueError(
                f"full_weight({path!r}): no sharded table has that name, "
                f"{f'did you mean {near[0]!r}?' if near else f'there are {known}'}"
            )
        (table,) = (table for table in self.tables if table.key == key)
        whole = torch.zeros(table.rows, table.dim, device=self.device)
        for shard in self.shards():
            if shard.table.key == key:
                whole[shard.rows, shard.columns] = shard.weight
        # every number is on one rank, zeros are on all others: their bits add up to the same bits, also those of -0.0
        dist.all_reduce(whole.view(torch.int32), group=self.group)
        return whole

    def prepare_update(self, rate_of_group: Callable[[int], float], step: int, skip: Container[str] = ()) -> None:
        """Set what the update of a training step needs, before its forward.

        Args:
            rate_of_group: learning rate of each of the user's parameter groups.
            step: updates done so far.
            skip: paths of the collections that somebody else updates.
        """
        for collection, module in self.modules:
            if collection.path in skip:
                continue
            module.freescale_sharding.checks.reset_count()
            keys = {table.name: table.key for table in collection.tables}
            for kernel in kernels(module):
                optimizer = self.optimizers[keys[kernel._config.embedding_tables[0].name]]
                if optimizer.group is not None:
                    kernel.emb_module.set_learning_rate(rate_of_group(optimizer.group))
                # FBGEMM counts forwards, also those of validation; Adam's bias correction needs the updates
                kernel.emb_module.iter.fill_(step)


def shards_of(collection: Collection, module: Any) -> Iterator[Shard]:
    """Yield every shard of a collection that this rank owns; ``module`` is TorchRec's sharded module."""
    tables = {table.name: table for table in collection.tables}
    for kernel in kernels(module):
        specs = kernel._config.embedding_tables
        beside: dict[str, Any] = getattr(kernel, "sparse_adam_states", {})  # in the order of the tables
        states = [*beside.values()] or kernel.emb_module.get_optimizer_state() or [{}] * len(specs)
        for spec, weight, state in zip(specs, kernel.emb_module.split_embedding_weights(), states):
            place = zip(spec.local_metadata.shard_offsets, spec.local_metadata.shard_sizes)
            rows, columns = (slice(start, start + size) for start, size in place)
            kept = {name: value for name, value in state.items() if value.numel()}
            yield Shard(tables[spec.name], weight, kept, rows, columns)


def kernels(module: Any) -> Iterator[Any]:
    """Yield the fused kernels of a sharded collection on this rank, each with some of its tables."""
    for lookup in module._lookups:
        yield from (kernel for kernel in lookup.modules() if isinstance(kernel, FusedOptimizerModule))
