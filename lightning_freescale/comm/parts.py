"""Tensors as bytes for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""What can be sent; the ranks tell each other the place in this list."""
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class RankBuffers:
    """What goes to every rank, or where what comes from it goes.

    Attributes:
        pieces: for every rank uint8 of shape ``[bytes]``, in the memory of the tensors.
        dtype: of the tensors, as its place in :data:`DTYPES`.
        device: of the tensors.
    """

    pieces: list[Tensor]
    dtype: int
    device: torch.device

    @staticmethod
    def cut(what: str, tensor: Tensor, sizes: Sequence[int] | None, ranks: int) -> RankBuffers:
        """One tensor, cut along its first dimension; into equal parts if ``sizes`` is empty, of all its elements if None.

        Raises:
            ValueError: the sizes do not fit, or the tensor cannot be sent; ``what`` names it.
        """
        flat = _bytes(what, tensor)
        length = tensor.numel() if sizes is None or not tensor.ndim else tensor.shape[0]
        if not sizes:
            if length % ranks:
                raise ValueError(f"the {what} has length {length}, which {ranks} ranks cannot share equally: pass split sizes")
            sizes = [length // ranks] * ranks
        if len(sizes) != ranks or sum(sizes) != length or min(sizes) < 0:
            raise ValueError(
                f"{what}_split_sizes={list(sizes)} for {ranks} ranks and a tensor of length {length}: pass one size per rank, "
                "none negative, that add up to the length"
            )
        width = flat.shape[0] // length if length else 0
        return RankBuffers(list(flat.split([size * width for size in sizes])), _NUMBERS[tensor.dtype], tensor.device)

    @staticmethod
    def listed(what: str, tensors: Sequence[Tensor], ranks: int) -> RankBuffers:
        """One tensor per rank.

        Raises:
            ValueError: there are more or fewer, or they cannot be sent.
        """
        if len(tensors) != ranks:
            raise ValueError(f"{len(tensors)} {what} tensors for {ranks} ranks: pass one per rank")
        pieces, kinds = [_bytes(what, tensor) for tensor in tensors], {(tensor.dtype, tensor.device) for tensor in tensors}
        if len(kinds) > 1:
            raise ValueError(f"{what} tensors of {' and '.join(sorted(map(_kind, kinds)))}: pass one dtype and one device")
        return RankBuffers(pieces, _NUMBERS[tensors[0].dtype], tensors[0].device)

    @staticmethod
    def repeated(tensor: Tensor, ranks: int) -> RankBuffers:
        """The same tensor for every rank.

        Raises:
            ValueError: it cannot be sent.
        """
        return RankBuffers([_bytes("input", tensor)] * ranks, _NUMBERS[tensor.dtype], tensor.device)

    @staticmethod
    def none(ranks: int) -> RankBuffers:
        """Nothing for anybody."""
        return RankBuffers([torch.empty(0, dtype=torch.uint8)] * ranks, 0, torch.device("cpu"))

    @property
    def kind(self) -> str:
        """Of the tensors, for errors."""
        return _kind((DTYPES[self.dtype], self.device))

    def total(self) -> int:
        """Bytes of all parts."""
        return sum(piece.shape[0] for piece in self.pieces)


def _kind(kind: tuple[torch.dtype, torch.device]) -> str:
    return f"{kind[0]} on {kind[1]}"


def _bytes(what: str, tensor: Tensor) -> Tensor:
    told = f"the {what} tensor of shape {tuple(tensor.shape)}"
    if tensor.layout != torch.strided:
        raise ValueError(f"{told} has layout {tensor.layout}: pass a dense one")
    if tensor.dtype not in _NUMBERS:
        raise ValueError(f"{told} has dtype {tensor.dtype}, which cannot be sent: pass a plain number type")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{told} is on {tensor.device}: only CPU and CUDA tensors can be sent")
    if not tensor.is_contiguous():
        raise ValueError(f"{told} is not contiguous: pass tensor.contiguous()")
    return tensor.detach().view(-1).view(torch.uint8)
