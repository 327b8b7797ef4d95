"""How many bytes a collective moves over one rank's link."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def moved_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> int | None:
    """The larger of what this rank sends and receives; None for objects, whose size is not known ahead."""
    if name.endswith(("object", "object_list")):
        return None
    tensors = [_bytes(value) for value in (*args, *kwargs.values())]
    given = [count for count in tensors if count is not None]
    if not given:
        return 0
    size = dist.get_world_size(group)
    largest = max(given)
    if name in ("broadcast", "reduce"):
        return largest
    if name == "all_reduce":
        return 2 * largest * (size - 1) // size
    # of all others the largest tensor, or list of them, is what the ranks send or receive together
    return largest * (size - 1) // size


def _bytes(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return sum(each.numel() * each.element_size() for each in value)
    return None
