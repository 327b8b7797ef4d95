"""Why some ranks compute longer than others: their samples, their hardware, or neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_SLOW = 1.1
_SPREADS = 3.0
_ROUNDS = 10
_SIGMA = 1.4826  # from a median absolute deviation to a standard deviation
_OF_MEDIAN = 1.2533  # standard error of a median / that of a mean


@dataclass(frozen=True)
class Imbalance:
    """Seconds per step of max over ranks of compute - mean, by cause; the three add up.

    Attributes:
        method: what tells the causes apart, see :func:`split_imbalance`.
        data: what equally fast ranks would have with these samples.
        hardware: what the ranks' slowness adds to that; less than 0 where slow ranks were given less work.
        jitter: the rest.
        scores: slowness of each rank: its compute / what explains it, relative to the lower median rank.
        slow: ranks with a score above 1.1 that is clearly outside the spread of the others' scores, and of its own.
        residual: median relative error of what ``data`` and ``hardware`` rest on.
    """

    method: Literal["cost model", "ranks"]
    data: float
    hardware: float
    jitter: float
    scores: tuple[float, ...]
    slow: dict[int, float]
    residual: float | None


def split_imbalance(compute: Floats, expected: Floats | None = None, slowness: Floats | None = None) -> Imbalance:
    """Split the imbalance of measured compute.

    With a cost model (``expected`` and ``slowness``) a rank is slow if it takes longer than its samples explain, whatever it
    draws. Without one, compute is split into an effect of the step times one of the rank (medians, so single steps do not
    matter): what persists counts as hardware, what does not as jitter, and data as 0. That cannot know the cause: a rank that
    always draws longer histories passes for slow, and what changing histories cause is in ``jitter``.

    Args:
        compute: seconds of each step on each rank, shape ``[steps, ranks]``.
        expected: seconds that its samples should take on the lower median rank, same shape.
        slowness: of each rank relative to that, shape ``[ranks]``.

    Raises:
        ValueError: only one of ``expected`` and ``slowness`` is given, or shapes do not fit.
    """
    if (expected is None) != (slowness is None):
        raise ValueError("split_imbalance: pass both expected and slowness, or neither")
    method: Literal["cost model", "ranks"] = "cost model"
    if expected is None or slowness is None:
        method, data = "ranks", 0.0
        expected, slowness = _steps_and_ranks(compute)
    elif expected.shape != compute.shape or slowness.shape != compute.shape[1:]:
        raise ValueError(
            f"split_imbalance: compute {compute.shape}, expected {expected.shape}, slowness {slowness.shape}: pass shapes "
            "[steps, ranks], the same, and [ranks]"
        )
    else:
        data = _excess(expected)
    explained = expected * slowness
    known = (compute > 0) & (explained > 0)
    error = np.where(known, compute / np.where(known, explained, 1.0), np.nan) - 1
    slow = {rank: float(slowness[rank]) for rank in range(len(slowness)) if _is_slow(rank, slowness, error)}
    residual = float(np.median(np.abs(error[known]))) if known.any() else None
    excess = _excess(explained)
    return Imbalance(method, data, excess - data, _excess(compute) - excess, tuple(slowness.tolist()), slow, residual)


def _excess(seconds: Floats) -> float:
    return float((seconds.max(axis=1) - seconds.mean(axis=1)).mean())


def _is_slow(rank: int, scores: Floats, error: Floats) -> bool:
    """Medians on both sides: up to half of the other ranks may be slow, too, and single steps do not matter."""
    others = np.delete(scores, rank)
    mine = error[:, rank][np.isfinite(error[:, rank])]
    if not len(others) or not len(mine) or scores[rank] <= _SLOW:
        return False
    spread = _SIGMA * float(np.median(np.abs(others - np.median(others))))
    own = float(scores[rank]) * _OF_MEDIAN * _SIGMA * float(np.median(np.abs(mine))) / len(mine) ** 0.5
    return bool(scores[rank] - np.median(others) > _SPREADS * max(spread, own))


def _steps_and_ranks(compute: Floats) -> tuple[Floats, Floats]:
    """The step's effect, shape ``[steps, 1]``, and each rank's relative to the lower median rank: Tukey's median polish."""
    logs = np.log(np.maximum(compute, 1e-12))
    ranks = np.zeros(compute.shape[1])
    for _ in range(_ROUNDS):
        steps = np.median(logs - ranks, axis=1, keepdims=True)
        ranks = np.median(logs - steps, axis=0)
        ranks = ranks - np.quantile(ranks, 0.5, method="lower")
    steps = np.median(logs - ranks, axis=1, keepdims=True)
    return np.broadcast_to(np.exp(steps), compute.shape), np.exp(ranks)
