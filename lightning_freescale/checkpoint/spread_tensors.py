"""Tensors that are divided among the ranks: the weights of sharded tables, and their optimizer states."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.shards import Shard

Key = tuple[str, ...]
"""The key of a table for its weight; that key and the name of a state for an optimizer state."""

_MESSAGE_BYTES = 1 << 24


@dataclass(frozen=True)
class Piece:
    """Description of the part of a whole tensor that a rank holds.

    Attributes:
        key: key of the whole tensor.
        shape: shape of the whole tensor.
        dtype: dtype of both.
        place: rows, by their positions in ``order``, and columns of the piece; empty if it is the whole.
        order: order of the table's rows.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[slice, ...] = ()
    order: RowOrder | None = None

    @classmethod
    def of(cls, shard: Shard, key: Key, value: Tensor) -> Piece:
        """Return the piece that ``value``, the weight or a state of a shard, is of the whole tensor."""
        # a row-wise state has one column in the checkpoint, as that of torchrec.optim.RowWiseAdagrad has
        shape = (shard.table.rows, 1 if value.dim() == 1 else shard.table.dim)
        return cls(key, shape, value.dtype, shard.place_in(shape), shard.order)

    def as_numbers(self) -> tuple[Any, ...]:
        """Return the piece in values that ranks can exchange."""
        order = self.order and (self.order.rows, self.order.multiplier, self.order.offset)
        return self.key, tuple(self.shape), self.dtype, [(each.start, each.stop) for each in self.place], order

    @classmethod
    def from_numbers(cls, values: tuple[Any, ...]) -> Piece:
        """Return the piece for a result of :meth:`as_numbers`."""
        key, shape, dtype, place, order = values
        return cls(key, shape, dtype, tuple(slice(*each) for each in place), order and RowOrder(*order))

    def write(self, values: Tensor, whole: Tensor, after: int = 0) -> None:
        """Copy rows of the piece to their places in the whole tensor; ``after`` is the number of rows before them."""
        if self.order is None:
            whole.copy_(values)
        else:
            self.order.write(values, self.place[0].start + after, self.columns(whole))

    def columns(self, whole: Tensor) -> Tensor:
        """Return a view of the piece's columns, with all rows."""
        return whole[(slice(None), *self.place[1:])]


class SpreadTensors:
    """Tensors by key, divided among the ranks. The constructor is collective.

    Args:
        own: this rank's pieces with their live values.
        group: process group of the ranks; None if there is one rank.
        device: device of the messages, see :meth:`ShardedTables.message_device`.

    Attributes:
        keys: keys of the tensors, sorted, the same on every rank.
        own: this rank's pieces.
    """

    def __init__(self, own: Sequence[tuple[Piece, Tensor]], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.own, self._group, self._device = list(own), group, device
        mine = [piece.as_numbers() for piece, _ in own]
        of_ranks = [mine] if group is None else gather_objects(mine, group)
        self._held: dict[Key, list[tuple[int, int, Piece]]] = {}  # rank, number among its own
        for rank, pieces in enumerate(of_ranks):
            for number, piece in enumerate(map(Piece.from_numbers, pieces)):
                self._held.setdefault(piece.key, []).append((rank, number, piece))
        self.keys = sorted(self._held)

    def copied(self) -> Self:
        """Return the same tensors with copies of this rank's values in host memory."""
        found = copy(self)
        found.own = [(piece, value.detach().to("cpu", copy=True)) for piece, value in self.own]
        found._device = torch.device("cpu")
        return found

    def piece(self, key: Key) -> Piece:
        """Return one of the pieces of a tensor, the same on every rank, for the attributes that all of them share."""
        return self._held[key][0][2]

    def gather(self, key: Key) -> Tensor | None:
        """Return a whole tensor on the CPU of rank 0, None on other ranks. Collective."""
        me = 0 if self._group is None else self._group.rank()
        whole = torch.empty(self.piece(key).shape, dtype=self.piece(key).dtype) if me == 0 else None
        for rank, number, piece in self._held[key]:
            if whole is None:
                if rank == me:
                    self._send(self.own[number][1])
            elif rank == 0:
                piece.write(self.own[number][1], whole)
            else:
                self._receive(rank, piece, whole)
        return whole

    def gather_all(self) -> dict[Key, Tensor]:
        """Return all whole tensors on rank 0, nothing on other ranks. Collective."""
        found = ((key, self.gather(key)) for key in self.keys)
        return {key: whole for key, whole in found if whole is not None}

    def _send(self, value: Tensor) -> None:
        if value.numel():
            for rows in value.contiguous().split(_rows_per_message(value)):
                dist.send(rows.to(self._device), 0, group=self._group)

    def _receive(self, owner: int, piece: Piece, whole: Tensor) -> None:
        rows, columns = piece.place[0].stop - piece.place[0].start, piece.columns(whole)
        if not rows or not columns.numel():
            return
        most = _rows_per_message(columns)
        for start in range(0, rows, most):
            buffer = torch.empty((min(most, rows - start), *columns.shape[1:]), dtype=piece.dtype, device=self._device)
            dist.recv(buffer, owner, group=self._group)
            piece.write(buffer, whole, after=start)


def _rows_per_message(values: Tensor) -> int:
    return max(1, _MESSAGE_BYTES // values[0].nbytes)
