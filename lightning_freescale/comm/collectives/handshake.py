"""Before a collective moves: all ranks are there, take part in the same one, and expect what is sent.

Gloo ends the process when a message is larger than the receive posted for it, and says nothing when it is smaller. So every
rank first sends every other a header of fixed size with what it sends and expects. Small parts travel in the header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.transports.transfer import DTYPES, PAYLOAD_BYTES, Transfer

_FIELDS = struct.Struct("<IIIqqqqI32s")
HEADER_BYTES = _FIELDS.size + PAYLOAD_BYTES
_MAGIC = 0x46534331


@dataclass(frozen=True)
class Header:
    """The part of a rank in a collective, as it describes it to one peer."""

    name: str
    sequence_number: int
    sends: int  # bytes, to the peer
    expects: int  # bytes, from the peer
    largest: int  # bytes, to any rank
    dtype_index: int
    refusal: str = ""  # why the rank cannot take part
    payload: Tensor | None = None  # the bytes that it sends, if they fit
    on_gpu: bool = False  # then there is no payload

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


class CollectiveHandshake:
    """Exchanges headers with all peers; on the host, what is small arrives with them."""

    def __init__(self, p2p: GlooP2P) -> None:
        self._p2p = p2p
        self._posted: dict[int, list[tuple[dist.Work, bytearray]]] = {}

    def exchange_headers(self, transfer: Transfer, refusal: str = "") -> None:
        """Compare this rank's part of a collective, or its refusal, with those of all ranks; set ``transfer.largest``."""
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
        """Let go of the receives posted ahead, which would keep the connections open."""
        self._posted.clear()

    def _exchange(self, transfer: Transfer, refusal: str) -> dict[int, Header]:
        p2p, number = self._p2p, transfer.sequence_number
        self._post_receives(number)
        # A collective ahead, so that its headers need not wait for them; and before sending: what a rank has sent when it
        # leaves, its peers have read.
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
    return 2 * (number & 0x1FFFFFFF)  # even; odd ones are those of chunks


def _make_header(transfer: Transfer, peer: int, refusal: str) -> Header:
    part, expects, on_gpu = transfer.outgoing[peer], transfer.incoming[peer].shape[0], transfer.device.type == "cuda"
    payload, sizes = part if transfer.fits_in_header(part) else None, (part.shape[0], expects, transfer.largest)
    return Header(transfer.name, transfer.sequence_number, *sizes, transfer.dtype_index, refusal, payload, on_gpu)


def _check_header(transfer: Transfer, header: Header, peer: int, global_rank: int) -> None:
    theirs = (header.name, DTYPES[header.dtype_index], "CUDA" if header.on_gpu else "CPU")
    ours = (transfer.name, DTYPES[transfer.dtype_index], "CUDA" if transfer.device.type == "cuda" else "CPU")
    if theirs != ours:
        parts = [f"{name} with {dtype} on {device}" for name, dtype, device in (theirs, ours)]
        raise dist.DistBackendError(
            f"rank {global_rank} takes part in {parts[0]}, this one in {parts[1]}: issue the same collectives "
            "in the same order on every rank"
        )
    gets, gives = transfer.incoming[peer].shape[0], transfer.outgoing[peer].shape[0]
    if (header.sends, header.expects) != (gets, gives):
        raise dist.DistBackendError(
            f"rank {global_rank} sends {header.sends} bytes and expects {header.expects}, this one expects {gets} from it and "
            f"sends it {gives}: give split sizes that fit each other on every rank"
        )
