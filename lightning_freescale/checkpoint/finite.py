"""A run that has diverged must not put what it has become in the place of its last good checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._object_gather import gather_objects


def refuse_non_finite(tensors: Iterable[tuple[str, Tensor]], path: Any, group: dist.ProcessGroup | None = None) -> None:
    """Refuse to save numbers that are infinite or none. Collective on ``group``, by default the default group.

    Args:
        tensors: what this rank holds, by name.
        path: of the checkpoint that would be written.
        group: of all ranks.

    Raises:
        ValueError: some rank holds such numbers; on every rank.
    """
    found = {name: None for of_rank in gather_objects(_non_finite(tensors), group) for name in of_rank}
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"the checkpoint {path} is not written: {', '.join([*found][:3])}{more} have values that are infinite or not a "
            "number. Earlier checkpoints are as they were: resume from one of them, with Trainer(detect_anomaly=True) to see "
            "where it begins"
        )


def _non_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    # both extremes of a tensor with one NaN are NaN
    extremes = ((name, torch.aminmax(t.detach())) for name, t in tensors if t.is_floating_point() and t.numel())
    return [name for name, (low, high) in extremes if not (low.isfinite() & high.isfinite())]
