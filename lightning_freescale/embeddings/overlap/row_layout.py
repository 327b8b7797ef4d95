"""Where the rows of a collection's tables live, as numbers: from (table, id) to (owner, row) and back to tables."""

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

    Attributes:
        tables: the tables.
        features: ``(feature, index of its table)``, in the order of the collection.
        outputs: what TorchRec calls the result of each of ``features``.
        first: first owner of each table, shape ``[tables]``.
        block: rows of a table per owner, shape ``[tables]``.
        base: number of each table's first row on each owner, shape ``[ranks, tables]``.
        starts: number of each owner's first row if owners are numbered through as well, shape ``[ranks + 1]``.
    """

    tables: tuple[Table, ...]
    features: tuple[tuple[str, int], ...]
    outputs: tuple[str, ...]
    first: Tensor
    block: Tensor
    base: Tensor
    starts: Tensor

    @classmethod
    def of(cls, collection: Collection, plan: Mapping[str, Any], ranks: int, device: torch.device) -> RowLayout:
        """The layout of a collection whose tables are split by rows or not at all.

        Raises:
            ValueError: a table is split otherwise, or its kernel keeps rows where they cannot be read; says which.
        """
        first, block = zip(*(_blocks(table, plan[table.name]) for table in collection.tables))
        held = torch.zeros(ranks, len(collection.tables), dtype=torch.int64)
        for index, table in enumerate(collection.tables):
            for part in range(-(-table.rows // block[index])):
                held[first[index] + part, index] = min(block[index], table.rows - part * block[index])
        features = tuple((feature, i) for i, table in enumerate(collection.tables) for feature in table.features)
        names = [feature for feature, _ in features]
        outputs = tuple(f if names.count(f) == 1 else f"{f}@{collection.tables[i].name}" for f, i in features)
        base = torch.cumsum(held, dim=1) - held
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(held.sum(dim=1), dim=0)])
        numbers = (torch.tensor(first), torch.tensor(block), base, starts)
        return cls(collection.tables, features, outputs, *(number.to(device) for number in numbers))

    def rows_of(self, rank: int) -> int:
        """How many rows a rank owns."""
        return int(self.starts[rank + 1] - self.starts[rank])

    def keys(self, ids: Tensor, table: Tensor) -> Tensor:
        """For every id of the table beside it its row's number, owners numbered through; all of shape ``[ids]``."""
        block = self.block[table]
        part = torch.div(ids, block, rounding_mode="floor")
        owner = self.first[table] + part
        return self.starts[owner] + self.base[owner, table] + ids - part * block

    def edges(self) -> Tensor:
        """First key of every (owner, table), shape ``[ranks * tables]``."""
        return (self.starts[:-1, None] + self.base).flatten()


def _blocks(table: Table, sharding: Any) -> tuple[int, int]:
    """First owner, and rows per owner."""
    kind, kernel = sharding.sharding_type, sharding.compute_kernel
    if kernel not in OVERLAPPED_KERNELS or kind not in OVERLAPPED_TYPES:
        raise ValueError(f"table {table.name!r} has sharding_type={kind!r} and compute_kernel={kernel!r}")
    shards = sharding.sharding_spec.shards
    block, first = int(shards[0].shard_sizes[0]), int(shards[0].placement.rank())
    for index, shard in enumerate(shards):
        whole = shard.shard_sizes[1] == table.dim
        start = min(index * block, table.rows)
        size = min(block, table.rows - start)
        if (
            not whole
            or (*shard.shard_offsets, shard.shard_sizes[0]) != (start, 0, size)
            or shard.placement.rank() != first + index
        ):
            raise ValueError(f"the rows of table {table.name!r} are not in equal blocks on consecutive ranks")
    return first, block
