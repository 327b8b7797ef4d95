"""Bring the steps of all ranks together, a window of steps at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_freescale.profiling.attribution import ResolvedStep, as_array, attribute


def gather_parts(steps: list[ResolvedStep], group: dist.ProcessGroup) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Every rank's parts of the same steps. Collective: two small exchanges, whatever the number of collectives in a step.

    Returns:
        Seconds of shape ``[steps, ranks, parts]`` and samples of shape ``[steps, ranks]``.

    Raises:
        ValueError: the ranks recorded different collectives.
    """
    arrivals = [[(name, arrive) for name, arrive, *_ in step.collectives] for step in steps]
    everyone = _all(arrivals, group)
    mine = as_array([attribute(step, _last([rank[k] for rank in everyone])) for k, step in enumerate(steps)])
    gathered = _all((mine, [step.samples for step in steps]), group)
    return np.stack([parts for parts, _ in gathered], axis=1), np.array([samples for _, samples in gathered]).T


def gather_steps(steps: list[ResolvedStep], group: dist.ProcessGroup) -> list[list[ResolvedStep]]:
    """For every step the records of all ranks. Collective."""
    return [list(row) for row in zip(*_all(steps, group))]


def _last(ranks: list[list[tuple[str, float]]]) -> list[float]:
    """When the last rank arrived at each collective; the k-th collective of a step is the same one on all ranks."""
    names = [[name for name, _ in rank] for rank in ranks]
    if any(other != names[0] for other in names):
        raise ValueError(f"ranks recorded different collectives in one step: {names}")
    return [max(arrive for _, arrive in same) for same in zip(*ranks)]


def _all(value: Any, group: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone
