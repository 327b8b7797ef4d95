"""Tensors that are divided among the ranks, such as the weights of sharded tables, and their placeholders in a checkpoint.

A placeholder delays the gathering of its tensor until the checkpoint is written. So no rank holds all tensors at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import astuple, dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self, override

from lightning_freescale._runtime.object_gather import gather_objects, together
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.shards import Shard

Key = tuple[str, ...]
"""The key of a tensor: the key of a table for its weight, followed by the name of a state for an optimizer state."""

_MESSAGE_BYTES = 1 << 24
_DONE, _WAIT = -1, -2
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
        self.own, self.group, self._device = list(own), group, device
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

    def gather(self, key: Key, failure: str = "a table could not be gathered") -> Tensor | None:
        """Return a whole tensor on the CPU of rank 0, None on other ranks. Collective.

        All ranks allocate memory before one sends. If a rank cannot, all ranks raise ``failure``, see :func:`.together`.
        """
        me, dtype = 0 if self.group is None else self.group.rank(), self.piece(key).dtype
        whole, message = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)

        def allocate() -> None:
            nonlocal whole, message
            if me == 0:
                whole = torch.empty(self.piece(key).shape, dtype=dtype)
            sizes = [parts[0].numel() for _, _, parts in self._messages(key, me, whole)]
            message = torch.empty(max(sizes, default=0), dtype=dtype, device=self._device)

        together(allocate, failure, self.group)
        for rank, number, piece in self._held[key]:
            if rank == me == 0:
                piece.write(self.own[number][1], whole)
        for rank, piece, parts in self._messages(key, me, whole):
            for number, part in enumerate(parts):
                buffer = message[: part.numel()].view(part.shape)
                if me:
                    dist.send(buffer.copy_(part), 0, group=self.group)
                else:
                    dist.recv(buffer, rank, group=self.group)
                    piece.write(buffer, whole, after=number * len(parts[0]))
        return None if me else whole

    def gather_all(self) -> dict[Key, Tensor]:
        """Return all whole tensors on rank 0, an empty dict on other ranks. Collective."""
        found = ((key, self.gather(key)) for key in self.keys)
        return {key: whole for key, whole in found if whole is not None}

    def _messages(self, key: Key, me: int, whole: Tensor) -> Iterator[tuple[int, Piece, tuple[Tensor, ...]]]:
        """Yield each piece that rank ``me`` sends or receives: its owner, the piece, and its rows, split into messages."""
        for rank, number, piece in self._held[key]:
            if rank and me in (0, rank):
                values = self.own[number][1].detach() if me else piece.columns(whole)[piece.place[0]]
                if values.numel():
                    yield rank, piece, values.split(max(1, _MESSAGE_BYTES // values[0].nbytes))


class DeferredTensor(Tensor):
    """A placeholder in a checkpoint for a tensor that is divided among the ranks, until the checkpoint is written.

    It has the tensor's shape and dtype, but no values: its memory is reserved and never touched.
    """

    key: Key

    @classmethod
    def placeholder(cls, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        # torch.empty would fill the memory if deterministic algorithms are enabled
        storage = torch.UntypedStorage(prod(shape) * dtype.itemsize)
        untouched = torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
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
        with torch._C.DisableTorchFunctionSubclass():
            storages = [tensor.untyped_storage() for tensor in self._tensors]
        return {storage._cdata: number for number, storage in enumerate(storages) if storage.nbytes()}

    @abstractmethod
    def fetch(self, number: int) -> Tensor:
        """Return the values of a placeholder."""

    def wait_longer(self) -> None:  # noqa: B027 (without other ranks there is nothing to do)
        """Restart the timeout of the ranks that wait for this one."""


class DeferredTensors(Deferral):
    """Placeholders for the tensors ``held``, divided among the ranks. Rank 0 requests their values from the others.

    ``failure`` is the beginning of errors, such as "the checkpoint ... could not be written".
    """

    def __init__(self, failure: str) -> None:
        super().__init__()
        self._failure = failure
        self.held: list[SpreadTensors] = []
        self._sources: list[SpreadTensors] = []
        self._in_step = True  # whether the other ranks wait for a request of rank 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the tables. Without tables, the default group."""
        return self.held[0].group if self.held else dist.group.WORLD

    def defer(self, spread: SpreadTensors) -> dict[Key, Tensor]:
        """Return a placeholder for each of the tensors, by key."""
        pieces = {key: spread.piece(key) for key in spread.keys}
        self.held.append(spread)
        self._sources += [spread] * len(pieces)
        return {key: self.new_placeholder(key, piece.shape, piece.dtype) for key, piece in pieces.items()}

    @override
    def fetch(self, number: int) -> Tensor:
        whole = self._request(lambda: number)
        assert whole is not None
        return whole

    @override
    def wait_longer(self) -> None:
        self._request(lambda: _WAIT)

    def finish(self, error: Exception | None = None) -> None:
        """Signal the other ranks that rank 0 needs no more values. After an error of rank 0, all ranks raise a RuntimeError."""

        def end() -> int:
            if error is not None:
                raise error
            return _DONE

        if self._in_step:
            self._request(end)

    def serve(self) -> None:
        """Send the values that rank 0 requests until it calls :meth:`finish`."""
        while self._in_step:
            self._request(None)

    def _request(self, request: Callable[[], int] | None) -> Tensor | None:
        """Do what rank 0 requests; other ranks pass None. Collective."""
        self._in_step, whole = False, None
        number = together(request, self._failure, self.group)[0]
        if number >= 0:
            whole = self._sources[number].gather(self._tensors[number].key, self._failure)
        self._in_step = number != _DONE
        return whole
