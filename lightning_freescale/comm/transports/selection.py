"""Which transports a topology allows, and why not the others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_freescale.comm.transports.base import TransportRefused

if TYPE_CHECKING:
    from lightning_freescale.comm.transports.topology import Topology

_log = logging.getLogger(__name__)


def decide(transport: str, topology: Topology) -> str:
    """Which transport ``LaneOptions(transport=...)`` means here: ``"host"``, ``"native"``, or a name of :func:`refusal`.

    Raises:
        TransportRefused: the one that is named cannot be had.
    """
    if transport in ("host", "native"):
        return transport
    if transport != "auto":
        if reason := refusal(transport, topology):
            raise TransportRefused(f"transport={transport!r} {reason}")
        return transport
    refusals = {kind: refusal(kind, topology) for kind in ("peer", "two-level")}
    chosen = next((kind for kind, reason in refusals.items() if not reason), "host")
    if chosen == "host" and not topology.lacking("gpu"):
        _log.info("transport='auto' takes 'host': %s", "; ".join(f"{kind!r} {reason}" for kind, reason in refusals.items()))
    return chosen


def refusal(transport: str, topology: Topology) -> str:
    """Why ``"peer"``, ``"two-level"`` or ``"nccl-zero-cta"`` cannot be had, and what to do; empty if it can."""
    if ranks := topology.lacking("gpu"):
        return f"moves CUDA tensors, and torch sees no CUDA device on {ranks}: pass 'auto' or 'host'"
    if ranks := topology.lacking("bindings"):
        return f"needs the package cuda-bindings, which {ranks} cannot import: install it, or pass 'auto' or 'host'"
    return {"peer": _no_peer, "two-level": _no_two_level, "nccl-zero-cta": _no_zero_cta}[transport](topology)


def _no_peer(topology: Topology) -> str:
    gap = topology.unlinked(range(topology.size))
    return gap and f"needs all ranks in one NVLink domain; {gap}: {_instead(topology)}"


def _no_two_level(topology: Topology) -> str:
    if topology.one_host:
        return f"needs ranks on several hosts; all are on {topology.stations[0].host}: pass 'peer' or 'auto'"
    if all(len(ranks) == 1 for ranks in topology.hosts.values()):
        return "needs several ranks on a host; every rank has its own: pass 'host' or 'auto'"
    gap = next((gap for ranks in topology.hosts.values() if (gap := topology.unlinked(ranks))), "")
    return gap and f"needs each host's ranks in one NVLink domain; {gap}: {_instead(topology)}"


def _no_zero_cta(topology: Topology) -> str:
    """Where NCCL would silently launch kernels instead."""
    versions = {station.nccl for station in topology.stations}
    if topology.size == 1:
        return "needs at least 2 ranks: pass 'auto'"
    if len(versions) > 1 or min(versions) < (2, 28):
        told = ", ".join(".".join(map(str, version)) or "none" for version in sorted(versions))
        return f"needs the same NCCL of at least 2.28 on every rank; found {told}: pass 'auto'"
    if (driver := min(station.driver for station in topology.stations)) < 12050:
        return f"needs a CUDA driver of at least 12.5 on every rank; found {driver // 1000}.{driver % 1000 // 10}: pass 'auto'"
    if ranks := topology.lacking("zero_cta"):
        return f"needs a torch that has ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO, which {ranks} lacks: pass 'auto'"
    gap = topology.unlinked(range(topology.size)) or topology.sharing()
    return gap and f"needs all ranks in one NVLink domain, each with its own GPU; {gap}: {_instead(topology)}"


def _instead(topology: Topology) -> str:
    if topology.sharing():
        return "call torch.cuda.set_device before the group is made, or pass 'host'"
    return "pass 'auto' or 'host'" if topology.one_host else "pass 'two-level' or 'auto'"
