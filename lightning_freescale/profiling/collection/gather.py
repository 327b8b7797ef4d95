"""Bring the steps of all ranks together, a window of steps at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_freescale.profiling.recording.records import ResolvedStep


def to_all(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, on every rank. Collective on a group that takes CPU tensors; None if there is one rank."""
    if group is None:
        return [value]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def to_rank_zero(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """The values of all ranks on rank 0, None on the others. Collective."""
    if group is None:
        return [value]
    everyone: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, everyone, group=group, group_dst=0)
    return everyone


def arrivals_of(step: ResolvedStep) -> dict[str, float]:
    """When this rank arrived at each collective, by key."""
    return {collective.key: collective.arrive for collective in step.collectives}


def last_arrivals(step: ResolvedStep, arrivals: Sequence[dict[str, float]]) -> list[float]:
    """When the last rank arrived at each of a step's collectives; ``arrivals`` holds those of every rank for the step."""
    return [max(other[c.key] for other in arrivals if c.key in other) for c in step.collectives]
