"""What balancing brings, step by step and over an epoch."""

from __future__ import annotations

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
        rows = list(steps)
        weight = np.array([row.cost for row in rows])
        if not weight.any():
            weight = np.ones(len(rows))

        def mean(name: str) -> float:
            values = np.array([getattr(row, name) for row in rows], dtype=np.float64)
            return float(np.average(values, weights=weight)) if rows else 1.0

        after, bound = mean("after"), mean("lower_bound")
        dominated = float(np.mean([row.dominated for row in rows])) if rows else 0.0
        tokens = mean("tokens_imbalance") if rows and rows[0].tokens_imbalance is not None else None
        return cls(len(rows), mean("before"), after, bound, after / bound - 1, dominated, tokens)

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


def idle(imbalance: float) -> float:
    """Share of the ranks' time that an imbalance wastes."""
    return 1 - 1 / imbalance
