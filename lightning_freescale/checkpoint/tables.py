"""Move tables between shards on all ranks and whole tensors on rank 0, one table at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.embeddings.collections import Table
from lightning_freescale.embeddings.shards import Shard, ShardedTables

_ROWS_PER_MESSAGE = 1 << 20


@dataclass(frozen=True)
class _Piece:
    """One shard's part of a tensor: all that a receiver must know of it."""

    key: str
    name: str
    rows: slice
    columns: slice
    shape: torch.Size
    dtype: torch.dtype


def gather_weights(tables: ShardedTables) -> dict[str, Tensor]:
    """Whole weights on the CPU of rank 0, by state-dict key; empty on other ranks. Collective."""
    pieces = [(shard, "weight", shard.weight) for shard in tables.shards()]
    return {key: whole for key, _, whole in _gather(tables, pieces)}


def gather_states(tables: ShardedTables) -> dict[str, dict[str, Tensor]]:
    """Whole optimizer states on the CPU of rank 0, by table key and torch's state name. Collective."""
    pieces = [(shard, name, value) for shard in tables.shards() for name, value in shard.state.items()]
    found: dict[str, dict[str, Tensor]] = {}
    for key, name, whole in _gather(tables, pieces):
        found.setdefault(key, {})[name] = whole
    return found


@torch.no_grad()
def scatter_weights(tables: ShardedTables, whole: Mapping[str, Tensor]) -> None:
    """Copy each rank's part of ``whole`` (by state-dict key) into its shards; keys that are missing are left alone.

    Raises:
        RuntimeError: a tensor has another shape than its table.
    """
    for table in tables.tables:
        source = whole.get(table.key)
        if source is not None and source.shape != (table.rows, table.dim):
            raise RuntimeError(
                f"size mismatch for {table.key}: the checkpoint has {tuple(source.shape)}, the table is "
                f"({table.rows}, {table.dim})"
            )
    for shard in tables.shards():
        if shard.table.key in whole:
            shard.weight.copy_(whole[shard.table.key][shard.rows, shard.columns])


@torch.no_grad()
def scatter_states(tables: ShardedTables, whole: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy each rank's part of the optimizer states (by table key and state name) into its shards."""
    for shard in tables.shards():
        for name, value in shard.state.items():
            source = whole.get(shard.table.key, {}).get(name)
            if source is not None:
                value.copy_(_cut(source, shard.rows, shard.columns).reshape(value.shape))


def _gather(tables: ShardedTables, mine: list[tuple[Shard, str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    described = [_Piece(s.table.key, name, s.rows, s.columns, t.shape, t.dtype) for s, name, t in mine]
    everyone: list[list[_Piece]] = [[]] * tables.group.size()
    dist.all_gather_object(everyone, described, group=tables.group)
    table_of = {table.key: table for table in tables.tables}
    for key, name in sorted({(piece.key, piece.name) for pieces in everyone for piece in pieces}):
        whole: Tensor | None = None
        for owner, pieces in enumerate(everyone):
            for index, piece in enumerate(pieces):
                if (piece.key, piece.name) != (key, name):
                    continue
                part = mine[index][2] if owner == tables.group.rank() else None
                if tables.group.rank() == 0:
                    whole = _room(table_of[key], piece) if whole is None else whole
                    place = _cut(whole, piece.rows, piece.columns)
                    receive_rows(tables, owner, place) if part is None else place.copy_(part.reshape(place.shape))
                elif part is not None:
                    send_rows(tables, part)
        if whole is not None:
            yield key, name, whole


def _room(table: Table, piece: _Piece) -> Tensor:
    """A row-wise state has one column in the checkpoint, as torchrec.optim.RowWiseAdagrad's has."""
    return torch.empty(table.rows, 1 if len(piece.shape) == 1 else table.dim, dtype=piece.dtype)


def _cut(whole: Tensor, rows: slice, columns: slice) -> Tensor:
    return whole[rows] if whole.shape[1] == 1 else whole[rows, columns]


def send_rows(tables: ShardedTables, part: Tensor) -> None:
    """Send a tensor to rank 0 in pieces."""
    for rows in part.contiguous().split(_ROWS_PER_MESSAGE):
        if rows.numel():
            dist.send(rows, 0, group=tables.group)


def receive_rows(tables: ShardedTables, owner: int, place: Tensor) -> None:
    """Receive on rank 0 into ``place``, on the CPU, what rank ``owner`` sends with :func:`send_rows`."""
    for rows in place.split(_ROWS_PER_MESSAGE):
        if rows.numel():
            buffer = torch.empty(rows.shape, dtype=place.dtype, device=tables.device)
            dist.recv(buffer, owner, group=tables.group)
            rows.copy_(buffer)
