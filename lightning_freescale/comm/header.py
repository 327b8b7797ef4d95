"""The message of fixed size that every rank sends to every other before anything else of a collective moves.

Gloo ends the process when a message is larger than the receive posted for it, and says nothing when it is smaller. So the
ranks first tell each other what they will send, and compare it with what they expect; what is small travels in the envelope.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

BYTES = 1024
_HEAD = struct.Struct("<IIIqqqqI32s")
ROOM = BYTES - _HEAD.size
"""Bytes that fit into an envelope."""
_MAGIC = 0x46534331


@dataclass(frozen=True)
class Header:
    """What a rank says about its part of a collective.

    Attributes:
        name: of the collective.
        number: its place in the lane's order.
        sends: bytes that the addressee gets.
        expects: bytes that the addressee should send.
        largest: the most that any rank gets from the sender.
        dtype: number of the elements' type.
        refusal: why the sender cannot take part; empty if it can.
        payload: the bytes themselves, if they fit.
        on_gpu: whether the tensors are; then the envelope has no payload.
    """

    name: str
    number: int
    sends: int
    expects: int
    largest: int
    dtype: int
    refusal: str = ""
    payload: Tensor | None = None
    on_gpu: bool = False

    def pack(self) -> Tensor:
        """As uint8 of shape ``[BYTES]``."""
        raw, text = bytearray(BYTES), self.refusal.encode()[:ROOM]
        sizes = (self.number, self.sends, self.expects, self.largest, len(text))
        _HEAD.pack_into(raw, 0, _MAGIC, self.dtype, self.on_gpu, *sizes, self.name.encode())
        raw[_HEAD.size : _HEAD.size + len(text)] = text
        packed = torch.frombuffer(raw, dtype=torch.uint8)
        if self.payload is not None and not text and 0 < self.sends <= ROOM:
            packed[_HEAD.size : _HEAD.size + self.sends] = self.payload
        return packed

    @staticmethod
    def unpack(raw: bytearray) -> Header:
        """What a peer has packed, ``BYTES`` long."""
        magic, dtype, on_gpu, number, sends, expects, largest, length, name = _HEAD.unpack_from(raw)
        assert magic == _MAGIC
        text = raw[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        fits = 0 < sends <= ROOM and not text and not on_gpu
        payload = torch.frombuffer(raw, dtype=torch.uint8, count=sends, offset=_HEAD.size) if fits else None
        return Header(name.rstrip(b"\0").decode(), number, sends, expects, largest, dtype, text, payload, bool(on_gpu))
