"""The planned imbalance of compute, and the causes of the measured imbalance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_SLOW = 1.1
_SPREADS = 3.0
_ROUNDS = 10
_SIGMA = 1.4826  # from a median absolute deviation to a standard deviation
_OF_MEDIAN = 1.2533  # standard error of a median / that of a mean


@dataclass(frozen=True)
class PlannedStep:
    """The planned imbalance (maximum over ranks / mean) of a step.

    Attributes:
        unbalanced: imbalance of compute for the samples as drawn.
        balanced: imbalance of compute for the samples as assigned; None if they stay as drawn.
        lower_bound: lower bound for any assignment.
        tokens_unbalanced: imbalance of tokens for the samples as drawn; None if unknown.
        tokens_balanced: imbalance of tokens for the samples as assigned; None if unknown.
        tokens_fullest: largest number of tokens of a rank / its limit; None without a limit.
        fitted: True if the costs, or the constant time of a rank's step, were fitted to measured times.
        padding: share of the computed tokens that is padding; None if batches are not padded, or if it is unknown.
        padded: ``"fixed"`` (to one length), ``"batch"`` (to the longest sample), or ``"batch, planned"`` (the plan counts the
            padding); None like ``padding``.
    """

    unbalanced: float
    balanced: float | None
    lower_bound: float
    tokens_unbalanced: float | None = None
    tokens_balanced: float | None = None
    tokens_fullest: float | None = None
    fitted: bool = False
    padding: float | None = None
    padded: str | None = None


def planned_balance(plans: Sequence[PlannedStep | None], compute: Floats) -> dict[str, Any] | None:
    """Return ``balance`` of the document: means over the steps, weighted by compute; None if a plan is unknown.

    ``compute`` has seconds, shape ``[steps, ranks]``.
    """
    known = [plan for plan in plans if plan is not None]
    if len(known) < len(plans) or not known:
        return None
    seconds = compute.mean(axis=1)

    def mean(name: str) -> Any:
        values = [getattr(plan, name) for plan in known]
        return None if None in values else float(np.average(values, weights=seconds if seconds.any() else None))

    means = {"as_drawn": mean("unbalanced"), "balanced": mean("balanced"), "lower_bound": mean("lower_bound")}
    # rounding may make the gap negative
    gap = None if means["balanced"] is None else max(0.0, means["balanced"] / means["lower_bound"] - 1)
    fullest = [plan.tokens_fullest for plan in known if plan.tokens_fullest is not None]
    tokens = {"as_drawn": mean("tokens_unbalanced"), "balanced": mean("tokens_balanced"), "fullest": max(fullest, default=None)}
    return {
        "compute": {**means, "gap": gap},
        "tokens": None if tokens["as_drawn"] is None else tokens,
        "fitted_steps": sum(plan.fitted for plan in known),
    }


def planned_padding(plans: Sequence[PlannedStep], compute: Floats) -> dict[str, Any] | None:
    """Return the last ``kind`` of padding, and the share of the computed ``tokens`` over the steps in which it is known.

    The share is weighted by ``compute``, see :func:`planned_balance`. The result is None if no step has padding.
    """
    padded = [(plan, seconds) for plan, seconds in zip(plans, compute.mean(axis=1)) if plan.padding is not None]
    if not padded:
        return None
    known, weights = zip(*padded)
    tokens = np.average([plan.padding for plan in known], weights=weights if any(weights) else None)
    return {"kind": known[-1].padded, "tokens": float(tokens)}


@dataclass(frozen=True)
class Imbalance:
    """The imbalance of compute (maximum over ranks - mean) in seconds per step, divided by cause.

    Attributes:
        method: method of the division, see :func:`split_imbalance`.
        data: imbalance of equally fast ranks with these samples.
        hardware: imbalance that slow ranks add; negative if slow ranks received less work.
        jitter: remainder.
        scores: slowness of each rank: its compute / the explained compute, relative to the lower median rank.
        slow: ranks with a score above 1.1 that is clearly outside the spread of the other scores and of its own.
        residual: median relative error of the explained compute.
    """

    method: Literal["cost model", "ranks"]
    data: float
    hardware: float
    jitter: float
    scores: tuple[float, ...]
    slow: dict[int, float]
    residual: float | None


def split_imbalance(compute: Floats, expected: Floats | None = None, slowness: Floats | None = None) -> Imbalance:
    """Divide the imbalance of the measured compute by cause.

    With a cost model (``expected`` and ``slowness``), a rank is slow if it takes longer than its samples explain. Only the
    slowness that both halves of the steps show counts as hardware. Without a cost model,
    compute is the product of an effect of the step and an effect of the rank (medians, so single steps have no influence).
    Then persistent differences count as hardware, the others as jitter, and ``data`` is 0. A rank that always draws longer
    histories counts as slow in this case.

    Args:
        compute: seconds, shape ``[steps, ranks]``.
        expected: seconds of the samples on the lower median rank, same shape.
        slowness: factor of each rank, shape ``[ranks]``.
    """
    method: Literal["cost model", "ranks"] = "cost model"
    if expected is None or slowness is None:
        method, data = "ranks", 0.0
        expected, slowness = _steps_and_ranks(compute)
    else:
        data = _excess(expected)
    known = (compute > 0) & (expected > 0)
    ratio = np.where(known, compute / np.where(known, expected, 1.0), np.nan)
    slowness = _lasting(ratio, slowness)
    explained, error = expected * slowness, ratio / slowness - 1
    slow = {rank: float(slowness[rank]) for rank in range(len(slowness)) if _is_slow(rank, slowness, error)}
    residual = float(np.median(np.abs(error[known]))) if known.any() else None
    excess = _excess(explained)
    return Imbalance(method, data, excess - data, _excess(compute) - excess, tuple(slowness.tolist()), slow, residual)


def _excess(seconds: Floats) -> float:
    return float((seconds.max(axis=1) - seconds.mean(axis=1)).mean())


def _lasting(ratio: Floats, slowness: Floats) -> Floats:
    """Return the slowness that all steps and both halves of ``ratio`` show: their value closest to 1; 1 if they contradict."""
    halves = [half for half in np.array_split(ratio, 2) if np.isfinite(half).any(axis=0).all()]
    medians = [np.nanmedian(half, axis=0) for half in halves]
    shown = np.stack([slowness, *(each / np.quantile(each, 0.5, method="lower") for each in medians)])
    return np.maximum(shown.min(axis=0), 1.0) * np.minimum(shown.max(axis=0), 1.0)


def _is_slow(rank: int, scores: Floats, error: Floats) -> bool:
    """Compare medians, so that up to half of the other ranks may be slow, too, and single steps have no influence."""
    others = np.delete(scores, rank)
    mine = error[:, rank][np.isfinite(error[:, rank])]
    if not len(others) or not len(mine) or scores[rank] <= _SLOW:
        return False
    spread = _SIGMA * float(np.median(np.abs(others - np.median(others))))
    own = float(scores[rank]) * _OF_MEDIAN * _SIGMA * float(np.median(np.abs(mine))) / len(mine) ** 0.5
    return bool(scores[rank] - np.median(others) > _SPREADS * max(spread, own))


def _steps_and_ranks(compute: Floats) -> tuple[Floats, Floats]:
    """Return the effects of the steps and of the ranks, relative to the lower median rank (Tukey's median polish)."""
    logs = np.log(np.maximum(compute, 1e-12))
    ranks = np.zeros(compute.shape[1])
    for _ in range(_ROUNDS):
        steps = np.median(logs - ranks, axis=1, keepdims=True)
        ranks = np.median(logs - steps, axis=0)
        ranks = ranks - np.quantile(ranks, 0.5, method="lower")
    steps = np.median(logs - ranks, axis=1, keepdims=True)
    return np.broadcast_to(np.exp(steps), compute.shape), np.exp(ranks)
