"""Memory of a GPU that the GPUs of its NVLink domain can write, and what each part of it is for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGN = 256
"""Bytes, as copy engines like it."""
_names = count()


@dataclass
class SymmetricBuffer:
    """One buffer of uint8 per rank, all alike, and all mapped here.

    A buffer begins with ``2 * ranks + 1`` words of 32 bits: for every rank the number of chunks that have arrived from it, then
    for every rank the number of chunks sent to it that it has taken, then whether a peer has given up. Behind them are two
    slots of a chunk for every rank that sends here. Counts go on from transfer to transfer.

    Attributes:
        place: of this rank among the buffers.
        buffers: of every rank, uint8 of shape ``[Slab.bytes(...)]``.
        chunk: bytes of a slot.
        mapping: what keeps the peers' buffers mapped.
    """

    place: int
    buffers: list[Tensor]
    chunk: int
    mapping: Any = None

    @staticmethod
    def bytes(ranks: int, chunk: int) -> int:
        """Of one buffer."""
        return _up(4 * (2 * ranks + 1)) + 2 * ranks * _up(chunk)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.buffers)

    def words(self, at: int) -> Tensor:
        """All words of the buffer of rank ``at``, int32."""
        return self.buffers[at][: 4 * (2 * self.ranks + 1)].view(torch.int32)

    def arrived(self, at: int, source: int) -> Tensor:
        """The word in which ``source`` counts what it has written at ``at``."""
        return self.words(at)[source : source + 1]

    def taken(self, at: int, target: int) -> Tensor:
        """The word in which ``target`` counts what it has taken of what ``at`` wrote there."""
        return self.words(at)[self.ranks + target : self.ranks + target + 1]

    def failed(self, at: int) -> Tensor:
        """The word that tells ``at`` that a peer has given up."""
        return self.words(at)[2 * self.ranks :]

    def slot(self, at: int, source: int, number: int, length: int) -> Tensor:
        """Where at ``at`` chunk ``number`` from ``source`` goes, its ``length`` bytes."""
        begin = _up(4 * (2 * self.ranks + 1)) + (2 * source + number % 2) * _up(self.chunk)
        return self.buffers[at][begin : begin + length]


def symmetric_buffer(place: int, ranks: int, chunk: int, device: torch.device, store: dist.Store) -> SymmetricBuffer:
    """Allocate and map the slabs of ``ranks`` ranks. Collective over them. Not tested on GPU.

    torch's symmetric memory finds the ranks by the name of a group. Depending on its version it looks that up among the process
    groups or in a table of its own, so a plain group without backends is made and entered in both.

    Args:
        place: of this rank among them.
        ranks: how many.
        chunk: bytes of a slot.
        device: of this rank.
        store: that only these ranks use.

    Raises:
        RuntimeError: the memory cannot be shared.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

    bytes_ = SymmetricBuffer.bytes(ranks, chunk)
    if ranks == 1:
        return SymmetricBuffer(0, [torch.zeros(bytes_, dtype=torch.uint8, device=device)], chunk)
    backend = _SymmetricMemory.get_backend(device)
    if backend != "CUDA":
        raise RuntimeError(f"symmetric memory has backend {backend!r}: call torch's symm_mem.set_backend('CUDA'), or none")
    name, group = f"freescale-{next(_names)}", dist.ProcessGroup(store, place, ranks)
    _register_process_group(name, group)  # type: ignore[arg-type]
    try:
        _SymmetricMemory.set_group_info(name, place, ranks, store)
        mine = _SymmetricMemory.empty_strided_p2p((bytes_,), (1,), torch.uint8, device, name)
        mine.zero_()
        torch.cuda.synchronize(device)  # nobody writes before the rendezvous, which comes after this on every rank
        handle = _SymmetricMemory.rendezvous(mine, name)
        buffers = [mine if at == place else handle.get_buffer(at, (bytes_,), torch.uint8) for at in range(ranks)]
        return SymmetricBuffer(place, buffers, chunk, handle)
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]


def _up(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN
