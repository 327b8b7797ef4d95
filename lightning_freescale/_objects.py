"""Exchange Python objects between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. Collective on ``group``, by default the default group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_on_first_rank(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on rank 0; nothing on the others. Collective on the default group.

    They come one after the other: with NCCL, objects travel through the GPU's memory.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send_object_list([value], dst=0)
        return []
    values = [value]
    for source in range(1, world):
        received = [None]
        dist.recv_object_list(received, src=source)
        values += received
    return values
