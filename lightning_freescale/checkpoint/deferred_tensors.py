"""Tensors that are gathered one after the other while a checkpoint is written, so that no rank holds all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self, override

from lightning_freescale.checkpoint.spread_tensors import Key, SpreadTensors

_DONE, _FAILED = -1, -2
_HARMLESS = {torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.dim}  # type: ignore[attr-defined]


class DeferredTensor(Tensor):
    """Placeholder in a checkpoint for a tensor that is spread over the ranks, until the checkpoint is written.

    It has the tensor's shape and dtype, and no values: its memory is reserved and never touched.

    Attributes:
        key: key of the tensor.
    """

    key: Key

    @classmethod
    def standing_for(cls, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """Return a placeholder for a tensor."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        # not torch.empty, which fills memory where deterministic algorithms are asked for
        untouched = torch.empty(0, dtype=dtype).set_(torch.UntypedStorage(size), 0, shape)  # type: ignore[call-overload]
        found = untouched.as_subclass(cls)
        found.key = key
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            name = next((arg.key[0] for arg in args if isinstance(arg, DeferredTensor)), "a table")
            raise RuntimeError(
                f"{name!r} is sharded, and gathered only while the checkpoint is written: on_save_checkpoint finds no values "
                "in it, only shape and dtype. Take trainer.strategy.full_weight(...), on every rank, before you save"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredTensor({self.key}, shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def storage_of(self) -> torch.UntypedStorage:
        """Return the storage, by which a pickler identifies the tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.untyped_storage()


class Deferral(ABC):
    """The placeholders in one checkpoint, and the source of their values."""

    def __init__(self) -> None:
        self._tensors: list[DeferredTensor] = []

    def stand_in(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> DeferredTensor:
        """Return another placeholder; placeholders are numbered from 0."""
        self._tensors.append(DeferredTensor.standing_for(key, shape, dtype))
        return self._tensors[-1]

    def numbers_by_storage(self) -> dict[int, int]:
        """Return the number of each placeholder that has memory, by the address of torch's storage."""
        storages = ((number, tensor.storage_of()) for number, tensor in enumerate(self._tensors))
        return {storage._cdata: number for number, storage in storages if storage.nbytes()}

    @abstractmethod
    def fetch(self, number: int) -> Tensor:
        """Return the values of a placeholder."""


class DeferredTensors(Deferral):
    """Placeholders for tensors that are spread over the ranks. Rank 0 receives their values from the others.

    Args:
        device: device of the default group's messages.

    Attributes:
        held: the tensors in the order in which they were deferred, the same on every rank.
    """

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
        return {key: self.stand_in(key, piece.shape, piece.dtype) for key, piece in pieces.items()}

    @override
    def fetch(self, number: int) -> Tensor:
        """Return the values of a placeholder on rank 0, which requests them; the other ranks must be in :meth:`serve`."""
        self._send(number)
        whole = self._sources[number].gather(self._tensors[number].key)
        assert whole is not None
        return whole

    def finish(self, failed: bool) -> None:
        """Tell the other ranks that rank 0 needs no more values."""
        self._send(_FAILED if failed else _DONE)

    def serve(self) -> None:
        """Send the values that rank 0 requests, until it needs no more.

        Raises:
            RuntimeError: rank 0 could not write the checkpoint.
        """
        while (number := self._receive()) >= 0:
            self._sources[number].gather(self._tensors[number].key)
        if number == _FAILED:
            raise RuntimeError("rank 0 could not write the checkpoint: its own error says why")

    def _send(self, number: int) -> None:
        dist.broadcast(torch.tensor([number], device=self._device), src=0)

    def _receive(self) -> int:
        number = torch.empty(1, dtype=torch.int64, device=self._device)
        dist.broadcast(number, src=0)
        return int(number)
