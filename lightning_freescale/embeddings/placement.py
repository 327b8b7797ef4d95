"""Place the rows of row-wise sharded tables on ranks, by the hash of their ids or by blocks of ids."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.shards import shards_of

Placement: TypeAlias = Literal["hash", "blocks"]


def row_orders(collection: Collection, plan: Mapping[str, Any], ranks: int, placement: Placement) -> dict[str, RowOrder]:
    """Return in which order the rows of each table lie, by its name; an owner has one block of that.

    Only row-wise tables have another order than that of their ids, on several ranks. With managed collisions the map decides
    which row an id has.
    """
    orders = {}
    for table in collection.tables:
        hashed = placement == "hash" and ranks > 1 and plan[table.name].sharding_type == "row_wise" and not collection.managed
        orders[table.name] = RowOrder.hashed(table.rows) if hashed else RowOrder(table.rows)
    return orders


def place_rows(collection: Collection, module: Any, orders: Mapping[str, RowOrder]) -> None:
    """Let TorchRec's sharded ``module`` look rows up where they lie, and put them there from an unsharded state dict.

    The ids change on their way to the owners, after TorchRec has put them in the order of its tables: a feature that two
    tables look up has other positions in each, and what is returned to the caller has the ids as they were.
    """
    padded = any(table.dim != table.kernel_dim for table in collection.tables)
    if all(order.by_id for order in orders.values()) and not padded:
        return
    handle = module.register_load_state_dict_pre_hook(partial(_read_whole_tables, collection))
    module._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)  # before TorchRec's, which takes a block of rows
    shardings = module._embedding_shardings if collection.pooled else module._sharding_type_to_sharding.values()
    for sharding in shardings:
        if isinstance(sharding, BaseRwEmbeddingSharding):  # neither within a node nor a grid
            of_features = [orders[table.name] for table in sharding.embedding_tables() for _ in table.feature_names]
            # TorchRec makes it in the first lookup
            sharding.create_input_dist = partial(_placing, sharding.create_input_dist, of_features)


def _read_whole_tables(collection: Collection, module: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    found: dict[str, Tensor] = {}
    for shard in shards_of(collection, module):
        table = shard.table
        key = prefix + table.key.removeprefix(f"{collection.path}.")
        whole: Any = state_dict.get(key)
        is_whole = type(whole) in (Tensor, nn.Parameter) and whole.shape == (table.rows, table.dim)
        if is_whole and (not shard.order.by_id or table.dim != table.kernel_dim):
            # TorchRec reads no other rows of it than this rank's
            in_order = found.setdefault(key, whole.new_zeros(table.rows, table.kernel_dim))
            shard.read(whole.detach(), into=in_order[shard.rows, shard.columns])
    state_dict.update(found)


def _placing(create: Any, orders: list[RowOrder], *arguments: Any, **options: Any) -> nn.Module:
    input_dist: nn.Module = create(*arguments, **options)
    input_dist.register_forward_pre_hook(_PlacedIds(orders))
    return input_dist


class _PlacedIds:
    """Replaces ids by positions before TorchRec sends them.

    Args:
        orders: of the table of each feature.
    """

    def __init__(self, orders: list[RowOrder]) -> None:
        self._orders = orders[:1] if len(set(orders)) == 1 else orders
        self._largest = max(order.rows for order in orders) - 1

    def __call__(self, module: nn.Module, args: tuple[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        (features,) = args
        ids = features.values()
        # where the host has to wait for the lengths, it would have to in TorchRec's next lines
        parts = ids.split(features.length_per_key()) if len(self._orders) > 1 else [ids]
        placed = [order.positions(part) for order, part in zip(self._orders, parts)]
        positions = torch.cat(placed) if len(placed) > 1 else placed[0]
        # what travels stays as small as it was
        return _with_values(features, positions.to(ids.dtype) if self._largest <= torch.iinfo(ids.dtype).max else positions)


def _with_values(features: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        length_per_key=features.length_per_key_or_none(),
    )
