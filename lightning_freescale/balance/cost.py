"""The cost of a sample: compute time by history length and unique ids, from a configuration or from measured times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.validation import Floats, is_non_negative

_ROUNDS, _REWEIGHTINGS, _HUBER = 5, 10, 1.345
_CLOSE = 1e-3
"""Rounds end where nothing changes by more."""
_ALIKE = 0.05
"""Ranks are taken to be equally fast unless they differ by this share."""
SLOW = 1.1
"""A rank is slow if it takes this many times what its samples explain."""


@dataclass(frozen=True)
class CostModel:
    """``constant + linear * L + quadratic * L**2 + unique * U`` for a history of length ``L`` with ``U`` unique ids.

    Only ratios between samples matter for balancing, so the unit is free. The default fits an attention model of width 64.

    Examples:
        >>> CostModel()([10, 1000])
        array([   3300., 1320000.])
        >>> CostModel.from_config(dim=256, layers=8)
        CostModel(constant=0.0, linear=2621440.0, quadratic=2048.0, unique=0.0)
    """

    constant: float = 0.0
    linear: float = 320.0
    quadratic: float = 1.0
    unique: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_non_negative(value):
                raise ValueError(f"CostModel({name}={value!r}): a coefficient must be a finite number >= 0")

    def __call__(self, lengths: ArrayLike, unique: ArrayLike | None = None) -> Floats:
        """Return the cost of each length; any shape in, the same shape out.

        Args:
            lengths: history lengths.
            unique: number of unique ids in each history, the same shape; needed if they cost anything.

        Raises:
            ValueError: ``unique`` is missing.
        """
        if self.unique and unique is None:
            raise ValueError(f"CostModel(unique={self.unique!r}) needs the number of unique ids of every history: pass unique=")
        x = np.asarray(lengths, dtype=np.float64)
        cost = self.constant + self.linear * x + self.quadratic * x * x
        return cost + self.unique * np.asarray(unique, dtype=np.float64) if self.unique else cost

    @classmethod
    def from_config(
        cls, dim: int, layers: int = 1, heads: int = 1, head_dim: int | None = None, feedforward: int = 0, candidates: int = 0
    ) -> CostModel:
        """Count the multiply-adds of the forward of ``layers`` blocks with causal attention.

        Source: HSTU (arXiv 2402.17152): with ``inner = heads * head_dim``, ``5 * dim * inner * L`` for U, V, Q, K and output
        and ``inner * L**2`` for the causal half of scores and weighted sum. For SASRec (arXiv 1808.09781) give its
        ``feedforward``, too; its block has four projections, so the linear part comes out a little high.

        Args:
            dim: width of the embeddings.
            layers: number of blocks.
            heads: attention heads.
            head_dim: width of a head; ``dim / heads`` if not given.
            feedforward: hidden width of a feed-forward layer after attention, 0 for none.
            candidates: items that every position is scored against in training (negatives, or the whole catalogue).

        Raises:
            ValueError: a size is not positive, or ``dim`` cannot be divided among the heads.
        """
        if min(dim, layers, heads) < 1 or min(feedforward, candidates) < 0 or (head_dim is not None and head_dim < 1):
            raise ValueError(
                f"CostModel.from_config(dim={dim!r}, layers={layers!r}, heads={heads!r}, head_dim={head_dim!r}, "
                f"feedforward={feedforward!r}, candidates={candidates!r}): sizes must be at least 1, the last two at least 0"
            )
        if head_dim is None and dim % heads:
            raise ValueError(
                f"CostModel.from_config(dim={dim}, heads={heads}): {heads} heads cannot share {dim}; pass head_dim="
            )
        inner = heads * (dim // heads if head_dim is None else head_dim)
        per_token = layers * (5 * dim * inner + 2 * dim * feedforward) + dim * candidates
        return cls(linear=float(per_token), quadratic=float(inner * layers))

    @staticmethod
    def fit(sums: ArrayLike, seconds: ArrayLike, ranks: ArrayLike | None = None) -> CostFit:
        """Fit measured compute times: least squares of relative errors, non-negative, robust to outliers (Huber 1964).

        Alternates with an estimate of how slow each rank is, so that a slow rank does not pass for expensive samples.

        Args:
            sums: for every rank and step the sums over its samples of :func:`sample_features`, shape ``[observations, 4]``.
            seconds: measured compute time, shape ``[observations]``, > 0.
            ranks: which rank each observation is of, shape ``[observations]``; one rank if not given.

        Raises:
            ValueError: shapes do not fit, there are fewer than five observations, or a time is not > 0.
        """
        sums, seconds = np.asarray(sums, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        rank = np.zeros(len(seconds), dtype=np.int64) if ranks is None else np.asarray(ranks)
        if sums.shape != (len(seconds), 4) or rank.shape != seconds.shape or len(seconds) < 5 or not (seconds > 0).all():
            raise ValueError(
                f"CostModel.fit: sums {sums.shape}, seconds {seconds.shape}, ranks {rank.shape}: pass shapes "
                "[observations, 4], [observations], [observations], at least five of them, and times > 0"
            )
        apart = np.ones(int(rank.max()) + 1)
        for _ in range(_ROUNDS):
            base, coefficients = fit_coefficients(sums, seconds / apart[rank])
            ratio = seconds / np.maximum(base + sums @ coefficients, 1e-12)
            medians = np.array([np.median(ratio[rank == r]) if (rank == r).any() else 1.0 for r in range(len(apart))])
            slowness = medians / np.quantile(medians, 0.5, method="lower")
            # what differs by less is noise, and would come back as noise in the coefficients
            before, apart = apart, np.where(np.abs(slowness - 1) < _ALIKE, 1.0, slowness)
            if np.abs(before - apart).max() < _CLOSE:
                break
        residual = float(np.median(np.abs(ratio / slowness[rank] - 1)))
        return CostFit(CostModel(*coefficients.tolist()), base, slowness, residual, len(seconds))


@dataclass(frozen=True)
class CostFit:
    """A cost model that explains measured compute times, in seconds.

    Attributes:
        model: seconds that a sample adds to its rank's step.
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

    def slow_ranks(self) -> dict[int, float]:
        """Return the ranks that take longer than their samples explain, and how many times as long."""
        return {int(rank): float(self.slowness[rank]) for rank in np.flatnonzero(self.slowness > SLOW)}


