"""The layout of a collection's rows: a number for every (table, id) that encodes its owner and its row on the owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.row_order import RowOrder


@dataclass(frozen=True)
class RowLayout:
    """The rows of all tables of a collection, numbered consecutively on each owner, table after table.

    One sorted list of numbers encodes owner, table and row, and ``unique`` returns rows in the order in which they are sent.
    Row-wise and table-wise tables share one implementation.
    """

    tables: tuple[Table, ...]  # tables, or parts of tables that a plan splits by columns; all of one width and type
    features: tuple[tuple[str, int], ...]  # (feature, index of its table), in the order of the collection
    blocks: tuple[int, ...]  # rows of each table per owner
    first_row: Tensor  # number of each table's first row on each owner, shape [ranks, tables], on the host
    starts: Tensor  # key of each owner's first row, shape [ranks + 1]
    shifts: tuple[Tensor | None, ...]  # per table: key minus position in each of its blocks, shape [blocks] or [1]; None if 0
    orders: tuple[RowOrder, ...]  # order of the rows of each table

    @classmethod
    def from_plan(
        cls,
        collection: Collection,
        plan: Mapping[str, Any],
        orders: Mapping[str, RowOrder],
        ranks: int,
        device: torch.device,
    ) -> RowLayout:
        """Return the layout of a collection whose tables are one result of :func:`parts_by_width`.

        ``plan`` and ``orders`` are indexed by table name. Rows that are not in equal blocks, or too many, are a ValueError.
        """
        first_owner, blocks = zip(*(_blocks(table, plan[table.name]) for table in collection.tables))
        counts = torch.zeros(ranks, len(collection.tables), dtype=torch.int64)
        for index, table in enumerate(collection.tables):
            for shard in range(-(-table.rows // blocks[index])):
                counts[first_owner[index] + shard, index] = min(blocks[index], table.rows - shard * blocks[index])
        most = int(counts.sum(dim=1).max())
        if most > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"Collection {collection.path!r} has {most} rows of width {collection.tables[0].dim} on one rank. A rank "
                "can hold 2**31 - 1 rows of one width. Use more ranks, or a plan that spreads the rows."
            )
        features = tuple((feature, i) for i, each in enumerate(collection.tables) for feature in each.features)
        first_row = torch.cumsum(counts, dim=1) - counts
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts.sum(dim=1), dim=0)])
        shifts: list[Tensor | None] = []
        for index, table in enumerate(collection.tables):
            shards = torch.arange(-(-table.rows // blocks[index]))
            owners = first_owner[index] + shards
            shift = starts[owners] + first_row[owners, index] - shards * blocks[index]
            if bool(shift.any()):
                shifts.append((shift[:1] if bool((shift == shift[0]).all()) else shift).to(device))
            else:
                shifts.append(None)
        row_orders = tuple(orders[table.name] for table in collection.tables)
        numbers = (blocks, first_row, starts.to(device), tuple(shifts), row_orders)
        return cls(collection.tables, features, *numbers)

    @property
    def ranks(self) -> int:
        return len(self.starts) - 1

    @property
    def key_bits(self) -> int:
        return sum(table.rows for table in self.tables).bit_length()

    @property
    def device(self) -> torch.device:
        return self.starts.device

    def rows_of(self, rank: int) -> int:
        return int(self.starts[rank + 1] - self.starts[rank])

    def keys(self, table: int, ids: Tensor) -> Tensor:
        """Return the key of every id of a table: the number of its row, counted over all owners. Shapes: ``[ids]``."""
        shifts, positions = self.shifts[table], self.orders[table].positions(ids)
        if shifts is None:
            return positions
        if len(shifts) > 1:
            return positions + shifts[torch.div(positions, self.blocks[table], rounding_mode="floor")]
        return positions + shifts

    def ids(self, table: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return which keys are rows of a table (bool), and the ids of these. All tensors are on the host."""
        starts, first = self.starts.cpu(), self.first_row[:, table]
        ends = torch.cat([self.first_row, torch.diff(starts)[:, None]], dim=1)[:, table + 1]
        owners = torch.bucketize(keys, starts[1:], right=True)
        rows = keys - starts[owners]
        inside = (rows >= first[owners]) & (rows < ends[owners])
        owners, block = owners[inside], ((ends > first).cumsum(0) - 1) * self.blocks[table]
        return inside, self.orders[table].ids_at(rows[inside] - first[owners] + block[owners])

    def owners(self, keys: Tensor) -> Tensor:
        return torch.bucketize(keys, self.starts[1:], right=True)


def parts_by_width(collection: Collection, plan: Mapping[str, Any]) -> list[tuple[Table, ...]]:
    """Return the tables of a collection grouped by width and type, within a group those that pool by the sum first.

    A table that ``plan`` splits by columns is replaced by one table per shard of columns.
    """
    found = []
    for table in collection.tables:
        columns = sorted({(int(s.shard_offsets[1]), int(s.shard_sizes[1])) for s in plan[table.name].sharding_spec.shards})
        found += [replace(table, first_column=first, dim=min(width, table.dim - first)) for first, width in columns]
    forms = dict.fromkeys((table.dim, table.dtype) for table in found)
    of_form = ([table for table in found if (table.dim, table.dtype) == form] for form in forms)
    return [tuple(sorted(tables, key=lambda table: table.mean)) for tables in of_form]


def _blocks(table: Table, sharding: Any) -> tuple[int, int]:
    """Return the first owner of a table and its rows per owner."""
    shards = [shard for shard in sharding.sharding_spec.shards if shard.shard_offsets[1] == table.first_column]
    block, first_owner = int(shards[0].shard_sizes[0]), int(shards[0].placement.rank())
    for index, shard in enumerate(shards):
        start = min(index * block, table.rows)
        expected = (start, min(block, table.rows - start), first_owner + index)
        if (shard.shard_offsets[0], shard.shard_sizes[0], shard.placement.rank()) != expected:
            raise ValueError(
                f"The sharding plan does not place the rows of table {table.name!r} in equal blocks on consecutive ranks. "
                "Use a plan of TorchRec's planner, or leave out plan=."
            )
    return first_owner, block
