"""Before a collective moves: all ranks are there, take part in the same one, and expect what is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.envelope import BYTES, ROOM, Envelope
from lightning_freescale.comm.transfer import Transfer, dtype_name
from lightning_freescale.comm.wire import Wire

_EMPTY = torch.empty(0, dtype=torch.uint8)


class Refused(dist.DistBackendError):
    """A rank cannot take part, and all ranks know: the next collective may be sound."""


def agree(transfer: Transfer, wire: Wire, refusal: str = "") -> None:
    """Exchange envelopes with all peers; on the host, what is small arrives with them. Collective.

    Args:
        transfer: what this rank sends and expects; its ``largest`` is set, and parts that have come with the envelopes are
            taken out of it.
        wire: to the peers.
        refusal: why this rank cannot take part.

    Raises:
        Refused: on every rank, if a rank refuses.
        DistBackendError: a peer is gone, did not come, or takes part in another way.
    """
    outgoing = [_EMPTY] * wire.size if refusal else transfer.outgoing
    transfer.largest = max(map(len, outgoing))
    heard = _exchange([_envelope(transfer, part, peer, refusal) for peer, part in enumerate(outgoing)], transfer, wire)
    refusals = {wire.rank: refusal, **{peer: envelope.refusal for peer, envelope in heard.items()}}
    told = [f"rank {wire.ranks[peer]} cannot take part: {text}" for peer, text in sorted(refusals.items()) if text]
    if told:
        raise Refused("; ".join(told))
    for peer, envelope in heard.items():
        _check(transfer, envelope, peer, wire)
    transfer.largest = max(transfer.largest, *(envelope.largest for envelope in heard.values())) if heard else transfer.largest
    if transfer.device.type == "cpu":
        _take_small(transfer, heard)


def _envelope(transfer: Transfer, part: Tensor, peer: int, refusal: str) -> Envelope:
    payload = part if part.device.type == "cpu" else None
    expects = len(transfer.incoming[peer]) if not refusal else 0
    return Envelope(transfer.name, transfer.number, len(part), expects, transfer.largest, transfer.dtype, refusal, payload)


def _exchange(envelopes: list[Envelope], transfer: Transfer, wire: Wire) -> dict[int, Envelope]:
    tag, memory = 2 * transfer.number, {peer: _EMPTY.new_empty(BYTES) for peer in wire.sources}
    works = [(wire.receive(each, peer, tag), peer) for peer, each in memory.items()]
    packed = [(envelopes[peer].pack(), peer) for peer in wire.peers]
    works += [(wire.send(each, peer, tag), peer) for each, peer in packed]
    for work, peer in works:
        wire.wait(work, peer, transfer.timeout)
    return {peer: Envelope.unpack(each) for peer, each in memory.items()}


def _check(transfer: Transfer, envelope: Envelope, peer: int, wire: Wire) -> None:
    rank = wire.ranks[peer]
    if (envelope.name, envelope.dtype) != (transfer.name, transfer.dtype):
        raise dist.DistBackendError(
            f"rank {rank} takes part in {envelope.name} with {dtype_name(envelope.dtype)}, this one with "
            f"{dtype_name(transfer.dtype)}: issue the same collectives in the same order on every rank"
        )
    gets, gives = len(transfer.incoming[peer]), len(transfer.outgoing[peer])
    if (envelope.sends, envelope.expects) != (gets, gives):
        raise dist.DistBackendError(
            f"rank {rank} sends {envelope.sends} bytes and expects {envelope.expects}, this one expects {gets} from it and "
            f"sends it {gives}: give split sizes that fit each other on every rank"
        )


def _take_small(transfer: Transfer, heard: dict[int, Envelope]) -> None:
    for peer, envelope in heard.items():
        if envelope.payload is not None:
            transfer.incoming[peer].copy_(envelope.payload)
            transfer.incoming[peer] = _EMPTY
        if len(transfer.outgoing[peer]) <= ROOM:
            transfer.outgoing[peer] = _EMPTY