def sample_features(lengths: ArrayLike, unique: ArrayLike | None = None) -> Floats:
    """Return what the coefficients of :class:`CostModel` multiply, shape ``[samples, 4]``: 1, L, L**2, U (0 if not given)."""
    x = np.asarray(lengths, dtype=np.float64)
    u = np.zeros_like(x) if unique is None else np.asarray(unique, dtype=np.float64)
    return np.stack([np.ones_like(x), x, x * x, u], axis=-1)


def fit_coefficients(sums: Floats, seconds: Floats) -> tuple[float, Floats]:
    """Return the seconds of a step without samples, and the coefficients of the sums.

    Args:
        sums: of a rank and step, shape ``[observations, coefficients]``; the first column shows whether counts are equal.
        seconds: measured, shape ``[observations]``.
    """
    columns = np.column_stack([np.ones(len(sums)), sums])
    # equal counts cannot separate a cost per sample from one per step
    if np.ptp(sums[:, 0]) < 0.01 * sums[:, 0].mean():
        columns[:, 1] = 0.0
    scale = np.maximum(columns.max(axis=0), 1e-300)
    relative = columns / scale / seconds[:, None]
    weight = np.ones(len(seconds))
    for _ in range(_REWEIGHTINGS):
        found = _least_squares(relative, weight)
        error = np.abs(1 - relative @ found)
        before, weight = weight, np.minimum(1.0, _HUBER * _spread(error) / np.maximum(error, 1e-12))
        if np.abs(before - weight).max() < _CLOSE:
            break
    base, *coefficients = (found / scale).tolist()
    return base, np.array(coefficients)


def huber_loss(error: Floats, spread_of: Floats) -> Floats:
    """Return Huber's loss of errors, by the spread of some; quadratic up to 1.345 standard deviations, then linear."""
    limit, size = _HUBER * _spread(np.abs(spread_of)), np.abs(error)
    return np.where(size <= limit, size * size / 2, limit * (size - limit / 2))


def _spread(error: Floats) -> float:
    return max(1.4826 * float(np.median(error)), 1e-9)  # the standard deviation, if the errors are normal


def _least_squares(columns: Floats, weight: Floats) -> Floats:
    """Return weighted least squares of 1 by ``columns`` with non-negative coefficients: the best of all subsets."""
    square, target = columns.T @ (columns * weight[:, None]), columns.T @ weight
    chosen = _subsets(columns.shape[1])
    usable = (np.diag(square) > 0) | ~chosen
    chosen = chosen[usable.all(axis=1)]
    # all at once, those left out with a diagonal of their own: a call for each would take ten times as long
    pairs = chosen[:, :, None] & chosen[:, None, :]
    ridge = np.where(chosen, 1e-10 * np.diag(square), 1.0)
    parts = np.where(pairs, square, 0.0) + ridge[:, :, None] * np.eye(columns.shape[1])
    found = np.linalg.solve(parts, np.where(chosen, target, 0.0)[:, :, None])[:, :, 0]
    loss = np.einsum("si,ij,sj->s", found, square, found) - 2 * found @ target
    loss[(found < 0).any(axis=1)] = np.inf
    return np.maximum(found[int(np.argmin(loss))], 0.0)


@cache
def _subsets(size: int) -> NDArray[np.bool_]:
    """Return which of ``size`` things are in each of their subsets, the empty one first; shape ``[2 ** size, size]``."""
    return np.array(list(product([False, True], repeat=size)))
