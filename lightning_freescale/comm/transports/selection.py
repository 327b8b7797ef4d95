"""The choice and the set-up of a transport: which transports the hardware of a group allows, and why not the others."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import asdict
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_freescale._runtime.error_text import error_text
from lightning_freescale._runtime.worker import call_on_daemon
from lightning_freescale.comm.options import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.transports.cuda_driver import CudaDriver
from lightning_freescale.comm.transports.host import HostTransport
from lightning_freescale.comm.transports.nccl import NcclCommunicator, ZeroCtaTransport
from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.transports.peer import PeerTransport, TwoLevelTransport
from lightning_freescale.comm.transports.peer_link import SymmetricBuffer, allocate_symmetric_buffer
from lightning_freescale.comm.transports.topology import RankHardware, Topology
from lightning_freescale.comm.transports.transport import Transport

_SAME_ON_ALL_RANKS = ("transport", "chunk_bytes", "priority")


class TransportRefused(RuntimeError):  # noqa: N818 (says what happened)
    """A transport is not available with this hardware and software. The message states the reason and an alternative."""


def gather_topology(options: ProcessGroupFreeScaleOptions, p2p: GlooP2P) -> Topology:
    """Gather the hardware of all ranks and compare their options. Collective."""
    hardware = RankHardware.from_this_process(options.transport)
    mine = {"options": {name: getattr(options, name) for name in _SAME_ON_ALL_RANKS}, "hardware": asdict(hardware)}
    gathered = p2p.gather_json(mine)
    for name in _SAME_ON_ALL_RANKS:
        values = [each["options"][name] for each in gathered]
        if any(value != values[0] for value in values):
            found = ", ".join(f"{value!r} on rank {rank}" for rank, value in zip(p2p.ranks, values))
            raise ValueError(
                f"ProcessGroupFreeScaleOptions differ between ranks: {name}= is {found}. Pass the same options on every rank"
            )
    return Topology(tuple(RankHardware(**each["hardware"]) for each in gathered), tuple(p2p.ranks))


def set_up_transport(
    kind: str, topology: Topology, host: HostTransport, store: dist.Store, timeout: timedelta
) -> Transport | None:
    """Return the transport of that name for CUDA tensors; None for torch's own backend. Collective.

    Only this call uses the store.
    """
    if kind in ("host", "native"):
        return host if kind == "host" else None
    if reason := refusal(kind, topology):
        raise TransportRefused(f"transport={kind!r} {reason}")
    p2p = host.p2p
    near = next(ranks for ranks in topology.hosts.values() if p2p.rank in ranks)
    # the other ranks wait for the reason for the whole timeout, which is enough if all begin within the other fifth of it
    limit = 0.8 * timeout.total_seconds()
    built = call_on_daemon(partial(build_transport, kind, host, near, store, timeout), "freescale set-up")
    try:
        wait([built], limit)
        if not built.done():  # NCCL and torch's symmetric memory wait for a rank that has failed
            reason = f"the set-up did not end within {limit:g} s"
        else:
            reason = error_text(error) if (error := built.exception()) else ""  # all ranks receive the text
        reasons = p2p.gather_json(reason)
        if failed := "; ".join(f"rank {rank}: {text}" for rank, text in zip(p2p.ranks, reasons) if text):
            raise TransportRefused(f"transport={kind!r} could not be set up: {failed}: pass 'native' or 'host'")
    except BaseException:
        built.add_done_callback(_close_built)  # also if the set-up ends later
        raise
    return built.result()


def _close_built(built: Future[Transport]) -> None:
    if built.exception() is None:
        built.result().close()


def auto_candidates(topology: Topology) -> list[str]:
    """Return the transports that ``"auto"`` may use instead of torch's own backend; none without a GPU on every rank."""
    if topology.size == 1 or topology.find_lacking("gpu"):
        return []
    return [*(kind for kind in ("peer", "two-level") if not refusal(kind, topology)), "host"]


