"""Where the rows of a collection's tables live: from (table, id) to a number that says owner and row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.planning import OVERLAPPED_KERNELS, OVERLAPPED_TYPES


@dataclass(frozen=True)
class RowLayout:
    """The rows of all tables of a collection, numbered through on each owner: table after table.

    So one sorted list of numbers says owner, table and row, ``unique`` gives the order in which rows travel for nothing, and
    row-wise and table-wise tables take one path.

    Attributes:
        tables: the tables.
        features: ``(feature, index of its table)``, in the order of the collection.
        outputs: what TorchRec calls the result of each of ``features``.
        first_owner: first owner of each table, shape ``[tables]``.
        block: rows of a table per owner, shape ``[tables]``.
        first_row: number of each table's first row on each owner, shape ``[ranks, tables]``.
        starts: number of each owner's first row if owners are numbered through as well, shape ``[ranks + 1]``.
    """

    tables: tuple[Table, ...]
    features: tuple[tuple[str, int], ...]
    outputs: tuple[str, ...]
    first_owner: Tensor
    block: Tensor
    first_row: Tensor
    starts: Tensor

    @classmethod
    def from_plan(cls, collection: Collection, plan: Mapping[str, Any], ranks: int, device: torch.device) -> RowLayout:
        """Return the layout of a collection whose tables are split by rows or not at all.

        Raises:
            ValueError: a table is split otherwise, or its kernel keeps rows where they cannot be read; says which.
        """
        first_owner, block = zip(*(_blocks(table, plan[table.name]) for table in collection.tables))
        counts = torch.zeros(ranks, len(collection.tables), dtype=torch.int64)
        for index, table in enumerate(collection.tables):
            for shard in range(-(-table.rows // block[index])):
                counts[first_owner[index] + shard, index] = min(block[index], table.rows - shard * block[index])
        features = tuple((feature, i) for i, table in enumerate(collection.tables) for feature in table.features)
        first_row = torch.cumsum(counts, dim=1) - counts
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts.sum(dim=1), dim=0)])
        numbers = (torch.tensor(first_owner), torch.tensor(block), first_row, starts)
        return cls(collection.tables, features, output_names(collection), *(number.to(device) for number in numbers))

    @property
    def device(self) -> torch.device:
        """Device of the numbers, and of the rows."""
        return self.starts.device

    def rows_of(self, rank: int) -> int:
        """Return how many rows a rank owns."""
        return int(self.starts[rank + 1] - self.starts[rank])

    def keys(self, ids: Tensor, table: Tensor) -> Tensor:
        """Return for every id of the table beside it its row's number, owners numbered through; all of shape ``[ids]``."""
        block = self.block[table]
        shard = torch.div(ids, block, rounding_mode="floor")
        owner = self.first_owner[table] + shard
        return self.starts[owner] + self.first_row[owner, table] + ids - shard * block

    def first_keys(self) -> Tensor:
        """Return the first key of every (owner, table), shape ``[ranks * tables]``."""
        return (self.starts[:-1, None] + self.first_row).flatten()


def output_names(collection: Collection) -> tuple[str, ...]:
    """Return what TorchRec calls the result of each feature; one that two tables look up is there twice."""
    features = [(feature, table.name) for table in collection.tables for feature in table.features]
    names = [feature for feature, _ in features]
    return tuple(feature if names.count(feature) == 1 else f"{feature}@{table}" for feature, table in features)


def _blocks(table: Table, sharding: Any) -> tuple[int, int]:
    """Return a table's first owner and its rows per owner."""
    kind, kernel = sharding.sharding_type, sharding.compute_kernel
    if kernel not in OVERLAPPED_KERNELS or kind not in OVERLAPPED_TYPES:
        raise ValueError(f"table {table.name!r} has sharding_type={kind!r} and compute_kernel={kernel!r}")
    shards = sharding.sharding_spec.shards
    block, first_owner = int(shards[0].shard_sizes[0]), int(shards[0].placement.rank())
    for index, shard in enumerate(shards):
        start = min(index * block, table.rows)
        expected = (start, 0, min(block, table.rows - start), table.dim, first_owner + index)
        if (*shard.shard_offsets, *shard.shard_sizes, shard.placement.rank()) != expected:
            raise ValueError(f"the rows of table {table.name!r} are not in equal blocks on consecutive ranks")
    return first_owner, block
