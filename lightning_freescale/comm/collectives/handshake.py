"""The handshake before a collective: all ranks run the same collective, with sizes that fit each other.

Gloo ends the process if a message is larger than its receive, and reports nothing if it is smaller. Every rank therefore first
sends every other rank a header of fixed size with the sizes that it sends and expects. Small parts travel in the header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.transports.transport import DTYPES, PAYLOAD_BYTES, Transfer

_FIELDS = struct.Struct("<IIqqqI32s")
HEADER_BYTES = _FIELDS.size + PAYLOAD_BYTES


@dataclass(frozen=True)
class Header:
    """The description of a rank's part in a collective for one peer."""

    name: str
    sends: int  # bytes, to the peer
    expects: int  # bytes, from the peer
    largest: int  # bytes, to any rank
    dtype_index: int
    refusal: str = ""  # why the rank cannot take part
    payload: Tensor | None = None  # the bytes that it sends, if they fit
    on_gpu: bool = False  # a header for GPU tensors has no payload

    def pack(self) -> Tensor:
        """Return the message, uint8 of shape ``[HEADER_BYTES]``."""
        raw, text = bytearray(HEADER_BYTES), self.refusal.encode()[:PAYLOAD_BYTES]
        sizes = (self.sends, self.expects, self.largest, len(text))
        _FIELDS.pack_into(raw, 0, self.dtype_index, self.on_gpu, *sizes, self.name.encode())
        raw[_FIELDS.size : _FIELDS.size + len(text)] = text
        packed = torch.frombuffer(raw, dtype=torch.uint8)
        if self.payload is not None and not text and 0 < self.sends <= PAYLOAD_BYTES:
            packed[_FIELDS.size : _FIELDS.size + self.sends] = self.payload
        return packed

    @staticmethod
    def unpack(raw: bytearray) -> Header:
        dtype_index, on_gpu, sends, expects, largest, length, name = _FIELDS.unpack_from(raw)
        text = raw[_FIELDS.size : _FIELDS.size + length].decode(errors="replace")
        fits = 0 < sends <= PAYLOAD_BYTES and not text and not on_gpu
        payload = torch.frombuffer(raw, dtype=torch.uint8, count=sends, offset=_FIELDS.size) if fits else None
        return Header(name.rstrip(b"\0").decode(), sends, expects, largest, dtype_index, text, payload, bool(on_gpu))


class CollectiveHandshake:
    """The exchange of headers with all peers. Small parts on the host arrive with the headers."""

    def __init__(self, p2p: GlooP2P) -> None:
        self._p2p = p2p
        self._posted: dict[int, list[tuple[dist.Work, bytearray]]] = {}

    def exchange_headers(self, transfer: Transfer, refusal: str = "") -> None:
        """Compare this rank's part, or its refusal, with those of all ranks, and set ``transfer.largest``."""
        transfer.largest = max(part.shape[0] for part in transfer.outgoing)
        headers = self._exchange(transfer, refusal)
        texts = [(self._p2p.rank, refusal), *((peer, header.refusal) for peer, header in headers.items())]
        refusals = [f"rank {self._p2p.ranks[peer]} cannot take part: {text}" for peer, text in sorted(texts) if text]
        if refusals:
            raise dist.DistBackendError("; ".join(refusals))
        for peer, header in headers.items():
            _check_header(transfer, header, peer, self._p2p.ranks[peer])
            transfer.largest = max(transfer.largest, header.largest)
            if header.payload is not None and transfer.fits_in_header(header.payload):
                transfer.incoming[peer].copy_(header.payload)

    def drop_receives(self) -> None:
        """Delete the receives posted ahead, which would keep the connections open."""
        self._posted.clear()

    def _exchange(self, transfer: Transfer, refusal: str) -> dict[int, Header]:
        p2p, number = self._p2p, transfer.sequence_number
        self._post_receives(number)
        # Post the receives of the next collective now, so that its headers need not wait for them. Post them before sending, so
        # that the peers have read everything that a rank has sent when it leaves.
        self._post_receives(number + 1)
        messages = [_make_header(transfer, peer, refusal).pack() for peer in p2p.peers]
        sends = [p2p.send(message, peer, _tag(number)) for message, peer in zip(messages, p2p.peers)]
        headers = {}
        for (work, memory), peer in zip(self._posted.pop(number), p2p.sources):
            p2p.wait(work, peer, transfer.timeout)
            headers[peer] = Header.unpack(memory)
        for work, peer in zip(sends, p2p.peers):
            p2p.wait(work, peer, transfer.timeout)
        return headers

    def _post_receives(self, number: int) -> None:
        if number not in self._posted:
            memory = [bytearray(HEADER_BYTES) for _ in self._p2p.sources]
            tensors = [torch.frombuffer(each, dtype=torch.uint8) for each in memory]
            works = [self._p2p.receive(tensor, peer, _tag(number)) for tensor, peer in zip(tensors, self._p2p.sources)]
            self._posted[number] = list(zip(works, memory))


def _tag(number: int) -> int:
    return 2 * (number & 0x1FFFFFFF)  # even; chunks have odd tags


def _make_header(transfer: Transfer, peer: int, refusal: str) -> Header:
    part, expects, on_gpu = transfer.outgoing[peer], transfer.incoming[peer].shape[0], transfer.device.type == "cuda"
    payload, sizes = part if transfer.fits_in_header(part) else None, (part.shape[0], expects, transfer.largest)
    return Header(transfer.name, *sizes, transfer.dtype_index, refusal, payload, on_gpu)


def _check_header(transfer: Transfer, header: Header, peer: int, global_rank: int) -> None:
    theirs = (header.name, DTYPES[header.dtype_index], "CUDA" if header.on_gpu else "CPU")
    ours = (transfer.name, DTYPES[transfer.dtype_index], "CUDA" if transfer.device.type == "cuda" else "CPU")
    if theirs != ours:
        parts = [f"{name} with {dtype} on {device}" for name, dtype, device in (theirs, ours)]
        raise dist.DistBackendError(
            f"rank {global_rank} takes part in {parts[0]}, this rank in {parts[1]}. Issue the same collectives in the same "
            "order on every rank"
        )
    gets, gives = transfer.incoming[peer].shape[0], transfer.outgoing[peer].shape[0]
    if (header.sends, header.expects) != (gets, gives):
        raise dist.DistBackendError(
            f"rank {global_rank} sends {header.sends} bytes and expects {header.expects}. This rank expects {gets} bytes and "
            f"sends {gives}. Pass split sizes that fit each other on every rank"
        )
