"""Which ranks share a host and which a fast link between GPUs, and which transport that makes possible."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.transports.base import Transport, TransportRefused
from lightning_freescale.comm.transports.host import HostTransport
from lightning_freescale.comm.wire import Wire


def choose(options: LaneOptions, wire: Wire, host: HostTransport, store: dist.Store) -> Transport | None:
    """The transport for CUDA tensors; None for torch's own backend."""
    if options.transport in ("auto", "host"):
        return host
    if options.transport == "native":
        return None
    if not torch.cuda.is_available():
        raise TransportRefused(f"transport={options.transport!r} moves CUDA tensors, and torch sees no CUDA device")
    raise TransportRefused("not yet")
