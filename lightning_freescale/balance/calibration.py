"""Fit the cost model while training, and tell when the steps should be planned anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.cost import CostFit, CostModel
from lightning_freescale.balance.validation import Floats

DISAGREEMENT = 0.05
"""A new plan is worth it if it lowers the imbalance, as the fit sees it, by more than this share."""
_MIN_STEPS = 45
_PATIENCE, _LEAST_GAIN = 5, 0.02
"""Windows without a better residual until the fit is frozen, and the share by which it must fall to count as better."""


class Calibration:
    """Collects windows of steps, fits after each, and stops when the fit does.

    Args:
        keep: how many measured times the fit rests on at most, the last ones; rank 0 fits while the others wait.
    """

    def __init__(self, keep: int = 20_000) -> None:
        self.fit: CostFit | None = None
        self._keep = keep
        self._steps: list[tuple[Floats, Floats]] = []
        self._best_residual = float("inf")
        self._windows_since_best = 0

    @property
    def frozen(self) -> bool:
        """Whether further windows would change nothing."""
        return self._windows_since_best >= _PATIENCE

    def add_window(self, sums: Floats, seconds: Floats) -> CostFit | None:
        """Fit again with a window of all ranks; return None until there are enough measured times.

        Args:
            sums: of :func:`sample_features` over each rank's samples, shape ``[steps, ranks, 4]``.
            seconds: compute times, shape ``[steps, ranks]``; 0 where a rank did not measure.
        """
        measured = (seconds > 0).all(axis=1)  # a step that a rank did not measure is of no use
        ranks = seconds.shape[1]
        kept = max(_MIN_STEPS, self._keep // ranks)
        self._steps = [*self._steps, *zip(sums[measured], seconds[measured])][-kept:]
        if len(self._steps) * ranks < 10:
            return None
        kept_sums, kept_seconds = (np.concatenate(values) for values in zip(*self._steps))
        self.fit = CostModel.fit(kept_sums, kept_seconds, np.tile(np.arange(ranks), len(self._steps)))
        better = self.fit.residual < self._best_residual * (1 - _LEAST_GAIN)
        self._windows_since_best = 0 if better else self._windows_since_best + 1
        self._best_residual = min(self._best_residual, self.fit.residual)
        return self.fit


def imbalance_by_true_costs(
    batches: Iterable[tuple[Floats, Floats]],
    base: float,
    ranks: int,
    options: dict[str, Any] | None = None,
    slowness: Floats | float = 1.0,
) -> float:
    """Return the imbalance by true costs of plans made with others, over the samples of several steps.

    Args:
        batches: for every step the costs to assign by and the true ones in seconds, each of shape ``[samples]``.
        base: seconds that every rank's step takes besides.
        ranks: how many ranks share a step.
        options: of :func:`assign`.
        slowness: time of each rank / time that its samples explain, shape ``[ranks]``; all 1 if not given.
    """
    longest = total = 0.0
    for planned, true in batches:
        plan = assign(planned, ranks, **(options or {})).rank_of_sample
        times = slowness * (np.bincount(plan, true, ranks) + base)
        longest, total = longest + times.max(), total + times.mean()
    return float(longest / total) if total else 1.0
