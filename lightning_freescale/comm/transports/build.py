"""Sets the transports up that write into the memory of other GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.transports.base import Transport
from lightning_freescale.comm.transports.gpu.cuda_driver import CudaDriver
from lightning_freescale.comm.transports.host.transport import HostTransport
from lightning_freescale.comm.transports.nccl.communicator import zero_cta
from lightning_freescale.comm.transports.peer.symmetric_buffer import symmetric_buffer
from lightning_freescale.comm.transports.peer.transport import PeerTransport
from lightning_freescale.comm.transports.two_level import TwoLevelTransport


def build(
    kind: str, options: LaneOptions, wire: GlooP2P, host: HostTransport, near: list[int], store: dist.Store, timeout: timedelta
) -> tuple[Transport | None, str]:
    """The transport ``kind``, or why it could not be set up. Collective. Not tested on GPU.

    Args:
        kind: ``"peer"``, ``"two-level"`` or ``"nccl-zero-cta"``.
        options: of the lane.
        wire: of the group.
        host: for the ranks on other hosts.
        near: ranks of the group on this host, this one included.
        store: that only this call uses, on every rank.
        timeout: of NCCL's collectives.
    """
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        if kind == "nccl-zero-cta":
            return zero_cta(options, wire, store, timeout, device), ""
        place, driver = near.index(wire.rank), CudaDriver(device)
        own = dist.PrefixStore(f"from {near[0]}", store)
        slab = symmetric_buffer(place, len(near), options.chunk_bytes, device, own)
        peer = PeerTransport(driver, slab, near, wire.ranks)
        return (peer if kind == "peer" else TwoLevelTransport(peer, host, wire.size)), ""
    except Exception as error:  # all ranks hear of it
        return None, f"{type(error).__name__}: {error}"
