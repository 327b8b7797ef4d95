"""The interface of a transport, and the transfer that it moves: one collective as bytes for and from every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

PAYLOAD_BYTES = 944
"""The largest part, in bytes, that travels in the header of a collective."""
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""The dtypes that can be sent. Headers contain the index in this tuple."""
DTYPE_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}


class Transport(Protocol):
    """A way to move the bytes of a collective between the ranks of a group.

    To add a transport, implement this class in a module of this package. Then add its name to ``TRANSPORTS`` in ``options.py``,
    and create it in ``selection.py``. ``CollectiveExecutor`` uses it for CUDA tensors. A transport for CPU tensors replaces
    :class:`.HostTransport` in the executor, which also posts the first chunks before the handshake.

    The executor makes all calls. It calls :meth:`move` on the thread of the lane, one transfer at a time, after all ranks have
    agreed on the sizes, in the same order on every rank.
    """

    def move(self, transfer: Transfer, pause: Callable[[], None]) -> None:
        """Fill ``transfer.incoming`` with the parts that the ranks send to this one, and return when they are complete.

        - Call ``pause`` between two chunks. It blocks while a lane of higher priority has work.
        - Order work on a GPU after ``transfer.issued``.
        - Leave out parts for which ``transfer.fits_in_header`` is true. They have arrived with the headers.
        - Copy the part that this rank sends to itself.

        Any exception ends the lane on all ranks. Wait for a peer for at most ``transfer.timeout`` without progress, and then
        raise a DistBackendError that names the peer.
        """

    def close(self) -> None:
        """Stop the transfer in flight, if any, and release all memory and streams. Another thread may run :meth:`move`."""


@dataclass(frozen=True)
class RankBuffers:
    """The memory to send from or to receive in, for every rank. The constructors raise ValueError for unsuitable tensors."""

    buffers: list[Tensor]  # one per rank, uint8 of shape [bytes], in the memory of the tensors
    dtype_index: int  # in DTYPES
    device: torch.device

    @staticmethod
    def from_tensor(what: str, tensor: Tensor, sizes: Sequence[int] | None, ranks: int) -> RankBuffers:
        """Split a tensor along its first dimension, equally if ``sizes`` is empty. None splits its elements equally."""
        flat = _as_bytes(what, tensor)
        length = tensor.numel() if sizes is None or not tensor.ndim else tensor.shape[0]
        if not sizes:
            if length % ranks:
                raise ValueError(f"the {what} has length {length}, which is not divisible by {ranks} ranks: pass split sizes")
            sizes = [length // ranks] * ranks
        if len(sizes) != ranks or sum(sizes) != length or min(sizes) < 0:
            raise ValueError(
                f"{what}_split_sizes={list(sizes)} for {ranks} ranks and a tensor of length {length}: pass one size per rank, "
                "none negative, that add up to the length"
            )
        width = flat.shape[0] // length if length else 0
        return RankBuffers(list(flat.split([size * width for size in sizes])), DTYPE_INDEX[tensor.dtype], tensor.device)

    @staticmethod
    def from_tensors(what: str, tensors: Sequence[Tensor], ranks: int) -> RankBuffers:
        if len(tensors) != ranks:
            raise ValueError(f"{len(tensors)} {what} tensors for {ranks} ranks: pass one per rank")
        buffers = [_as_bytes(what, tensor) for tensor in tensors]
        kinds = {f"{tensor.dtype} on {tensor.device}" for tensor in tensors}
        if len(kinds) > 1:
            raise ValueError(f"{what} tensors of {' and '.join(sorted(kinds))}: pass one dtype and one device")
        return RankBuffers(buffers, DTYPE_INDEX[tensors[0].dtype], tensors[0].device)

    @property
    def kind(self) -> str:
        return f"{DTYPES[self.dtype_index]} on {self.device}"


@dataclass
class Transfer:
    """The part of this rank in a collective, as a transport moves it."""

    name: str
    outgoing: list[Tensor]  # the bytes to send to each rank of the group, uint8 of shape [bytes]
    incoming: list[Tensor]  # the memory for the bytes from each rank of the group, likewise
    dtype_index: int  # of the elements, in DTYPES
    device: torch.device
    timeout: timedelta  # how long a peer may show no progress
    sequence_number: int  # in the order of the lane's collectives
    largest: int = 0  # the most bytes that any rank sends to any other; known once the ranks have agreed
    issued: Any = None  # on CUDA, an event of the caller's stream, after which the tensors may be used
    # The tag of all chunks on the host, if the ranks know each other's sizes. Otherwise every size has its own tag, and small
    # parts travel in the header.
    chunk_tag: int | None = None

    @staticmethod
    def from_buffers(
        name: str, outgoing: RankBuffers, incoming: RankBuffers, rank: int, timeout: timedelta, sequence_number: int
    ) -> Transfer:
        """Create a transfer after a check of the outgoing buffers against the incoming ones of this ``rank``."""
        if (outgoing.dtype_index, outgoing.device) != (incoming.dtype_index, incoming.device):
            raise ValueError(f"the input is {outgoing.kind}, the output {incoming.kind}: pass one dtype and one device")
        gives, gets = outgoing.buffers[rank].shape[0], incoming.buffers[rank].shape[0]
        if gives != gets:
            raise ValueError(f"the rank sends itself {gives} bytes and expects {gets}: pass equal sizes")
        parts = outgoing.buffers, incoming.buffers
        return Transfer(name, *parts, outgoing.dtype_index, outgoing.device, timeout, sequence_number)

    def fits_in_header(self, part: Tensor) -> bool:
        return self.chunk_tag is None and self.device.type == "cpu" and part.shape[0] <= PAYLOAD_BYTES


def _as_bytes(what: str, tensor: Tensor) -> Tensor:
    given = f"the {what} tensor of shape {tuple(tensor.shape)}"
    if tensor.layout != torch.strided:
        raise ValueError(f"{given} has layout {tensor.layout}: pass a dense tensor")
    if tensor.dtype not in DTYPE_INDEX:
        raise ValueError(f"{given} has dtype {tensor.dtype}, which cannot be sent: pass a tensor of a plain number type")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{given} is on {tensor.device}: only CPU and CUDA tensors can be sent")
    if not tensor.is_contiguous():
        raise ValueError(f"{given} is not contiguous: pass tensor.contiguous()")
    # a tensor of one element or none counts as contiguous with any stride, even 0, and then has no view as bytes
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
