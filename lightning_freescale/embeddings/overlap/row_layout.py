"""The layout of a collection's rows: a number for every (table, id) that contains its owner and its row there."""

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
    """The rows of all tables of a collection, numbered through on each owner: table after table.

    So one sorted list of numbers says owner, table and row, ``unique`` gives the order in which rows travel for nothing, and
    row-wise and table-wise tables take one path. Where requests go through the node's proxies, the owners that share one come
    together: first the first rank of every node, then the second ones.

    Attributes:
        tables: the tables, or parts of tables that a plan splits by columns; all of one width.
        features: ``(feature, index of its table)``, in the order of the collection.
        blocks: rows of each table per owner.
        first_row: number of each table's first row on each owner, shape ``[ranks, tables]``, on the host.
        starts: number of each owner's first row if owners are numbered through as well, shape ``[ranks + 1]``, in the order of
            ``places``.
        shifts: for each table, what to add to a position in each of its blocks to get its key, shape ``[blocks]`` or ``[1]``;
            None where the key is the position, as in a single table split by rows.
        orders: in which the rows of each table lie.
        places: at which place every rank comes among the owners.
        nodes: with proxies, how many nodes the ranks are on; else 1.
    """

    tables: tuple[Table, ...]
    features: tuple[tuple[str, int], ...]
    blocks: tuple[int, ...]
    first_row: Tensor
    starts: Tensor
    shifts: tuple[Tensor | None, ...]
    orders: tuple[RowOrder, ...]
    places: tuple[int, ...]
    nodes: int = 1

    @classmethod
    def from_plan(
        cls,
        collection: Collection,
        plan: Mapping[str, Any],
        orders: Mapping[str, RowOrder],
        ranks: int,
        device: torch.device,
        nodes: int = 1,
    ) -> RowLayout:
        """Return the layout of a collection whose tables :func:`parts_by_width` has returned.

        ``plan`` and ``orders`` are by the tables' names; ``nodes`` is as the attribute.

        Raises:
            ValueError: the rows of a table are not in equal blocks, or a rank owns too many rows; says which.
        """
        first_owner, blocks = zip(*(_blocks(table, plan[table.name]) for table in collection.tables))
        counts = torch.zeros(ranks, len(collection.tables), dtype=torch.int64)
        for index, table in enumerate(collection.tables):
            for shard in range(-(-table.rows // blocks[index])):
                counts[first_owner[index] + shard, index] = min(blocks[index], table.rows - shard * blocks[index])
        most = int(counts.sum(dim=1).max())
        if most > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"collection {collection.path!r} has {most} rows of width {collection.tables[0].dim} on one rank, but their "
                "numbers have 32 bits: use more ranks, or a plan that spreads the rows"
            )
        features = tuple((feature, i) for i, each in enumerate(collection.tables) for feature in each.features)
        first_row = torch.cumsum(counts, dim=1) - counts
        each = ranks // nodes
        places = tuple(rank % each * nodes + rank // each if nodes > 1 else rank for rank in range(ranks))
        place_of = torch.tensor(places)
        in_order = torch.argsort(place_of)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts.sum(dim=1)[in_order], dim=0)])
        shifts: list[Tensor | None] = []
        for index, table in enumerate(collection.tables):
            shards = torch.arange(-(-table.rows // blocks[index]))
            owners = first_owner[index] + shards
            shift = starts[place_of[owners]] + first_row[owners, index] - shards * blocks[index]
            if bool(shift.any()):
                shifts.append((shift[:1] if bool((shift == shift[0]).all()) else shift).to(device))
            else:
                shifts.append(None)
        row_orders = tuple(orders[table.name] for table in collection.tables)
        numbers = (blocks, first_row, starts.to(device), tuple(shifts), row_orders, places, nodes)
        return cls(collection.tables, features, *numbers)

    @property
    def ranks(self) -> int:
        """Number of owners."""
        return len(self.starts) - 1

    @property
    def peers(self) -> int:
        """Number of ranks that a rank asks: all owners, or the proxies of its node."""
        return self.ranks // self.nodes

    @property
    def key_bits(self) -> int:
        """Bits of the largest key."""
        return sum(table.rows for table in self.tables).bit_length()

    @property
    def device(self) -> torch.device:
        """Device of the numbers, and of the rows."""
        return self.starts.device

    def rows_of(self, rank: int) -> int:
        """Return how many rows a rank owns."""
        place = self.places[rank]
        return int(self.starts[place + 1] - self.starts[place])

    def keys(self, table: int, ids: Tensor) -> Tensor:
        """Return the key of every id of a table: its row's number, owners numbered through. Both of shape ``[ids]``."""
        shifts, positions = self.shifts[table], self.orders[table].positions(ids)
        if shifts is None:
            return positions
        if len(shifts) > 1:
            return positions + shifts[torch.div(positions, self.blocks[table], rounding_mode="floor")]
        return positions + shifts

    def owners(self, keys: Tensor) -> Tensor:
        """Return the owner of every key."""
        return torch.bucketize(keys, self.starts[1:], right=True)


def parts_by_width(collection: Collection, plan: Mapping[str, Any]) -> list[tuple[Table, ...]]:
    """Return the tables of a collection, those of one width together, and of these first the ones that pool by the sum.

    A table that ``plan`` splits by columns comes as several tables, one for each shard of its columns.
    """
    found = []
    for table in collection.tables:
        columns = sorted({(int(s.shard_offsets[1]), int(s.shard_sizes[1])) for s in plan[table.name].sharding_spec.shards})
        found += [replace(table, first_column=first, dim=min(width, table.dim - first)) for first, width in columns]
    widths = dict.fromkeys(table.dim for table in found)
    return [tuple(sorted((t for t in found if t.dim == width), key=lambda table: table.mean)) for width in widths]


def _blocks(table: Table, sharding: Any) -> tuple[int, int]:
    """Return a table's first owner and its rows per owner."""
    shards = [shard for shard in sharding.sharding_spec.shards if shard.shard_offsets[1] == table.first_column]
    block, first_owner = int(shards[0].shard_sizes[0]), int(shards[0].placement.rank())
    for index, shard in enumerate(shards):
        start = min(index * block, table.rows)
        expected = (start, min(block, table.rows - start), first_owner + index)
        if (shard.shard_offsets[0], shard.shard_sizes[0], shard.placement.rank()) != expected:
            raise ValueError(
                f"the sharding plan does not put the rows of table {table.name!r} in equal blocks on consecutive ranks: let "
                "TorchRec's planner make it, or leave out plan="
            )
    return first_owner, block
