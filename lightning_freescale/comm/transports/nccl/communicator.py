"""NCCL with the zero-CTA policy, and memory that it can use copy engines for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.transports.gpu.cuda_driver import CudaDriver
from lightning_freescale.comm.transports.nccl.transport import ZeroCtaTransport, aligned


class NcclWindow:
    """A communicator of its own with the zero-CTA policy, and a window of ``2 * size`` chunks. Collective. Not tested on GPU.

    The memory comes from NCCL's allocator through a pool of torch, and is registered once it is there, because what a pool gets
    later is not made a window.
    """

    def __init__(
        self, options: LaneOptions, wire: GlooP2P, store: dist.Store, timeout: timedelta, device: torch.device
    ) -> None:
        chosen = dist.ProcessGroupNCCL.Options()
        chosen.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        chosen._timeout = 2 * timeout  # at which NCCL's watchdog may end the process; the transport raises before
        self._native: Any = dist.ProcessGroupNCCL(store, wire.rank, wire.size, chosen)
        self._native.eager_connect_single_device(device)  # a window belongs to a communicator
        self._pool = torch.cuda.MemPool(self._native.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.window = torch.empty((2, wire.size * aligned(options.chunk_bytes)), dtype=torch.uint8, device=device)
        self._native.register_mem_pool(self._pool, symm=True)  # type: ignore[call-arg]  # its stub lacks symm

    def exchange(self, stream: Any, output: Tensor, input: Tensor) -> None:
        """Enqueue the all-to-all; without splits, as these would make NCCL launch kernels."""
        with torch.cuda.stream(stream):
            self._native.alltoall_base(output, input, [], [], dist.AllToAllOptions()).wait()

    def abort(self) -> None:
        """Abort the communicator."""
        self._native.abort()


def zero_cta(
    options: LaneOptions, wire: GlooP2P, store: dist.Store, timeout: timedelta, device: torch.device
) -> ZeroCtaTransport:
    """The transport between all ranks of a group. Collective. Not tested on GPU."""
    return ZeroCtaTransport(CudaDriver(device), NcclWindow(options, wire, store, timeout, device), wire.size)
