"""Exchange Python objects between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. Collective on ``group``, by default the default group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
