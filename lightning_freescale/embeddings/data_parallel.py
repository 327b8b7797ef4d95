"""Tables that a plan makes data-parallel: dense parameters that each rank holds whole, beside the sharded tables."""

from __future__ import annotations

from collections.abc import Collection as Group
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedTensor
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from lightning_freescale.embeddings.collections import Collection, Table


def without_data_parallel(found: Iterable[tuple[Collection, Any]], plan: Any) -> list[tuple[Collection, Any]]:
    """Return collections without the tables that a ``ShardingPlan`` makes data-parallel, and only those with other tables.

    Data-parallel tables on the meta device are initialised. Their parameters stay in the module under their names, so DDP
    reduces their gradients, and the user's optimizer updates them.
    """
    rest = []
    for collection, module in found:
        planned: Any = plan.plan.get(collection.path, {}) if isinstance(plan, ShardingPlan) else {}
        names = {name for name, each in planned.items() if each.sharding_type == "data_parallel" and not collection.managed}
        if hasattr(module, "freescale_sharding"):
            if planned and names != {table.name for table in collection.data_parallel}:
                raise ValueError(
                    f"the sharding plan makes tables {sorted(names)} of collection {collection.path!r} data-parallel, but the "
                    "collection is already sharded by another plan. To use the new plan, save a checkpoint and load it into a "
                    "new module."
                )
        elif names:
            whole = tuple(table for table in collection.tables if table.name in names)
            for table in whole:
                _initialise(table, collection.holder(module, table))
            tables = tuple(table for table in collection.tables if table.name not in names)
            build = partial(_with_tables, collection.torchrec, {table.name for table in tables})
            collection = replace(collection, tables=tables, torchrec=build, data_parallel=whole)
        if collection.tables:
            rest.append((collection, module))
    return rest


def share_data_parallel(collection: Collection, module: Any, other: Any) -> None:
    """Make ``other``, an unsharded copy of ``module`` or a part of it, use the data-parallel weights of ``module``."""
    for table in collection.data_parallel:
        collection.holder(other, table).weight = collection.holder(module, table).weight


def add_data_parallel(collection: Collection, original: Any, module: Any) -> None:
    """Add the data-parallel tables of ``original`` to ``module``, TorchRec's sharded module of the other tables."""
    if not collection.data_parallel:
        return
    part = _with_tables(collection.blueprint, {table.name for table in collection.data_parallel})
    share_data_parallel(collection, original, part)
    for table in collection.data_parallel:
        holder: Any = module.embedding_bags if collection.pooled else module.embeddings
        holder[table.name] = collection.holder(part, table)
    module.register_forward_hook(_AddResults(collection, part), with_kwargs=True)


class _AddResults:
    """Adds the results of data-parallel tables to those of a sharded module, in the order of the unsharded module."""

    def __init__(self, collection: Collection, part: nn.Module) -> None:
        configs, kept = _configs(collection.blueprint()), _configs(collection.torchrec())
        self._part, self._pooled = part, collection.pooled
        self._names = _names(configs)
        self._own = [_names(kept), _names(_configs(part))]  # without the tables of the other, a name may lack "@table"
        whole = {table.name for table in collection.data_parallel}
        self._is_whole = [config.name in whole for config in configs for _ in config.feature_names]

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        outputs = output, self._part(*args, **kwargs)
        results = [iter([each[name] for name in names]) for each, names in zip(outputs, self._own)]
        found = [next(results[is_whole]) for is_whole in self._is_whole]
        if self._pooled:
            return KeyedTensor(self._names, [each.shape[1] for each in found], torch.cat(found, dim=1))
        return dict(zip(self._names, found))


def _initialise(table: Table, holder: Any) -> None:
    if holder.weight.is_meta:
        holder.weight = nn.Parameter(torch.empty(table.rows, table.dim, dtype=table.dtype), holder.weight.requires_grad)
        with torch.no_grad():
            table.init(holder.weight)


def _with_tables(build: Any, names: Group[str]) -> Any:
    whole, device = build(), torch.device("meta")
    configs = [config for config in _configs(whole) if config.name in names]
    if isinstance(whole, EmbeddingCollection):
        return EmbeddingCollection(tables=configs, device=device, need_indices=whole.need_indices())
    return EmbeddingBagCollection(tables=configs, device=device, is_weighted=whole.is_weighted())


def _configs(module: Any) -> Any:
    return module.embedding_configs() if isinstance(module, EmbeddingCollection) else module.embedding_bag_configs()


def _names(configs: Any) -> list[str]:
    return [name for names in get_embedding_names_by_table(configs) for name in names]
