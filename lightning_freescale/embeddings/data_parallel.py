"""Tables that a plan makes data-parallel: dense parameters that each rank holds whole, beside the sharded tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedTensor
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from lightning_freescale.embeddings.collections import Collection


def without_data_parallel(found: Iterable[tuple[Collection, Any]], plan: Any) -> list[tuple[Collection, Any]]:
    """Return collections without the tables that a ``ShardingPlan`` makes data-parallel, and only those with other tables.

    Data-parallel tables on the meta device are initialised. Their parameters stay in the module under their names, so DDP
    reduces their gradients, and the user's optimizer updates them.
    """
    rest = []
    for collection, module in found:
        planned: Any = plan.plan.get(collection.path, {}) if isinstance(plan, ShardingPlan) else {}
        names = {name for name, each in planned.items() if each.sharding_type == "data_parallel" and not collection.managed}
        earlier = {weight.split(".")[-2] for weight in collection.data_parallel}
        if planned and hasattr(module, "freescale_sharding") and names != earlier:
            raise ValueError(
                f"collection {collection.path!r} is already sharded by another plan, with other data-parallel tables than "
                f"{sorted(names)}. To use the new plan, save a checkpoint and load it into a new module."
            )
        if whole := [table for table in collection.tables if table.name in names]:
            for table in whole:
                holder = module.get_submodule(table.key.removesuffix(".weight").removeprefix(collection.path).strip("."))
                if hasattr(holder.weight, "_in_backward_optimizers"):
                    raise ValueError(
                        f"table {table.key!r} is data-parallel in the plan, but apply_optimizer_in_backward has given it an "
                        "optimizer, which DDP does not support. Put it into configure_optimizers, or shard the table."
                    )
                if holder.weight.is_meta and not collection.embedding:
                    holder.weight = nn.Parameter(torch.empty_like(holder.weight, device="cpu"), holder.weight.requires_grad)
                    table.init(holder.weight.data)
            tables = tuple(table for table in collection.tables if table not in whole)
            build = partial(_with_tables, collection.torchrec, [table.name for table in tables])
            weights = frozenset(table.key.removeprefix(f"{collection.path}.") for table in whole)
            collection = replace(collection, tables=tables, torchrec=build, data_parallel=weights)
        if collection.tables:
            rest.append((collection, module))
    return rest


def share_data_parallel(collection: Collection, module: Any, other: Any) -> None:
    """Make ``other``, a copy of ``module`` or of a part of it, use the data-parallel weights of ``module``."""
    for weight in collection.data_parallel:
        other.get_submodule(weight.removesuffix(".weight")).weight = module.get_parameter(weight)


def add_data_parallel(collection: Collection, original: Any, module: Any) -> None:
    """Add the data-parallel tables of ``original`` to ``module``, TorchRec's sharded module of the other tables."""
    if collection.data_parallel:
        part = _with_tables(collection.blueprint, [weight.split(".")[-2] for weight in collection.data_parallel])
        share_data_parallel(collection, original, part)
        held = "embedding_bags" if collection.pooled else "embeddings"
        module.get_submodule(held).update(part.get_submodule(held))
        module.register_forward_hook(_AddResults(collection, part), with_kwargs=True)


class _AddResults:
    """Adds the results of data-parallel tables to those of a sharded module, in the order of the unsharded module."""

    def __init__(self, collection: Collection, part: Any) -> None:
        # without the tables of the other module, a name may lack "@table"
        configs = [_configs(each) for each in (collection.blueprint(), collection.torchrec(), part)]
        self._names, *self._own = ([*chain(*get_embedding_names_by_table(each))] for each in configs)
        added = [config.name for config in configs[2]]
        self._is_added = [config.name in added for config in configs[0] for _ in config.feature_names]
        self._part = part

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        outputs = output, self._part(*args, **kwargs)
        results = [iter([each[name] for name in names]) for each, names in zip(outputs, self._own)]
        found = [next(results[is_added]) for is_added in self._is_added]
        if isinstance(output, KeyedTensor):
            return KeyedTensor(self._names, [each.shape[1] for each in found], torch.cat(found, dim=1))
        return dict(zip(self._names, found))


def _with_tables(build: Any, names: list[str]) -> Any:
    whole, device = build(), torch.device("meta")
    configs = [config for config in _configs(whole) if config.name in names]
    if isinstance(whole, EmbeddingCollection):
        return EmbeddingCollection(tables=configs, device=device, need_indices=whole.need_indices())
    return EmbeddingBagCollection(tables=configs, device=device, is_weighted=whole.is_weighted())


def _configs(module: Any) -> Any:
    return module.embedding_configs() if isinstance(module, EmbeddingCollection) else module.embedding_bag_configs()
