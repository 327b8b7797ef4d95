"""Tensors that are divided among the ranks, such as the weights of sharded tables, and their placeholders in a checkpoint.

A placeholder delays the gathering of its tensor until the checkpoint is written. So no rank holds all tensors at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self, override

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.shards import Shard

Key = tuple[str, ...]
"""The key of a tensor: the key of a table for its weight, followed by the name of a state for an optimizer state."""

_MESSAGE_BYTES = 1 << 24
_DONE, _FAILED = -1, -2
_HARMLESS = {torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.dim}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Piece:
    """The description of the part of a whole tensor that a rank holds."""

    key: Key  # key of the whole tensor
    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: torch.dtype
    place: tuple[slice, ...] = ()  # rows, by position in ``order``, and columns; empty for the whole tensor
    order: RowOrder | None = None  # order of the table's rows

    @classmethod
    def of(cls, shard: Shard, key: Key, value: Tensor) -> Piece:
        """Return the piece for ``value``, the weight or a state of a shard."""
        # a row-wise state has one column in the checkpoint, as in torchrec.optim.RowWiseAdagrad
        shape = (shard.table.rows, 1 if value.dim() == 1 else shard.table.dim)
        return cls(key, shape, value.dtype, shard.place_in(shape), shard.order)

    def as_numbers(self) -> tuple[Any, ...]:
        """Return the piece as values that ranks can exchange."""
        order = self.order and astuple(self.order)
        return self.key, tuple(self.shape), self.dtype, [(each.start, each.stop) for each in self.place], order

    @classmethod
    def from_numbers(cls, values: tuple[Any, ...]) -> Piece:
        """Return the piece for a result of :meth:`as_numbers`."""
        key, shape, dtype, place, order = values
        return cls(key, shape, dtype, tuple(slice(*each) for each in place), order and RowOrder(*order))

    def write(self, values: Tensor, whole: Tensor, after: int = 0) -> None:
        """Copy rows of the piece, beginning with row ``after``, to their places in the whole tensor."""
        if self.order is None:
            whole.copy_(values)
        else:
            self.order.write(values, self.place[0].start + after, self.columns(whole))

    def columns(self, whole: Tensor) -> Tensor:
        """Return a view of the piece's columns, with all rows."""
        return whole[(slice(None), *self.place[1:])]


class SpreadTensors:
    """Tensors by key, divided among the ranks of ``group``, or on one rank if it is None. The constructor is collective.

    ``own`` has this rank's pieces with their live values. ``keys`` is sorted and identical on all ranks.
    """

    def __init__(self, own: Sequence[tuple[Piece, Tensor]], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.own, self._group, self._device = list(own), group, device
        mine = [piece.as_numbers() for piece, _ in own]
        of_ranks = [mine] if group is None else gather_objects(mine, group)
        self._held: dict[Key, list[tuple[int, int, Piece]]] = {}  # rank, and index among the pieces of that rank
        for rank, pieces in enumerate(of_ranks):
            for number, piece in enumerate(map(Piece.from_numbers, pieces)):
                self._held.setdefault(piece.key, []).append((rank, number, piece))
        self.keys = sorted(self._held)

    def copied(self) -> Self:
        """Return the tensors with copies of this rank's values in host memory."""
        found = copy(self)
        found.own = [(piece, value.detach().to("cpu", copy=True)) for piece, value in self.own]
        found._device = torch.device("cpu")
        return found

    def piece(self, key: Key) -> Piece:
        """Return the first piece of a tensor, identical on all ranks, for the attributes that all pieces share."""
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
        """Return all whole tensors on rank 0, an empty dict on other ranks. Collective."""
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


class DeferredTensor(Tensor):
    """A placeholder in a checkpoint for a tensor that is divided among the ranks, until the checkpoint is written.

    It has the tensor's shape and dtype, but no values: its memory is reserved and never touched.
    """

    key: Key

    @classmethod
    def placeholder(cls, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """Return a placeholder for a tensor."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        # torch.empty would fill the memory if deterministic algorithms are enabled
        untouched = torch.empty(0, dtype=dtype).set_(torch.UntypedStorage(size), 0, shape)  # type: ignore[call-overload]
        found = untouched.as_subclass(cls)
        found.key = key
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            name = next((arg.key[0] for arg in args if isinstance(arg, DeferredTensor)), "a table")
            raise RuntimeError(
                f"{name!r} is sharded and has no values in on_save_checkpoint, only a shape and a dtype. Its values are "
                "gathered later, while the checkpoint is written. To use them, call trainer.strategy.full_weight(...) on every "
                "rank before you save."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredTensor({self.key}, shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def storage_of(self) -> torch.UntypedStorage:
        """Return the storage, which identifies the tensor in a pickler."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.untyped_storage()


class Deferral(ABC):
    """The placeholders in one checkpoint, and the source of their values."""

    def __init__(self) -> None:
        self._tensors: list[DeferredTensor] = []

    def new_placeholder(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> DeferredTensor:
        """Return a new placeholder; placeholders are numbered from 0."""
        self._tensors.append(DeferredTensor.placeholder(key, shape, dtype))
        return self._tensors[-1]

    def numbers_by_storage(self) -> dict[int, int]:
        """Return the number of each placeholder that has memory, by the address of its storage."""
        storages = ((number, tensor.storage_of()) for number, tensor in enumerate(self._tensors))
        return {storage._cdata: number for number, storage in storages if storage.nbytes()}

    @abstractmethod
    def fetch(self, number: int) -> Tensor:
        """Return the values of a placeholder."""


class DeferredTensors(Deferral):
    """Placeholders for the tensors ``held``, divided among the ranks. Rank 0 requests their values from the others."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.held: list[SpreadTensors] = []
        self._sources: list[SpreadTensors] = []

    def defer(self, spread: SpreadTensors) -> dict[Key, Tensor]:
        """Return a placeholder for each of the tensors, by key."""
        pieces = {key: spread.piece(key) for key in spread.keys}
        self.held.append(spread)
        self._sources += [spread] * len(pieces)
        return {key: self.new_placeholder(key, piece.shape, piece.dtype) for key, piece in pieces.items()}

    @override
    def fetch(self, number: int) -> Tensor:
        self._broadcast(number)
        whole = self._sources[number].gather(self._tensors[number].key)
        assert whole is not None
        return whole

    def finish(self, failed: bool) -> None:
        """Signal the other ranks that rank 0 needs no more values."""
        self._broadcast(_FAILED if failed else _DONE)

    def serve(self) -> None:
        """Send the values that rank 0 requests until it calls :meth:`finish`; raise a RuntimeError if it has failed."""
        while (number := int(self._broadcast(0))) >= 0:
            self._sources[number].gather(self._tensors[number].key)
        if number == _FAILED:
            raise RuntimeError("rank 0 could not write the checkpoint. See the error on rank 0 for the reason.")

    def _broadcast(self, number: int) -> Tensor:
        """Return the number that rank 0 passes. Rank 0 does not wait for it: another rank may have failed."""
        message = torch.tensor([number], device=self._device)
        dist.broadcast(message, src=0)
        return message
