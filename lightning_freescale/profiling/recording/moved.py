"""How many bytes a collective moves over one rank's link."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def moved_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> int | None:
    """The larger of what this rank sends and receives; None for objects and sparse tensors, whose size is not known ahead."""
    if name.endswith(("object", "object_list")):
        return None
    if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in (*args, *kwargs.values())):
        return None
    largest = max(map(_bytes, (*args, *kwargs.values())), default=0)
    if not largest:
        return 0
    size = group.size() if group is not None else dist.get_world_size()
    if name in ("broadcast", "reduce"):
        return largest
    if name == "all_reduce":
        return 2 * largest * (size - 1) // size
    # of all others the largest tensor, or list of them, is what the ranks send or receive together
    return largest * (size - 1) // size


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return sum(each.nbytes for each in value)
    return 0
