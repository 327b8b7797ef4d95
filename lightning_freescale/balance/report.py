"""What balancing brings, step by step and over an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepBalance:
    """One step.

    Attributes:
        before: imbalance of the samples as drawn.
        after: imbalance of the assignment in use.
        lower_bound: what no assignment within the limits on the counts can beat.
        dominated: a single sample costs more than the mean rank load.
        tokens_imbalance: max over ranks of tokens / mean over ranks; None if no tokens are known.
        cost: summed cost of the step.
    """

    before: float
    after: float
    lower_bound: float
    dominated: bool
    tokens_imbalance: float | None
    cost: float


@dataclass(frozen=True)
class BalanceReport:
    """The steps of an epoch, each weighted by its cost (so 1 - 1/imbalance is the idle share).

    Attributes:
        steps: how many there are.
        before: imbalance of the samples as drawn.
        after: imbalance of the assignment in use.
        lower_bound: what no assignment within the limits on the counts can beat.
        gap: how far ``after`` is above ``lower_bound``, as a share of it.
        dominated: share of steps in which a single sample costs more than the mean rank load.
        tokens_imbalance: max over ranks of tokens / mean over ranks; None if no tokens are known.
    """

    steps: int
    before: float
    after: float
    lower_bound: float
    gap: float
    dominated: float
    tokens_imbalance: float | None

    @classmethod
    def of_steps(cls, steps: Iterable[StepBalance]) -> BalanceReport:
        """Sum up; of no step at all it is perfect balance."""
        sums = BalanceSums()
        for step in steps:
            sums.add(step)
        return sums.report()

    def scalars(self, over: str) -> dict[str, float]:
        """The figures by the names under which they are logged: ``freescale/balance_{over}/...``."""
        names = ("before", "after", "lower_bound", "gap", "dominated", "tokens_imbalance")
        values = {name: getattr(self, name) for name in names}
        return {f"freescale/balance_{over}/{name}": value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        tokens = "" if self.tokens_imbalance is None else f"; tokens {self.tokens_imbalance:.3f}"
        return (
            f"imbalance over {self.steps} steps: {self.before:.3f} as drawn ({idle(self.before):.1%} idle), {self.after:.3f} "
            f"balanced ({idle(self.after):.1%} idle), lower bound {self.lower_bound:.3f} (gap {self.gap:.2%}), "
            f"{self.dominated:.0%} of the steps dominated by one sample{tokens}"
        )


class BalanceSums:
    """Sums up steps one by one."""

    def __init__(self) -> None:
        self.steps, self._dominated, self._weight = 0, 0, 0.0
        self._sums = np.zeros((2, 4))  # weighted by cost, and each step alike in case none costs anything

    def add(self, step: StepBalance) -> None:
        """One more."""
        tokens = math.nan if step.tokens_imbalance is None else step.tokens_imbalance
        row = np.array([step.before, step.after, step.lower_bound, tokens])
        self._sums += row * [[step.cost], [1.0]]
        self._weight += step.cost
        self._dominated += step.dominated
        self.steps += 1

    def report(self) -> BalanceReport:
        """Of the steps so far."""
        if not self.steps:
            return BalanceReport(0, 1.0, 1.0, 1.0, 0.0, 0.0, None)
        means = self._sums[0] / self._weight if self._weight else self._sums[1] / self.steps
        before, after, bound, tokens = means.tolist()
        gap = max(0.0, after / bound - 1)  # rounding alone may take it below
        return BalanceReport(
            self.steps, before, after, bound, gap, self._dominated / self.steps, None if math.isnan(tokens) else tokens
        )


def idle(imbalance: float) -> float:
    """Share of the ranks' time that an imbalance wastes."""
    return 1 - 1 / imbalance
