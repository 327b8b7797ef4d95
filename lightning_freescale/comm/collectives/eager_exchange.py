"""An all-to-all without a handshake, for ranks that already know the limits of all sizes.

It follows the eager and rendezvous protocols of MPI. Every rank keeps a receive of fixed size posted for every other rank. A
message consists of a head with the length, and of the part if it is short. For a long part, the receiver posts a receive of
that length after the head. A message is therefore never longer than its receive, for which gloo would end the process, and both
directions of a link are in use even if a rank is late.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transports.p2p import GlooP2P, unprofiled
from lightning_freescale.comm.transports.transport import DTYPE_INDEX, DTYPES, Transfer

# even, and above the tags of headers
_TAG, _LONG_TAG = 2**30, 2**30 + 2
_HEAD = struct.Struct("<qII")  # bytes of the part, number of the exchange, index of the dtype
_START = _HEAD.size

# Two copies of 1 MiB, one at each end, take less CPU time than a second message in chunks.
_SHORT_BYTES, _SHORT_BYTES_OF_ALL_PEERS = 2**20, 2**22

# works for every dtype and takes 2 us; NumPy takes 5 us
_view_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200


class EagerExchange:
    """The exchanges of one lane, one at a time. ``move_long`` moves long parts, as a transfer whose sizes all ranks know."""

    def __init__(self, p2p: GlooP2P, move_long: Callable[[Transfer], None]) -> None:
        self.short_bytes = min(_SHORT_BYTES, _SHORT_BYTES_OF_ALL_PEERS // p2p.size)  # the longest part beside its head
        self._p2p, self._move_long = p2p, move_long
        self._links: list[_Link] = []
        self._number = 0
        self._peer = p2p.rank  # the peer of the current message

    def exchange(self, received: Tensor, send: Tensor, gets: Sequence[int], gives: Sequence[int], timeout: timedelta) -> None:
        outgoing, incoming = (
            _Parts("send", send, "gives", gives, self._p2p),
            _Parts("received", received, "gets", gets, self._p2p),
        )
        if send.dtype is not received.dtype:
            raise ValueError(f"send= is {send.dtype}, received= is {received.dtype}: pass one dtype")
        _keep_own(outgoing, incoming, self._p2p.rank)
        number, kind = self._number, DTYPE_INDEX[send.dtype]
        self._number = (number + 1) % 2**32
        failed = ""
        try:
            self._exchange_messages(outgoing, incoming, number, kind, timeout)
        except dist.DistBackendError:
            raise
        except RuntimeError as error:
            failed = str(error)
        if failed:  # not raised above: gloo's error as context would keep the messages and the connections alive
            raise dist.DistBackendError(self._p2p.explain(failed, self._peer, timeout))
        if max(outgoing.lengths) > self.short_bytes or max(incoming.lengths) > self.short_bytes:
            gives_long, gets_long = (parts.as_tensors(longer_than=self.short_bytes) for parts in (outgoing, incoming))
            cpu = torch.device("cpu")
            self._move_long(Transfer("exchange", gives_long, gets_long, kind, cpu, timeout, number, chunk_tag=_LONG_TAG))

    def drop_receives(self) -> None:
        self._links = []

    def _exchange_messages(self, outgoing: _Parts, incoming: _Parts, number: int, kind: int, timeout: timedelta) -> None:
        gloo, gives, gets = self._p2p.open(), outgoing.lengths, incoming.lengths
        if not self._links:
            self._links = [_Link(peer, self.short_bytes, gloo) for peer in self._p2p.peers]
        links = [link for link in self._links if gives[link.peer] or gets[link.peer]]
        sends = []
        for link in links:
            self._peer = link.peer
            sends.append(gloo.send([link.pack(outgoing, number, kind)], link.peer, _TAG))
        for link in reversed(links):  # in the order in which the peers send to this rank
            self._peer = link.peer
            link.receive.wait(timeout)
            link.unpack(incoming, number, kind, self._p2p.ranks)
            link.post(gloo)
        for link, send in zip(links, sends):
            self._peer = link.peer
            send.wait(timeout)


def _keep_own(outgoing: _Parts, incoming: _Parts, rank: int) -> None:
    length, slot = outgoing.lengths[rank], incoming.lengths[rank]
    if length > slot:
        raise ValueError(f"gives={length} and gets={slot} bytes for the own rank {rank}: pass a longer slot")
    source, target = outgoing.starts[rank], incoming.starts[rank]
    incoming.memory[target : target + length] = outgoing.memory[source : source + length]
    outgoing.lengths[rank] = incoming.lengths[rank] = 0


class _Parts:
    """The parts for every rank, or the slots for the parts from every rank, as slices of ``memory`` in bytes.

    ``lengths`` of slots become the lengths of the received parts.
    """

    __slots__ = ("_tensor", "lengths", "memory", "starts")

    def __init__(self, name: str, tensor: Tensor, sizes_name: str, sizes: Sequence[int], p2p: GlooP2P) -> None:
        sound = tensor.is_cpu and tensor.ndim == 1 and tensor.is_contiguous() and tensor.dtype in DTYPE_INDEX
        if not sound or tensor.is_conj() or tensor.is_neg():  # the memory of such views holds other numbers
            given = f"{name}= is a tensor of {tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}"
            raise ValueError(f"{given}: pass a contiguous CPU tensor of one dimension and a plain number type, resolved")
        if len(sizes) != p2p.size or min(sizes) < 0 or sum(sizes) != tensor.numel():
            raise ValueError(
                f"{sizes_name}={list(sizes)} on rank {p2p.rank} of {p2p.size}, {name}= of length {tensor.numel()}: pass one "
                "size per rank, none negative, that add up to the length"
            )
        width = tensor.itemsize
        self._tensor = tensor
        self.memory = _view_memory(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
        self.lengths = [size * width for size in sizes]
        self.starts = list(accumulate(self.lengths, initial=0))

    def as_tensors(self, longer_than: int) -> list[Tensor]:
        """Return the longer parts, uint8 of shape ``[bytes]``, and empty tensors for the others."""
        flat = self._tensor.detach().view(torch.uint8)
        return [flat[at : at + (size if size > longer_than else 0)] for at, size in zip(self.starts, self.lengths)]


class _FailedReceive:
    """A receive that could not be posted. Its wait raises the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def wait(self, timeout: timedelta) -> NoReturn:
        raise RuntimeError(self._reason)


