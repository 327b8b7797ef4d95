"""One collective, as bytes for every rank and bytes from every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


@dataclass
class Transfer:
    """What a transport moves.

    Attributes:
        name: of the collective.
        outgoing: for every rank of the group what it gets, as uint8 of shape ``[bytes]``.
        incoming: for every rank of the group where what it sends goes, likewise.
        dtype: number of the elements' type, the same on every rank.
        device: of all tensors.
        timeout: how long a peer may show no progress.
        number: place in the order of the lane's collectives.
        largest: the most bytes that any rank sends to any other in it; known once the ranks have agreed.
        issued: on CUDA, an event of the caller's stream, after which the tensors may be used.
    """

    name: str
    outgoing: list[Tensor]
    incoming: list[Tensor]
    dtype: int
    device: torch.device
    timeout: timedelta
    number: int = -1
    largest: int = 0
    issued: Any = None

    @staticmethod
    def of(name: str, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], size: int, timeout: timedelta) -> Transfer:
        """Of one tensor per rank in each direction.

        Raises:
            ValueError: the tensors do not fit each other or cannot be sent.
        """
        for what, parts in (("input", outgoing), ("output", incoming)):
            if len(parts) != size:
                raise ValueError(f"{len(parts)} {what} tensors for {size} ranks: pass one per rank")
        first = outgoing[0]
        for what, parts in (("input", outgoing), ("output", incoming)):
            for part in parts:
                _check(what, part, first)
        return Transfer(
            name,
            [_bytes(t) for t in outgoing],
            [_bytes(t) for t in incoming],
            _DTYPES.index(first.dtype),
            first.device,
            timeout,
        )

    @staticmethod
    def none(name: str, size: int, timeout: timedelta) -> Transfer:
        """Of nothing."""
        nothing = [torch.empty(0, dtype=torch.uint8)] * size
        return Transfer(name, nothing, list(nothing), 0, torch.device("cpu"), timeout)

    @property
    def total(self) -> int:
        """Bytes of the larger direction."""
        return max(sum(map(len, self.outgoing)), sum(map(len, self.incoming)))


def dtype_name(number: int) -> str:
    """Of a number as in ``Transfer.dtype``."""
    return str(_DTYPES[number]) if number < len(_DTYPES) else "another type"


def split(what: str, tensor: Tensor, sizes: Sequence[int], size: int) -> list[Tensor]:
    """Cut a tensor along its first dimension, into equal parts if ``sizes`` is empty.

    Raises:
        ValueError: the sizes do not fit.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"the {what} tensor of shape {tuple(tensor.shape)} is not contiguous: pass tensor.contiguous()")
    length = len(tensor) if tensor.ndim else 1
    if not sizes:
        if length % size:
            raise ValueError(
                f"the {what} tensor has length {length}, which {size} ranks cannot share equally: pass split sizes"
            )
        sizes = [length // size] * size
    if len(sizes) != size or sum(sizes) != length or min(sizes) < 0:
        raise ValueError(
            f"{what}_split_sizes={list(sizes)} for {size} ranks and a tensor of length {length}: pass one size per rank, none "
            "negative, that add up to the length"
        )
    return list(tensor.reshape(length, *tensor.shape[1:]).split(list(sizes)))


def _check(what: str, tensor: Tensor, first: Tensor) -> None:
    told = f"the {what} tensor of shape {tuple(tensor.shape)}"
    if tensor.layout != torch.strided:
        raise ValueError(f"{told} has layout {tensor.layout}: pass a dense one")
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"{told} has dtype {tensor.dtype}, which cannot be sent: pass a plain number type, e.g. its int_repr()"
        )
    if tensor.dtype != first.dtype:
        raise ValueError(f"{told} has dtype {tensor.dtype}, another {first.dtype}: pass one dtype")
    if tensor.device != first.device:
        raise ValueError(f"{told} is on {tensor.device}, another on {first.device}: pass one device")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{told} is on {tensor.device}: only CPU and CUDA tensors can be sent")
    if not tensor.is_contiguous():
        raise ValueError(f"{told} is not contiguous: pass tensor.contiguous()")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
