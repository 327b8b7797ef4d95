"""An all-to-all whose ranks have agreed by themselves: what they send and expect is not compared before it moves.

The way of MPI's eager and rendezvous messages. Every rank keeps a receive of fixed size posted for every other. A short part is
copied behind a head that tells its length, and that is the only message. Of a long part the head goes first; the receive for
the part is posted when it has come, with the length it tells. So no message can be longer than its receive, for which gloo
would end the process, and both directions of a link are at work also when a rank is late.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.transfer import DTYPE_INDEX, DTYPES, Transfer

# even, and above those of headers
_TAG, _LONG_TAG = 2**30, 2**30 + 2
_HEAD = struct.Struct("<qII")  # bytes of the part, number of the exchange, index of the dtype
_START = _HEAD.size

# To copy 64 KiB takes 3 us, a second message 30 and more.
_SHORT_BYTES, _SHORT_BYTES_OF_ALL_PEERS = 2**16, 2**22

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory  # for every dtype, and in 1 us
_view_memory.argtypes, _view_memory.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_WRITABLE = 0x200


class EagerExchange:
    """Runs the exchanges of one lane, one at a time.

    ``move_long`` moves what fits in no message, as a transfer whose sizes all ranks know.
    """

    def __init__(self, p2p: GlooP2P, move_long: Callable[[Transfer], None]) -> None:
        self.short_bytes = min(_SHORT_BYTES, _SHORT_BYTES_OF_ALL_PEERS // p2p.size)
        """The longest part that travels with its head."""
        self._p2p, self._move_long = p2p, move_long
        self._links: list[_Link] = []
        self._number = 0
        self._peer = p2p.rank  # whose message is being sent or waited for

    def exchange(self, received: Tensor, send: Tensor, gets: Sequence[int], gives: Sequence[int], timeout: timedelta) -> None:
        """Do as :meth:`FreeScaleGroup.exchange <lightning_freescale.comm.FreeScaleGroup.exchange>`. Collective.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: the tensors are on a GPU.
            DistBackendError: a peer is gone, did not come, or sends what does not fit.
        """
        _check_tensors(received, send)
        _check_sizes("gets", gets, "received", received, self._p2p)
        _check_sizes("gives", gives, "send", send, self._p2p)
        parts = _Parts.of(received, send, gets, gives, self._number)
        self._number = (self._number + 1) % 2**32
        failed = ""
        try:
            self._exchange_messages(parts, timeout)
        except dist.DistBackendError:
            raise
        except RuntimeError as error:
            failed = str(error)
        if failed:  # not raised above, as an error whose context is gloo's would keep the messages, and they the connections
            raise dist.DistBackendError(self._p2p.explain(failed, self._peer, timeout))
        if max(parts.given) > self.short_bytes or max(parts.got) > self.short_bytes:
            self._move_long(parts.as_transfer(received, send, self.short_bytes, timeout))

    def drop_receives(self) -> None:
        """Let go of the receives posted ahead, which would keep the connections open."""
        self._links = []

    def _exchange_messages(self, parts: _Parts, timeout: timedelta) -> None:
        gloo = self._p2p.open()
        if not self._links:
            self._links = [_Link(peer, self.short_bytes, gloo) for peer in self._p2p.peers]
        links = [link for link in self._links if parts.room[link.peer] or parts.given[link.peer]]
        sends = []
        for link in links:
            self._peer = link.peer
            sends.append(gloo.send([link.pack(parts)], link.peer, _TAG))
        for link in reversed(links):  # in the order in which they send here
            self._peer = link.peer
            link.receive.wait(timeout)
            link.unpack(parts, self._p2p.ranks[link.peer])
            link.post_receive(gloo)
        for link, send in zip(links, sends):
            self._peer = link.peer
            send.wait(timeout)


@dataclass
class _Parts:
    """What goes to every rank and comes from it, in bytes.

    Attributes:
        given: length of each rank's part of ``send``, which begins at ``given_at``.
        room: length of each rank's slot in ``received``, which begins at ``room_at``.
        got: how much of the slot is filled; from peers whose head has not come 0.
        number: of the exchange.
        kind: index of the dtype.
    """

    send: memoryview
    given: list[int]
    given_at: list[int]
    received: memoryview
    room: list[int]
    room_at: list[int]
    got: list[int]
    number: int
    kind: int

    @staticmethod
    def of(received: Tensor, send: Tensor, gets: Sequence[int], gives: Sequence[int], number: int) -> _Parts:
        width = send.element_size()
        given, room = [size * width for size in gives], [size * width for size in gets]
        memory = [_view_memory(tensor.data_ptr(), tensor.nbytes, _WRITABLE) for tensor in (send, received)]
        starts = [list(accumulate(lengths, initial=0)) for lengths in (given, room)]
        return _Parts(memory[0], given, starts[0], memory[1], room, starts[1], [0] * len(room), number, DTYPE_INDEX[send.dtype])

    def as_transfer(self, received: Tensor, send: Tensor, short_bytes: int, timeout: timedelta) -> Transfer:
        """Return what has not come with a head."""
        ways = (send, self.given_at, self.given), (received, self.room_at, self.got)
        outgoing, incoming = (
            [flat[start : start + (length if length > short_bytes else 0)] for start, length in zip(starts, lengths)]
            for flat, starts, lengths in ((way[0].detach().view(torch.uint8), *way[1:]) for way in ways)
        )
        total = max(sum(map(len, outgoing)), sum(map(len, incoming)))
        return Transfer(
            "exchange", outgoing, incoming, self.kind, send.device, total, timeout, self.number, chunk_tag=_LONG_TAG
        )


class _Link:
    """The memory of messages to and from one peer, and the receive that is posted for the next."""

    def __init__(self, peer: int, short_bytes: int, gloo: Any) -> None:
        self.peer, self._short_bytes = peer, short_bytes
        self._outgoing, self._incoming = (bytearray(_START + short_bytes) for _ in range(2))
        self._outgoing_as_tensor, self._incoming_as_tensor = (
            torch.frombuffer(memory, dtype=torch.uint8) for memory in (self._outgoing, self._incoming)
        )
        self.post_receive(gloo)

    def post_receive(self, gloo: Any) -> None:
        self.receive = gloo.recv([self._incoming_as_tensor], self.peer, _TAG)

    def pack(self, parts: _Parts) -> Tensor:
        """Return the message for the peer: its part, or only how long it is."""
        length, end = parts.given[self.peer], _START
        _HEAD.pack_into(self._outgoing, 0, length, parts.number, parts.kind)
        if length <= self._short_bytes:
            start, end = parts.given_at[self.peer], end + length
            self._outgoing[_START:end] = parts.send[start : start + length]
        return self._outgoing_as_tensor[:end]

    def unpack(self, parts: _Parts, rank: int) -> None:
        """Take the peer's part from the message that has come, if it is short; ``rank`` is the peer's, for errors."""
        length, number, kind = _HEAD.unpack_from(self._incoming)
        if number != parts.number:
            raise dist.DistBackendError(
                f"rank {rank} is at its exchange {number}, this one at {parts.number}: issue the same exchanges in the same "
                "order on every rank, and leave a peer out (no part, no slot) only where it leaves out this rank"
            )
        if kind != parts.kind:
            raise dist.DistBackendError(
                f"rank {rank} sends {DTYPES[kind]}, this one expects {DTYPES[parts.kind]}: pass one dtype"
            )
        if length > parts.room[self.peer]:
            raise dist.DistBackendError(
                f"rank {rank} sends {length} bytes, but its slot here has {parts.room[self.peer]}: give it a longer one in gets"
            )
        parts.got[self.peer] = length
        if length <= self._short_bytes:
            start = parts.room_at[self.peer]
            parts.received[start : start + length] = memoryview(self._incoming)[_START : _START + length]


def _check_tensors(received: Tensor, send: Tensor) -> None:
    for name, tensor in (("received", received), ("send", send)):
        if tensor.is_cuda:
            raise NotImplementedError(
                f"{name}= is on {tensor.device}: pass CPU tensors, or call all_to_all_single with slots as long as the parts"
            )
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.ndim != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}= is a tensor of shape {tuple(tensor.shape)}, {tensor.layout} on {tensor.device}: pass a contiguous "
                "one of one dimension on the CPU"
            )
        if tensor.dtype not in DTYPE_INDEX:
            raise ValueError(f"{name}= has dtype {tensor.dtype}, which cannot be sent: pass a plain number type")
    if received.dtype != send.dtype:
        raise ValueError(f"send= is {send.dtype}, received= is {received.dtype}: pass one dtype")


def _check_sizes(name: str, sizes: Sequence[int], of: str, tensor: Tensor, p2p: GlooP2P) -> None:
    if len(sizes) != p2p.size or min(sizes) < 0 or sizes[p2p.rank] or sum(sizes) != tensor.shape[0]:
        raise ValueError(
            f"{name}={list(sizes)} for rank {p2p.rank} of {p2p.size} and {of}= of length {tensor.shape[0]}: pass one size per "
            "rank, 0 for the own rank and none negative, that add up to the length"
        )