class _Link:
    """The memory of the messages to and from one peer, and the posted receive."""

    __slots__ = ("_read", "_short_bytes", "_written", "incoming", "outgoing", "peer", "receive")

    def __init__(self, peer: int, short_bytes: int, gloo: Any) -> None:
        self.peer, self._short_bytes = peer, short_bytes
        self._written, self._read = (memoryview(bytearray(_START + short_bytes)) for _ in range(2))
        self.outgoing, self.incoming = (torch.frombuffer(each, dtype=torch.uint8) for each in (self._written, self._read))
        self.post(gloo)

    def post(self, gloo: Any) -> None:
        with unprofiled:
            try:
                self.receive = gloo.recv([self.incoming], self.peer, _TAG)
            except RuntimeError as error:
                # the peer has closed its connections after this exchange, which is an error of the next exchange only
                self.receive = _FailedReceive(str(error))

    def pack(self, parts: _Parts, number: int, kind: int) -> Tensor:
        length, end = parts.lengths[self.peer], _START
        _HEAD.pack_into(self._written, 0, length, number, kind)
        if 0 < length <= self._short_bytes:
            start, end = parts.starts[self.peer], end + length
            self._written[_START:end] = parts.memory[start : start + length]
        return self.outgoing[:end]

    def unpack(self, parts: _Parts, number: int, kind: int, ranks: Sequence[int]) -> None:
        """Copy a short part into the peer's slot, and set the length of the part."""
        length, its_number, its_kind = _HEAD.unpack_from(self._read)
        slot = parts.lengths[self.peer]
        if length > slot or its_number != number or its_kind != kind:
            its_rank = f"rank {ranks[self.peer]}"
            if its_number != number:
                text = (
                    f"{its_rank} is at exchange {its_number}, this rank at {number}. Issue the same exchanges in the same "
                    "order on every rank. Omit a rank (no part and no slot) only if it also omits this rank"
                )
            elif its_kind != kind:
                text = f"{its_rank} sends {DTYPES[its_kind]}, this rank expects {DTYPES[kind]}: pass one dtype on every rank"
            else:
                text = f"{its_rank} sends {length} bytes, and its slot on this rank holds {slot}: pass a longer slot in gets"
            raise dist.DistBackendError(text)
        parts.lengths[self.peer] = length
        if 0 < length <= self._short_bytes:
            start = parts.starts[self.peer]
            parts.memory[start : start + length] = self._read[_START : _START + length]


def exchange_with_sizes(
    group: dist.ProcessGroup, received: Tensor, send: Tensor, gets: Sequence[int], gives: Sequence[int]
) -> None:
    """Run :meth:`ProcessGroupFreeScale.exchange` with CUDA tensors as two all-to-alls. Collective. Not tested on GPU.

    The host waits for the device, because it needs the sizes.
    """
    came = _exchange_sizes(group, gives, send.device)
    for rank, (size, slot) in enumerate(zip(came, gets)):
        if size > slot:
            text = f"rank {rank} sends {size} elements, and its slot on this rank holds {slot}: pass a longer slot"
            raise dist.DistBackendError(text)
    parts = torch.empty(sum(came), dtype=received.dtype, device=received.device)
    dist.all_to_all_single(parts, send, came, list(gives), group=group)
    for start, part in zip(accumulate(gets, initial=0), parts.split(came)):
        received[start : start + part.shape[0]] = part


def exchange_bytes(outgoing: Sequence[bytes], group: dist.ProcessGroup) -> list[Tensor]:
    """Send ``outgoing[r]`` to rank ``r`` of a group for CPU tensors, and return the bytes of each rank, uint8. Collective."""
    given = [len(part) for part in outgoing]
    came = _exchange_sizes(group, given, torch.device("cpu"))
    content, received = bytearray().join(outgoing), torch.empty(sum(came), dtype=torch.uint8)
    send = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    dist.all_to_all_single(received, send, came, given, group=group)
    return list(received.split(came))


def _exchange_sizes(group: dist.ProcessGroup, gives: Sequence[int], device: torch.device) -> list[int]:
    sizes = torch.tensor(gives, device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    return list(coming.tolist())
