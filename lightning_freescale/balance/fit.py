"""A cost model fitted to measured compute times."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.cost import CostModel

Floats = NDArray[np.float64]
_ROUNDS, _REWEIGHTINGS, _HUBER = 5, 10, 1.345
_ALIKE = 0.05
"""Ranks are taken to be equally fast unless they differ by this share."""


@dataclass(frozen=True)
class CostFit:
    """What the measured times say.

    Attributes:
        model: cost of a sample, in seconds.
        base: seconds of a rank's step that no sample explains.
        slowness: time of each rank / time that its samples explain, relative to the lower median rank; shape ``[ranks]``.
        residual: median relative error of what the fit predicts for a rank's step.
        observations: how many rank-steps it rests on.
    """

    model: CostModel
    base: float
    slowness: Floats
    residual: float
    observations: int


def fit_cost(sums: Floats, seconds: Floats, ranks: ArrayLike | None = None) -> CostFit:
    """Least squares with non-negative coefficients on relative errors, deaf to outliers (Huber 1964).

    Alternates with an estimate of how slow each rank is, so that a slow rank does not pass for expensive samples.

    Args:
        sums: for every rank and step the sums over its samples of :func:`sample_features`, shape ``[observations, 4]``.
        seconds: measured compute time, shape ``[observations]``, > 0.
        ranks: which rank each observation is of, shape ``[observations]``; one rank if not given.

    Raises:
        ValueError: shapes do not fit, there are fewer than five observations, or a time is not > 0.
    """
    rank = np.zeros(len(seconds), dtype=np.int64) if ranks is None else np.asarray(ranks)
    if sums.shape != (len(seconds), 4) or rank.shape != seconds.shape or len(seconds) < 5 or not (seconds > 0).all():
        raise ValueError(
            f"CostModel.fit: sums {sums.shape}, seconds {seconds.shape}, ranks {rank.shape}: pass shapes [observations, 4], "
            "[observations], [observations], at least five of them, and times > 0"
        )
    slowness = np.ones(int(rank.max()) + 1)
    for _ in range(_ROUNDS):
        # what differs by less is noise, and would come back as noise in the coefficients
        apart = np.where(np.abs(slowness - 1) < _ALIKE, 1.0, slowness)
        base, coefficients = _robust(sums, seconds / apart[rank])
        ratio = seconds / np.maximum(base + sums @ coefficients, 1e-12)
        medians = np.array([np.median(ratio[rank == r]) if (rank == r).any() else 1.0 for r in range(len(slowness))])
        slowness = medians / np.quantile(medians, 0.5, method="lower")
    residual = float(np.median(np.abs(ratio / slowness[rank] - 1)))
    return CostFit(CostModel(*coefficients.tolist()), base, slowness, residual, len(seconds))


def _robust(sums: Floats, seconds: Floats) -> tuple[float, Floats]:
    """Base and the four coefficients."""
    # equal counts cannot tell a cost per sample from one per step
    columns = np.column_stack([np.ones(len(sums)), sums])
    if np.ptp(sums[:, 0]) < 0.01 * sums[:, 0].mean():
        columns[:, 1] = 0.0
    scale = np.maximum(columns.max(axis=0), 1e-300)
    relative = columns / scale / seconds[:, None]
    weight = np.ones(len(seconds))
    for _ in range(_REWEIGHTINGS):
        found = _non_negative(relative, weight)
        error = np.abs(1 - relative @ found)
        spread = max(1.4826 * float(np.median(error)), 1e-9)
        weight = np.minimum(1.0, _HUBER * spread / np.maximum(error, 1e-12))
    base, *coefficients = (found / scale).tolist()
    return base, np.array(coefficients)


def _non_negative(columns: Floats, weight: Floats) -> Floats:
    """Weighted least squares of 1 by ``columns`` with non-negative coefficients: the best of all subsets, there are few."""
    square, target = columns.T @ (columns * weight[:, None]), columns.T @ weight
    usable = np.flatnonzero(np.diag(square) > 0)
    best, least = np.zeros(columns.shape[1]), 0.0
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            index = np.array(chosen)
            part = np.linalg.lstsq(square[np.ix_(index, index)], target[index], rcond=1e-10)[0]
            loss = float(part @ square[np.ix_(index, index)] @ part - 2 * target[index] @ part)
            if (part >= 0).all() and loss < least:
                best, least = np.zeros(columns.shape[1]), loss
                best[index] = part
    return best
