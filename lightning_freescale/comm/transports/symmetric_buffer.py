"""Memory of a GPU that the GPUs of its NVLink domain can write, and the use of each part of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transports.cuda_driver import align

PEER_BYTES = 256 * 1024 * 1024
"""Memory that ``"peer"`` and ``"two-level"`` take on every GPU for each lane: two chunks for every other rank of the domain. So
half of it is what a rank sends in one round, after which the lane may pause."""
_ALIGN = 256
"""Bytes, as copy engines like it."""
_group_numbers = count()


@dataclass
class SymmetricBuffer:
    """One buffer of uint8 per rank of an NVLink domain, all alike, and all mapped here. Ranks count within the domain.

    A buffer begins with a signal pad of ``2 * size + 1`` words of 32 bits: for every rank the number of chunks that have
    arrived from it, then for every rank the number of chunks sent to it that it has consumed, then whether a peer has given up.
    Behind it are two slots of a chunk for every other rank. Counts go on from transfer to transfer.
    """

    rank: int
    buffers: list[Tensor]  # of every rank, uint8 of shape [SymmetricBuffer.size_bytes(...)]
    chunk: int  # bytes of a slot
    mapping: Any = None  # keeps the peers' buffers mapped

    @staticmethod
    def size_bytes(size: int, chunk: int) -> int:
        """Return the bytes of one buffer for ``size`` ranks."""
        return align(4 * (2 * size + 1), _ALIGN) + 2 * (size - 1) * align(chunk, _ALIGN)

    @staticmethod
    def largest_chunk(size: int, slot_bytes: int = PEER_BYTES) -> int:
        """Return the bytes of a chunk, a multiple of 256, with which the slots for ``size`` ranks take ``slot_bytes``."""
        return max(slot_bytes // (2 * max(size - 1, 1)) // _ALIGN, 1) * _ALIGN

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.buffers)

    def signal_pad(self, at: int) -> Tensor:
        """Return all words of the buffer of rank ``at``, int32."""
        return self.buffers[at][: 4 * (2 * self.size + 1)].view(torch.int32)

    def arrived(self, at: int, source: int) -> Tensor:
        """Return the word in which ``source`` counts what it has written at ``at``."""
        return self.signal_pad(at)[source : source + 1]

    def consumed(self, at: int, target: int) -> Tensor:
        """Return the word at ``at`` in which ``target`` counts what it has read of the chunks that ``at`` sent it."""
        return self.signal_pad(at)[self.size + target : self.size + target + 1]

    def failed(self, at: int) -> Tensor:
        """Return the word at ``at`` that says whether a peer has given up."""
        return self.signal_pad(at)[2 * self.size :]

    def slot(self, at: int, source: int, number: int) -> Tensor:
        """Return the bytes at ``at`` that chunk ``number`` from ``source``, another rank, goes to."""
        place = (source - at - 1) % self.size
        begin = align(4 * (2 * self.size + 1), _ALIGN) + (2 * place + number % 2) * align(self.chunk, _ALIGN)
        return self.buffers[at][begin : begin + self.chunk]


def allocate_symmetric_buffer(rank: int, size: int, chunk: int, device: torch.device, store: dist.Store) -> SymmetricBuffer:
    """Allocate and map the buffers of ``size`` ranks that share a ``store``, with slots of ``chunk`` bytes. Collective.

    Tested between two processes on one GPU, not between GPUs.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

    length = SymmetricBuffer.size_bytes(size, chunk)
    if size == 1:
        return SymmetricBuffer(0, [torch.zeros(length, dtype=torch.uint8, device=device)], chunk)
    backend = _SymmetricMemory.get_backend(device)
    if backend != "CUDA":
        raise RuntimeError(f"symmetric memory has backend {backend!r}: call torch's symm_mem.set_backend('CUDA'), or none")
    # torch's symmetric memory finds the ranks by the name of a group. Depending on its version it looks that up among the
    # process groups or in a table of its own, so a plain group without backends is made and entered in both.
    name, group = f"freescale-{next(_group_numbers)}", dist.ProcessGroup(store, rank, size)
    _register_process_group(name, group)  # type: ignore[arg-type]
    try:
        _SymmetricMemory.set_group_info(name, rank, size, store)
        mine = _SymmetricMemory.empty_strided_p2p((length,), (1,), torch.uint8, device, name)
        mine.zero_()
        torch.cuda.synchronize(device)  # no peer writes before the rendezvous, which comes after this on every rank
        handle = _SymmetricMemory.rendezvous(mine, name)
        buffers = [mine if at == rank else handle.get_buffer(at, (length,), torch.uint8) for at in range(size)]
        return SymmetricBuffer(rank, buffers, chunk, handle)
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]
