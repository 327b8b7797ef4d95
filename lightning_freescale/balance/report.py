"""What balancing brings, step by step and over an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class StepBalance:
    """What balancing a step brings.

    Attributes:
        unbalanced: imbalance of the samples as drawn.
        balanced: imbalance of the assignment in use.
        lower_bound: what no assignment within the limits on the counts can beat.
        dominated: a single sample costs more than the mean rank load.
        tokens_imbalance: max over ranks of tokens / mean over ranks; None if no tokens are known.
        cost: summed cost of the step.
    """

    unbalanced: float
    balanced: float
    lower_bound: float
    dominated: bool
    tokens_imbalance: float | None
    cost: float

    def with_base(self, base: float, ranks: int) -> StepBalance:
        """Return the same for ranks of which each computes for ``base`` besides its samples, in the units of the costs."""
        mean = self.cost / ranks
        share = mean / (mean + base) if mean else 0.0
        names = ("unbalanced", "balanced", "lower_bound")
        brought_down = {name: 1 + (getattr(self, name) - 1) * share for name in names}
        return replace(self, **brought_down, cost=self.cost + base * ranks)


@dataclass(frozen=True)
class BalanceReport:
    """The steps of an epoch, each weighted by its cost (so 1 - 1/imbalance is the idle share).

    Attributes:
        steps: how many there are.
        unbalanced, balanced, lower_bound, tokens_imbalance: means of those of :class:`StepBalance`.
        dominated: share of steps in which a single sample costs more than the mean rank load.
    """

    steps: int
    unbalanced: float
    balanced: float
    lower_bound: float
    dominated: float
    tokens_imbalance: float | None

    @classmethod
    def from_steps(cls, steps: Iterable[StepBalance]) -> BalanceReport:
        """Sum up; of no step at all it is perfect balance."""
        sums = BalanceSums()
        for step in steps:
            sums.add_step(step)
        return sums.report()

    @property
    def gap(self) -> float:
        """How far ``balanced`` is above ``lower_bound``, as a share of it."""
        return max(0.0, self.balanced / self.lower_bound - 1)  # rounding alone may take it below

    def scalars(self, over: str) -> dict[str, float]:
        """Return the figures by the names under which they are logged: ``freescale/imbalance/{over}/...``."""
        names = ("unbalanced", "balanced", "lower_bound", "gap", "dominated", "tokens_imbalance")
        return {f"freescale/imbalance/{over}/{name}": value for name in names if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        tokens = "" if self.tokens_imbalance is None else f"; tokens {self.tokens_imbalance:.3f}"
        return (
            f"imbalance over {self.steps} steps: {self.unbalanced:.3f} as drawn ({idle_fraction(self.unbalanced):.1%} idle), "
            f"{self.balanced:.3f} balanced ({idle_fraction(self.balanced):.1%} idle), lower bound {self.lower_bound:.3f} "
            f"(gap {self.gap:.2%}), {self.dominated:.0%} of the steps dominated by one sample{tokens}"
        )


class BalanceSums:
    """Sums of steps that are added one by one, so that an epoch need not be kept."""

    def __init__(self) -> None:
        self._sums = np.zeros((2, 6))  # weighted by cost, and each step alike in case none costs anything

    @property
    def steps(self) -> int:
        """How many have been added."""
        return int(self._sums[1, -1])

    def add_step(self, step: StepBalance) -> None:
        """Add a step to the sums."""
        row = [step.unbalanced, step.balanced, step.lower_bound, step.tokens_imbalance, step.dominated, 1]  # None becomes nan
        self._sums += np.array(row, dtype=np.float64) * [[step.cost], [1.0]]

    def report(self) -> BalanceReport:
        """Return what the steps so far amount to."""
        if not self.steps:
            return BalanceReport(0, 1.0, 1.0, 1.0, 0.0, None)
        weighted, alike = self._sums
        unbalanced, balanced, bound, tokens = (weighted / weighted[-1] if weighted[-1] else alike / alike[-1])[:4].tolist()
        dominated = float(alike[4] / alike[-1])
        return BalanceReport(self.steps, unbalanced, balanced, bound, dominated, None if np.isnan(tokens) else tokens)


def idle_fraction(imbalance: float) -> float:
    """Return the share of the ranks' time that an imbalance wastes."""
    return 1 - 1 / imbalance
