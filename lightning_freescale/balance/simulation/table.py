"""What balancing would bring on more ranks than there are yet: predicted from lengths alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.advice import advise, predict
from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.report import idle

_TIMED = 9
"""Global batches whose planning is timed."""


@dataclass(frozen=True)
class Forecast:
    """One number of ranks; all figures but ``planning_ms`` are predicted.

    Attributes:
        ranks: how many share a step.
        drawn: imbalance of the samples as drawn.
        zigzag: of FreeScale's deal of the sorted samples (arXiv 2604.24073).
        balanced: of :func:`assign` with the options asked for.
        lower_bound: what no assignment of the same steps can beat.
        dominated: share of the steps in which one sample costs more than the mean rank load.
        planning_ms: measured here, median time to assign one global batch.
        advice: what would help where the assignment cannot, see :func:`advise`.
    """

    ranks: int
    drawn: float
    zigzag: float
    balanced: float
    lower_bound: float
    dominated: float
    planning_ms: float
    advice: str | None

    @property
    def speedup(self) -> float:
        """Of the compute, over as drawn: a step takes as long as its slowest rank."""
        return self.drawn / self.balanced


def forecast(
    lengths: NDArray[np.float64],
    ranks: int,
    batch_size: int,
    cost: CostModel | None = None,
    *,
    steps: int = 32,
    window: int = 1,
    seed: int = 0,
    **options: Any,
) -> Forecast:
    """Predict ``steps`` steps of samples resampled from ``lengths``.

    Args:
        lengths: history length of every sample, shape ``[samples]``.
        ranks: how many share a step.
        batch_size: samples per rank and step.
        cost: cost of a length; the default :class:`CostModel` if not given.
        steps: how many to draw.
        window: steps that exchange outliers in ``balanced`` and its lower bound, see :func:`pool_outliers`.
        seed: seeds the draw.
        **options: ``mode`` and ``count_slack`` of :func:`assign`.
    """
    costs = (CostModel() if cost is None else cost)(lengths)
    plain = predict(costs, ranks, batch_size, steps=steps, seed=seed, mode="zigzag")  # the same draw, without a window
    ours = predict(costs, ranks, batch_size, steps=steps, window=window, seed=seed, **options)
    return Forecast(
        ranks,
        drawn=plain.before,
        zigzag=plain.after,
        balanced=ours.after,
        lower_bound=ours.lower_bound,
        dominated=ours.dominated,
        planning_ms=_planning_ms(costs, ranks, batch_size, seed, options),
        advice=advise(costs, ranks, batch_size, ours, lengths, window=window, seed=seed, **options),
    )


def _planning_ms(costs: NDArray[np.float64], ranks: int, batch_size: int, seed: int, options: dict[str, Any]) -> float:
    draw, taken = np.random.RandomState(seed), []
    for _ in range(_TIMED):
        batch = costs[draw.randint(len(costs), size=ranks * batch_size)]
        start = time.perf_counter()
        assign(batch, ranks, **options)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken) * 1e3)


def describe(lengths: NDArray[np.float64]) -> str:
    """The lengths in one line."""
    return (
        f"{len(lengths)} samples; lengths: mean {lengths.mean():.1f}, median {np.median(lengths):g}, "
        f"p99 {np.percentile(lengths, 99):.4g}, max {lengths.max():g}"
    )


_TITLES = ("", "----- imbalance (max / mean over ranks) -----", "----- idle -----", "steps", "predicted", "planning")
_COLUMNS = ("ranks", "as drawn  zig-zag  balanced  lower bound", "as drawn  balanced", "dominated", "speed-up", "ms / step")


def table(rows: Sequence[Forecast]) -> str:
    """One row per number of ranks, below its head."""
    lines = ["{:5}  {:>44}  {:>18}  {:>9}  {:>9}  {:>9}".format(*head) for head in (_TITLES, _COLUMNS)]
    for row in rows:
        before, after = idle(row.drawn), idle(row.balanced)
        lines.append(
            f"{row.ranks:5d}  {row.drawn:12.3f}  {row.zigzag:7.3f}  {row.balanced:8.3f}  {row.lower_bound:11.3f}"
            f"  {before:8.1%}  {after:8.1%}  {row.dominated:9.0%}  {row.speedup:8.2f}x  {row.planning_ms:9.1f}"
        )
    return "\n".join(lines)
