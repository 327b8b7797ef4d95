"""The cost model of a sample: compute time by history length and unique ids, from a configuration or measured times."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.balance.validation import Floats, is_non_negative

_ROUNDS, _REWEIGHTINGS, _HUBER = 5, 10, 1.345
_CLOSE = 1e-3
"""Iterations stop when nothing changes by more."""
_ALIKE = 0.05
"""Relative difference below which ranks count as equally fast."""


@dataclass(frozen=True)
class CostModel:
    """The cost ``constant + linear * L + quadratic * L**2 + unique * U`` of a history of length ``L`` with ``U`` unique ids.

    Balancing depends only on the ratios between costs, so the unit is arbitrary. The default is an attention model of width 64.

    Raises:
        ValueError: A coefficient is not a finite number >= 0.

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
                raise ValueError(f"CostModel({name}={value!r}): pass a finite number >= 0")

    def __call__(self, lengths: ArrayLike, unique: ArrayLike | None = None) -> Floats:
        """Return the cost of each history, in the shape of ``lengths``.

        Args:
            lengths: History lengths, any shape.
            unique: Number of unique ids in each history, the same shape. Required if the coefficient ``unique`` is not 0.

        Raises:
            ValueError: ``unique`` is missing.
        """
        if self.unique and unique is None:
            raise ValueError(f"CostModel(unique={self.unique!r}) needs the number of unique ids of each history. Pass unique=.")
        x = np.asarray(lengths, dtype=np.float64)
        cost = self.constant + self.linear * x + self.quadratic * x * x
        return cost + self.unique * np.asarray(unique, dtype=np.float64) if self.unique else cost

    @classmethod
    def from_config(
        cls, dim: int, layers: int = 1, heads: int = 1, head_dim: int | None = None, feedforward: int = 0, candidates: int = 0
    ) -> CostModel:
        """Count the multiply-adds of the forward pass of ``layers`` blocks with causal attention.

        Source: HSTU (arXiv 2402.17152). With ``inner = heads * head_dim``, a block takes ``5 * dim * inner * L`` for U, V, Q, K
        and the output, and ``inner * L**2`` for the causal half of scores and weighted sum. For SASRec (arXiv 1808.09781), pass
        ``feedforward``. Its blocks have four projections, so the linear part is slightly too high.

        Args:
            dim: Width of the embeddings.
            layers: Number of blocks.
            heads: Number of attention heads.
            head_dim: Width of a head; ``dim / heads`` by default.
            feedforward: Hidden width of a feed-forward layer after attention; 0 for none.
            candidates: Number of items that each position is scored against in training.

        Raises:
            ValueError: A size is too small, or ``dim`` is not a multiple of ``heads``.
        """
        if min(dim, layers, heads) < 1 or min(feedforward, candidates) < 0 or (head_dim is not None and head_dim < 1):
            raise ValueError(
                f"CostModel.from_config(dim={dim!r}, layers={layers!r}, heads={heads!r}, head_dim={head_dim!r}, "
                f"feedforward={feedforward!r}, candidates={candidates!r}): pass sizes of at least 1, and of at least "
                "0 for feedforward and candidates"
            )
        if head_dim is None and dim % heads:
            raise ValueError(
                f"CostModel.from_config(dim={dim}, heads={heads}): dim is not a multiple of heads. Pass head_dim=."
            )
        inner = heads * (dim // heads if head_dim is None else head_dim)
        per_token = layers * (5 * dim * inner + 2 * dim * feedforward) + dim * candidates
        return cls(linear=float(per_token), quadratic=float(inner * layers))

    @staticmethod
    def fit(sums: ArrayLike, seconds: ArrayLike, ranks: ArrayLike | None = None) -> CostFit:
        """Fit measured compute times by non-negative least squares of relative errors, robust to outliers (Huber 1964).

        The fit alternates with an estimate of the slowness of each rank, so that the samples of a slow rank do not look
        expensive.

        Args:
            sums: Sums of :func:`sample_features` over the samples of each rank and step, shape ``[observations, 4]``.
            seconds: Measured compute times, > 0, shape ``[observations]``.
            ranks: Rank of each observation, shape ``[observations]``; a single rank by default.

        Raises:
            ValueError: The shapes do not match, there are fewer than five observations, or a time is not > 0.
        """
        sums, seconds = np.asarray(sums, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        rank = np.zeros(len(seconds), dtype=np.int64) if ranks is None else np.asarray(ranks)
        if sums.shape != (len(seconds), 4) or rank.shape != seconds.shape or len(seconds) < 5 or not (seconds > 0).all():
            raise ValueError(
                f"CostModel.fit got sums {sums.shape}, seconds {seconds.shape}, ranks {rank.shape}. Pass shapes "
                "[observations, 4], [observations], [observations], at least five observations, and times > 0."
            )
        apart = np.ones(int(rank.max()) + 1)
        for _ in range(_ROUNDS):
            base, coefficients = fit_coefficients(sums, seconds / apart[rank])
            ratio = seconds / np.maximum(base + sums @ coefficients, 1e-12)
            medians = np.array([np.median(ratio[rank == r]) if (rank == r).any() else 1.0 for r in range(len(apart))])
            slowness = medians / np.quantile(medians, 0.5, method="lower")
            # smaller differences are noise, which would become noise of the coefficients
            before, apart = apart, np.where(np.abs(slowness - 1) < _ALIKE, 1.0, slowness)
            if np.abs(before - apart).max() < _CLOSE:
                break
        residual = float(np.median(np.abs(ratio / slowness[rank] - 1)))
        return CostFit(CostModel(*coefficients.tolist()), base, slowness, residual, len(seconds))


@dataclass(frozen=True)
class CostFit:
    """A cost model fitted to measured compute times.

    Attributes:
        model: Seconds that a sample adds to the step of its rank.
        base: Seconds of a rank's step that do not depend on its samples.
        slowness: Time of each rank / time that its samples explain, relative to the lower median rank, shape ``[ranks]``.
        residual: Median relative error of the fitted times.
        observations: Number of measured times.
    """

    model: CostModel
    base: float
    slowness: Floats
    residual: float
    observations: int


def sample_features(lengths: ArrayLike, unique: ArrayLike | None = None) -> Floats:
    """Return the factors of the coefficients of :class:`CostModel`: 1, L, L**2, U (0 by default), shape ``[samples, 4]``."""
    x = np.asarray(lengths, dtype=np.float64)
    u = np.zeros_like(x) if unique is None else np.asarray(unique, dtype=np.float64)
    return np.stack([np.ones_like(x), x, x * x, u], axis=-1)


def fit_coefficients(sums: Floats, seconds: Floats) -> tuple[float, Floats]:
    """Return the seconds of a step without samples, and the coefficients of ``sums``, shape ``[observations, coefficients]``.

    The first column of ``sums`` holds the numbers of samples, or costs that are summed.
    """
    columns = np.column_stack([np.ones(len(sums)), sums])
    # equal counts cannot separate a cost per sample from a cost per step
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
    """Return Huber's loss of errors: quadratic up to 1.345 standard deviations of ``spread_of``, then linear."""
    limit, size = _HUBER * _spread(np.abs(spread_of)), np.abs(error)
    return np.where(size <= limit, size * size / 2, limit * (size - limit / 2))


def _spread(error: Floats) -> float:
    return max(1.4826 * float(np.median(error)), 1e-9)  # the standard deviation of normally distributed errors


def _least_squares(columns: Floats, weight: Floats) -> Floats:
    """Return the non-negative coefficients of ``columns`` with the least weighted squared distance from 1.

    The result is the best one over all subsets of the columns.
    """
    square, target = columns.T @ (columns * weight[:, None]), columns.T @ weight
    chosen = np.array(list(product([False, True], repeat=columns.shape[1])))  # all subsets, the empty one first
    usable = (np.diag(square) > 0) | ~chosen
    chosen = chosen[usable.all(axis=1)]
    # solve all subsets at once, with 1 on the diagonal of unused columns, which takes a tenth of the time of single calls
    pairs = chosen[:, :, None] & chosen[:, None, :]
    ridge = np.where(chosen, 1e-10 * np.diag(square), 1.0)
    parts = np.where(pairs, square, 0.0) + ridge[:, :, None] * np.eye(columns.shape[1])
    found = np.linalg.solve(parts, np.where(chosen, target, 0.0)[:, :, None])[:, :, 0]
    loss = np.einsum("si,ij,sj->s", found, square, found) - 2 * found @ target
    loss[(found < 0).any(axis=1)] = np.inf
    return np.maximum(found[int(np.argmin(loss))], 0.0)
