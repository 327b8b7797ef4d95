"""The message of fixed size that every rank sends to every other before anything else of a collective moves.

Gloo ends the process when a message is larger than the receive posted for it, and says nothing when it is smaller. So the
ranks first tell each other what they will send, and compare it with what they expect; what is small travels in the header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

HEADER_BYTES = 1024
_FIELDS = struct.Struct("<IIIqqqqI32s")
PAYLOAD_BYTES = HEADER_BYTES - _FIELDS.size
"""Bytes of tensors, or of a refusal's text, that fit into a header."""
_MAGIC = 0x46534331


@dataclass(frozen=True)
class Header:
    """What a rank says about its part of a collective.

    Attributes:
        sequence_number: in the lane's order.
        sends: bytes that the addressee gets.
        expects: bytes that the addressee should send.
        largest: the most that any rank gets from the sender.
        refusal: why the sender cannot take part; empty if it can.
        payload: the bytes themselves, if they fit.
        on_gpu: whether the tensors are; then the header has no payload.
    """

    name: str
    sequence_number: int
    sends: int
    expects: int
    largest: int
    dtype_index: int
    refusal: str = ""
    payload: Tensor | None = None
    on_gpu: bool = False

    def pack(self) -> Tensor:
        """Return the message, uint8 of shape ``[HEADER_BYTES]``."""
        raw, text = bytearray(HEADER_BYTES), self.refusal.encode()[:PAYLOAD_BYTES]
        sizes = (self.sequence_number, self.sends, self.expects, self.largest, len(text))
        _FIELDS.pack_into(raw, 0, _MAGIC, self.dtype_index, self.on_gpu, *sizes, self.name.encode())
        raw[_FIELDS.size : _FIELDS.size + len(text)] = text
        packed = torch.frombuffer(raw, dtype=torch.uint8)
        if self.payload is not None and not text and 0 < self.sends <= PAYLOAD_BYTES:
            packed[_FIELDS.size : _FIELDS.size + self.sends] = self.payload
        return packed

    @staticmethod
    def unpack(raw: bytearray) -> Header:
        """Read what a peer has packed, ``HEADER_BYTES`` long."""
        magic, dtype_index, on_gpu, number, sends, expects, largest, length, name = _FIELDS.unpack_from(raw)
        assert magic == _MAGIC
        text = raw[_FIELDS.size : _FIELDS.size + length].decode(errors="replace")
        fits = 0 < sends <= PAYLOAD_BYTES and not text and not on_gpu
        payload = torch.frombuffer(raw, dtype=torch.uint8, count=sends, offset=_FIELDS.size) if fits else None
        return Header(name.rstrip(b"\0").decode(), number, sends, expects, largest, dtype_index, text, payload, bool(on_gpu))
