"""The effect of balancing on a step and over an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

_MEANS = (
    "unbalanced", "balanced", "lower_bound", "tokens_imbalance", "tokens_unbalanced", "padding", "padding_unbalanced",
)  # fmt: skip
"""Fields of a report that are means over its steps."""


@dataclass(frozen=True)
class StepBalance:
    """The effect of balancing on one step.

    Attributes:
        unbalanced: Imbalance of the samples as drawn. In a window, the mean over its steps.
        balanced: Imbalance of the assignment in use.
        lower_bound: Imbalance that no assignment with the allowed counts can beat. In a window, no division of its samples
            among its steps can beat it.
        dominated: True if a single sample costs more than the mean load of the ranks.
        tokens_imbalance: Maximum tokens over ranks / mean over ranks of the assignment in use; None if tokens are unknown.
        cost: Summed cost of the step.
        tokens_unbalanced: ``tokens_imbalance`` of the samples as drawn.
        tokens_fullest: Maximum tokens over ranks / ``max_tokens_per_rank``; None without that limit.
        padding: Share of padding in the computed tokens of the assignment in use; None if batches are not padded. The
            imbalances then count padding as idle time.
        padding_unbalanced: ``padding`` of the samples as drawn.
    """

    unbalanced: float
    balanced: float
    lower_bound: float
    dominated: bool
    tokens_imbalance: float | None
    cost: float
    tokens_unbalanced: float | None = None
    tokens_fullest: float | None = None
    padding: float | None = None
    padding_unbalanced: float | None = None

    def with_base(self, base: float, ranks: int) -> StepBalance:
        """Return the effect if each rank also computes for ``base``, in the unit of the costs, besides its samples."""
        mean = self.cost / ranks
        share = mean / (mean + base) if mean else 0.0
        names = ("unbalanced", "balanced", "lower_bound")
        brought_down = {name: 1 + (getattr(self, name) - 1) * share for name in names}
        return replace(self, **brought_down, cost=self.cost + base * ranks)


@dataclass(frozen=True)
class BalanceReport:
    """The effect of balancing over several steps.

    Attributes:
        steps: Number of steps.
        unbalanced, balanced, lower_bound, tokens_imbalance, tokens_unbalanced, padding, padding_unbalanced: Means of the fields
            of :class:`StepBalance`, weighted by cost, so that 1 - 1/imbalance is the idle share.
        dominated: Share of steps in which a single sample costs more than the mean load of the ranks.
        tokens_fullest: Maximum over the steps.

    Examples:
        >>> import numpy as np
        >>> from lightning_freescale.balance import predict
        >>> lengths = np.arange(1.0, 129.0)
        >>> print(predict(lengths**2, ranks=4, batch_size=8, tokens=lengths, max_tokens_per_rank=600))
        imbalance over 16 steps (max / mean over ranks):
                 as drawn             balanced             lower bound  gap
        compute  1.381 (27.6% idle)   1.001 (0.1% idle)    1.000        0.05%
        tokens   1.230                1.020                -            -      fullest rank of any step: 99.7% of its limit
    """

    steps: int
    unbalanced: float
    balanced: float
    lower_bound: float
    dominated: float
    tokens_imbalance: float | None = None
    tokens_unbalanced: float | None = None
    tokens_fullest: float | None = None
    padding: float | None = None
    padding_unbalanced: float | None = None

    @classmethod
    def from_steps(cls, steps: Iterable[StepBalance]) -> BalanceReport:
        """Return the report of some steps; that of no step has an imbalance of 1."""
        sums = BalanceSums()
        for step in steps:
            sums.add_step(step)
        return sums.report()

    @property
    def gap(self) -> float:
        """The relative difference between ``balanced`` and ``lower_bound``."""
        return max(0.0, self.balanced / self.lower_bound - 1)  # rounding errors may make it negative

    def scalars(self, over: str) -> dict[str, float]:
        """Return the figures by the names under which the strategy logs them: ``freescale/imbalance/{over}/...``."""
        names = ("unbalanced", "balanced", "lower_bound", "gap", "dominated", *_MEANS[3:], "tokens_fullest")
        return {f"freescale/imbalance/{over}/{name}": value for name in names if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        lost = "idle" if self.padding is None else "lost"
        drawn, balanced = (f"{each:.3f} ({idle_fraction(each):.1%} {lost})" for each in (self.unbalanced, self.balanced))
        of = "max / mean over ranks" if self.padding is None else "slowest rank / mean rank without padding"
        lines = [
            f"imbalance over {self.steps} step{'s'[: self.steps != 1]} ({of}):",
            f"         {'as drawn':21}{'balanced':21}{'lower bound':13}gap",
            f"compute  {drawn:21}{balanced:21}{self.lower_bound:<13.3f}{self.gap:.2%}",
        ]
        if self.tokens_imbalance is not None and self.tokens_unbalanced is not None:
            full = self.tokens_fullest
            limit = "" if full is None else f"      fullest rank of any step: {full:.1%} of its limit"
            lines.append(f"tokens   {self.tokens_unbalanced:<21.3f}{self.tokens_imbalance:<21.3f}{'-':13}-{limit}")
        if self.padding is not None:
            lines.append(f"padding  {self.padding_unbalanced:<21.1%}{self.padding:<21.1%}of the computed tokens")
        if self.dominated:
            lines.append(f"in {self.dominated:.0%} of the steps one sample costs more than a rank's fair share")
        return "\n".join(lines)


class BalanceSums:
    """A running sum over steps, so that an epoch's steps need not be kept."""

    def __init__(self) -> None:
        self._sums = np.zeros((2, len(_MEANS) + 2))  # weighted by cost; unweighted, in case all costs are 0
        self._fullest: float | None = None

    @property
    def steps(self) -> int:
        """The number of steps."""
        return int(self._sums[1, -1])

    def add_step(self, step: StepBalance) -> None:
        """Add a step."""
        row = [getattr(step, name) for name in _MEANS]
        self._sums += np.array([*row, step.dominated, 1], dtype=np.float64) * [[step.cost], [1.0]]  # None becomes NaN
        if step.tokens_fullest is not None:
            self._fullest = max(step.tokens_fullest, self._fullest or 0.0)

    def report(self) -> BalanceReport:
        """Return the report of the steps so far."""
        if not self.steps:
            return BalanceReport(0, 1.0, 1.0, 1.0, 0.0)
        weighted, alike = self._sums
        means = (weighted / weighted[-1] if weighted[-1] else alike / alike[-1]).tolist()
        known = {name: mean for name, mean in zip(_MEANS, means) if not np.isnan(mean)}
        return BalanceReport(self.steps, dominated=float(alike[-2] / alike[-1]), tokens_fullest=self._fullest, **known)


def idle_fraction(imbalance: float) -> float:
    """Return the share of the ranks' time that they wait at an imbalance."""
    return 1 - 1 / imbalance
