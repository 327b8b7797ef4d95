"""What the plans of the steps say of their balance, weighed as measured imbalance is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PlannedStep:
    """Imbalance, max over ranks / mean, that a step was planned to have.

    Attributes:
        unbalanced: of compute, had the samples stayed as drawn.
        balanced: of compute, as they were assigned; None if they did stay as drawn.
        lower_bound: what no assignment can beat.
        tokens_unbalanced, tokens_balanced: the same of tokens; None if nobody knows them.
        tokens_fullest: tokens of the rank that has most / what it may hold; None if there is no limit.
        fitted: the costs, or what a rank's step takes besides its samples, were fitted to measured times; else the costs are as
            they were given, and nothing is beside them.
        padding: share of the computed tokens that is padding; None if batches are not padded, or if that is not known.
        padded: ``"fixed"`` (to one length), ``"batch"`` (to the longest sample), or ``"batch, planned"`` (the plan counts the
            padding); None as ``padding``.
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


@dataclass(frozen=True)
class PlannedBalance:
    """The same of all steps: means, each step weighted by its compute, and the largest ``tokens_fullest``.

    Attributes:
        gap: how far ``balanced`` is above ``lower_bound``, as a share of it; None if the samples stayed as drawn.
        fitted_steps: in how many the costs were fitted.
        steps: how many there are.
        padding: of the steps in which it is known.
        padded: of the last one of them.
    """

    unbalanced: float
    balanced: float | None
    lower_bound: float
    gap: float | None
    tokens_unbalanced: float | None
    tokens_balanced: float | None
    tokens_fullest: float | None
    fitted_steps: int
    steps: int
    padding: float | None = None
    padded: str | None = None

    @property
    def costs(self) -> str:
        """By which costs the steps were planned, in words."""
        return costs_in_words(self.fitted_steps, self.steps)


def costs_in_words(fitted: int, steps: int) -> str:
    """Return by which costs ``steps`` were planned, if those of ``fitted`` of them were fitted to measured times."""
    if fitted in (0, steps):
        return "costs fitted to measured times" if fitted else "the costs as given"
    given = steps - fitted
    return f"the costs as given in {given} step{'s'[: given != 1]}, fitted to measured times in {fitted}"


def planned_balance(plans: Sequence[PlannedStep | None], compute: Floats) -> PlannedBalance | None:
    """Sum up; None if the plan of a step is not known.

    Args:
        plans: of the steps.
        compute: seconds of each step on each rank, shape ``[steps, ranks]``.
    """
    known = [plan for plan in plans if plan is not None]
    if len(known) < len(plans) or not known:
        return None
    seconds = compute.mean(axis=1)
    weights = seconds / seconds.sum() if seconds.any() else np.full(len(known), 1 / len(known))

    def mean(values: list[Any]) -> float:
        return float(np.array(values) @ weights)

    def mean_if_known(name: str) -> float | None:
        values = [getattr(plan, name) for plan in known]
        return None if None in values else mean(values)

    unbalanced, bound = mean([plan.unbalanced for plan in known]), mean([plan.lower_bound for plan in known])
    balanced = mean_if_known("balanced")
    fullest = [plan.tokens_fullest for plan in known if plan.tokens_fullest is not None]
    padded = [(plan.padded, plan.padding, weight) for plan, weight in zip(known, weights) if plan.padding is not None]
    kinds, padding, seconds_of_padded = zip(*padded) if padded else ((None,), (), ())
    return PlannedBalance(
        unbalanced,
        balanced,
        bound,
        gap=None if balanced is None else max(0.0, balanced / bound - 1),  # rounding alone may take it below
        tokens_unbalanced=mean_if_known("tokens_unbalanced"),
        tokens_balanced=mean_if_known("tokens_balanced"),
        tokens_fullest=max(fullest) if fullest else None,
        fitted_steps=sum(plan.fitted for plan in known),
        steps=len(known),
        padding=float(np.average(padding, weights=seconds_of_padded if any(seconds_of_padded) else None)) if padded else None,
        padded=kinds[-1],
    )
