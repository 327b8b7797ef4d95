"""Fit the cost model while training, and tell when its plan should be made anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.fit import CostFit

Floats = NDArray[np.float64]
DISAGREEMENT = 0.05
"""A new plan is worth it if it lowers the imbalance, as the fit sees it, by more than this share."""
EXPLORED = 50
"""Steps among which some are dealt as drawn, see :class:`BalancedSampler`."""
_LEAST_STEPS = 45
SLOW = 1.1
"""A rank is slow if it takes this many times what its samples explain."""


class Calibration:
    """Collects windows of steps, fits after each, and stops when the fit does.

    Args:
        keep: how many measured times the fit rests on at most, the last ones; rank 0 fits while the others wait.
        patience: windows without a better residual until the fit is frozen.
        least_gain: share by which the residual must fall to count as better.
    """

    def __init__(self, keep: int = 20_000, patience: int = 5, least_gain: float = 0.02) -> None:
        self._sums: deque[Floats] = deque()
        self._seconds: deque[Floats] = deque()
        self._keep, self._patience, self._least_gain, self._best, self._since = keep, patience, least_gain, float("inf"), 0
        self.fit: CostFit | None = None

    @property
    def frozen(self) -> bool:
        """Whether further windows would change nothing."""
        return self._since >= self._patience

    def add(self, sums: Floats, seconds: Floats) -> CostFit | None:
        """A window of all ranks: shapes ``[steps, ranks, 4]`` and ``[steps, ranks]``; None until there is enough to fit."""
        whole = (seconds > 0).all(axis=1)  # a step that a rank did not measure is of no use
        self._sums.extend(sums[whole])
        self._seconds.extend(seconds[whole])
        ranks = seconds.shape[1]
        while len(self._seconds) > max(_LEAST_STEPS, self._keep // ranks):
            self._sums.popleft()
            self._seconds.popleft()
        steps = len(self._seconds)
        if steps * ranks < 10:
            return None
        rank = np.tile(np.arange(ranks), steps)
        self.fit = CostModel.fit(np.concatenate(list(self._sums)), np.concatenate(list(self._seconds)), rank)
        better = self.fit.residual < self._best * (1 - self._least_gain)
        self._since = 0 if better else self._since + 1
        self._best = min(self._best, self.fit.residual)
        return self.fit


def imbalance_seen(
    batches: Iterable[tuple[Floats, Floats]],
    base: float,
    ranks: int,
    options: dict[str, Any] | None = None,
    slowness: Floats | None = None,
) -> float:
    """Imbalance by true costs of plans made with others, over the samples of several steps.

    Args:
        batches: for every step what the assignment goes by, and what it is judged by in seconds, each of shape ``[samples]``.
        base: seconds that every rank's step takes besides.
        ranks: how many ranks share a step.
        options: of :func:`assign`.
        slowness: time of each rank / time that its samples explain, shape ``[ranks]``; all 1 if not given.
    """
    slow = np.ones(ranks) if slowness is None else slowness
    longest = total = 0.0
    for planned, true in batches:
        plan = assign(planned, ranks, **(options or {})).rank_of_sample
        times = slow * (np.bincount(plan, true, ranks) + base)
        longest, total = longest + times.max(), total + times.mean()
    return float(longest / total) if total else 1.0


def slow_ranks(fit: CostFit, known: Sequence[float] | None = None) -> dict[int, float]:
    """Ranks that take longer than their samples, and the speeds that are ``known``, explain; and how many times."""
    times = fit.slowness * (1.0 if known is None else np.asarray(known) / np.max(known))
    return {int(rank): float(times[rank]) for rank in np.flatnonzero(times > SLOW)}


def speeds_of(fit: CostFit) -> list[float]:
    """``rank_speeds`` for :func:`assign`."""
    return np.clip(1 / fit.slowness, 0.05, 20.0).round(2).tolist()