def refusal(transport: str, topology: Topology) -> str:
    """Return why ``"peer"``, ``"two-level"`` or ``"nccl-zero-cta"`` is not available, and the fix; empty if it is available."""
    if ranks := topology.find_lacking("gpu"):
        return f"moves CUDA tensors, and torch sees no CUDA device on {ranks}: pass 'auto' or 'host'"
    if ranks := topology.find_lacking("bindings"):
        return f"needs the package cuda-bindings, which {ranks} cannot import: install it, or pass 'auto' or 'host'"
    return {"peer": _no_peer, "two-level": _no_two_level, "nccl-zero-cta": _no_zero_cta}[transport](topology)


def _no_peer(topology: Topology) -> str:
    gap = topology.find_unlinked(range(topology.size))
    return gap and f"needs all ranks in one NVLink domain; {gap}: {_instead(topology)}"


def _no_two_level(topology: Topology) -> str:
    if topology.one_host:
        return f"needs ranks on several hosts; all are on {topology.hardware[0].host}: pass 'peer' or 'auto'"
    if all(len(ranks) == 1 for ranks in topology.hosts.values()):
        return "needs several ranks on a host; every rank has its own: pass 'host' or 'auto'"
    gap = next((gap for ranks in topology.hosts.values() if (gap := topology.find_unlinked(ranks))), "")
    return gap and f"needs each host's ranks in one NVLink domain; {gap}: {_instead(topology)}"


def _no_zero_cta(topology: Topology) -> str:
    # if a condition is not met, NCCL silently launches kernels instead
    versions = {tuple(hardware.nccl) for hardware in topology.hardware}  # other ranks' are lists, as JSON has no tuples
    if topology.size == 1:
        return "needs at least 2 ranks: pass 'auto'"
    if len(versions) > 1 or min(versions) < (2, 28):
        found = ", ".join(".".join(map(str, version)) or "none" for version in sorted(versions))
        return f"needs the same NCCL of at least 2.28 on every rank; found {found}: pass 'auto'"
    if (driver := min(hardware.driver for hardware in topology.hardware)) < 12050:
        return f"needs a CUDA driver of at least 12.5 on every rank; found {driver // 1000}.{driver % 1000 // 10}: pass 'auto'"
    if ranks := topology.find_lacking("zero_cta"):
        return f"needs a torch that has ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO, which {ranks} lacks: pass 'auto'"
    gap = topology.find_unlinked(range(topology.size)) or topology.find_shared_gpu()
    return gap and f"needs all ranks in one NVLink domain, each with its own GPU; {gap}: {_instead(topology)}"


def _instead(topology: Topology) -> str:
    if topology.find_shared_gpu():
        return "call torch.cuda.set_device before you create the group, or pass 'host'"
    return "pass 'auto' or 'host'" if topology.one_host else "pass 'two-level' or 'auto'"


def build_transport(kind: str, host: HostTransport, near: list[int], store: dist.Store, timeout: timedelta) -> Transport:
    """Return ``"peer"``, ``"two-level"`` or ``"nccl-zero-cta"``. Collective.

    ``near`` contains the ranks of the group on this host, this one included. Not tested on GPU.
    """
    p2p = host.p2p
    device = torch.device("cuda", torch.cuda.current_device())
    if kind == "nccl-zero-cta":
        communicator = NcclCommunicator(p2p.rank, p2p.size, store, timeout, device)
        zero_cta = ZeroCtaTransport(CudaDriver(device), communicator, p2p.size)
        try:
            zero_cta.require_copy_engines(timeout)
        except BaseException:
            zero_cta.close()
            raise
        return zero_cta
    driver, near_store = CudaDriver(device), dist.PrefixStore(f"from {near[0]}", store)
    chunk = SymmetricBuffer.largest_chunk(len(near))
    buffer = allocate_symmetric_buffer(near.index(p2p.rank), len(near), chunk, device, near_store)
    peer = PeerTransport(driver, buffer, near, p2p.ranks)
    return peer if kind == "peer" else TwoLevelTransport(peer, host, p2p.size)
