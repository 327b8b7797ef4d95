"""Before a collective moves: all ranks are there, take part in the same one, and expect what is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_freescale.comm.header import BYTES, Header
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.parts import DTYPES
from lightning_freescale.comm.transfer import Transfer


class CollectiveHandshake:
    """Exchanges envelopes with all peers; on the host, what is small arrives with them.

    The receives of the next collective are posted while this one runs, so that envelopes need not wait for them.
    """

    def __init__(self, wire: GlooP2P) -> None:
        self._wire = wire
        self._posted: dict[int, list[tuple[dist.Work, bytearray]]] = {}

    def reach(self, transfer: Transfer, refusal: str = "") -> None:
        """Tell all ranks and hear them. Collective.

        Args:
            transfer: what this rank sends and expects; its ``largest`` is set.
            refusal: why this rank cannot take part.

        Raises:
            DistBackendError: a rank refuses, is gone, did not come, or takes part in another way.
        """
        transfer.largest = max(part.shape[0] for part in transfer.outgoing)
        heard = self._exchange(transfer, refusal)
        told = [(self._wire.rank, refusal), *((peer, envelope.refusal) for peer, envelope in heard.items())]
        refusals = [f"rank {self._wire.ranks[peer]} cannot take part: {text}" for peer, text in sorted(told) if text]
        if refusals:
            raise dist.DistBackendError("; ".join(refusals))
        for peer, envelope in heard.items():
            _check(transfer, envelope, peer, self._wire.ranks[peer])
            transfer.largest = max(transfer.largest, envelope.largest)
            if envelope.payload is not None and transfer.fits(envelope.payload):
                transfer.incoming[peer].copy_(envelope.payload)

    def close(self) -> None:
        """Let go of the receives, which would keep the connections open."""
        self._posted.clear()

    def _exchange(self, transfer: Transfer, refusal: str) -> dict[int, Header]:
        wire, number = self._wire, transfer.number
        self._post(number)
        self._post(number + 1)  # before sending: what a rank has sent when it leaves, its peers have read
        packed = [_envelope(transfer, peer, refusal).pack() for peer in wire.peers]
        sends = [wire.send(each, peer, _tag(number)) for each, peer in zip(packed, wire.peers)]
        heard = {}
        for (work, memory), peer in zip(self._posted.pop(number), wire.sources):
            wire.wait(work, peer, transfer.timeout)
            heard[peer] = Header.unpack(memory)
        for work, peer in zip(sends, wire.peers):
            wire.wait(work, peer, transfer.timeout)
        return heard

    def _post(self, number: int) -> None:
        if number not in self._posted:
            memory = [bytearray(BYTES) for _ in self._wire.sources]
            tensors = [torch.frombuffer(each, dtype=torch.uint8) for each in memory]
            works = [self._wire.receive(each, peer, _tag(number)) for each, peer in zip(tensors, self._wire.sources)]
            self._posted[number] = list(zip(works, memory))


def _tag(number: int) -> int:
    """Even; odd ones are those of payloads."""
    return 2 * (number & 0x1FFFFFFF)


def _envelope(transfer: Transfer, peer: int, refusal: str) -> Header:
    part, expects, on_gpu = transfer.outgoing[peer], transfer.incoming[peer].shape[0], transfer.device.type == "cuda"
    payload, sizes = part if transfer.fits(part) else None, (part.shape[0], expects, transfer.largest)
    return Header(transfer.name, transfer.number, *sizes, transfer.dtype, refusal, payload, on_gpu)


def _check(transfer: Transfer, envelope: Header, peer: int, rank: int) -> None:
    theirs = (envelope.name, DTYPES[envelope.dtype], "CUDA" if envelope.on_gpu else "CPU")
    ours = (transfer.name, DTYPES[transfer.dtype], "CUDA" if transfer.device.type == "cuda" else "CPU")
    if theirs != ours:
        told = [f"{name} with {dtype} on {device}" for name, dtype, device in (theirs, ours)]
        raise dist.DistBackendError(
            f"rank {rank} takes part in {told[0]}, this one in {told[1]}: issue the same collectives "
            "in the same order on every rank"
        )
    gets, gives = transfer.incoming[peer].shape[0], transfer.outgoing[peer].shape[0]
    if (envelope.sends, envelope.expects) != (gets, gives):
        raise dist.DistBackendError(
            f"rank {rank} sends {envelope.sends} bytes and expects {envelope.expects}, this one expects {gets} from it and "
            f"sends it {gives}: give split sizes that fit each other on every rank"
        )
