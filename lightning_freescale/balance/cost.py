"""What a sample costs: predicted compute time as a function of its history length and its number of unique ids."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from lightning_freescale.balance.fit import CostFit


@dataclass(frozen=True)
class CostModel:
    """``constant + linear * L + quadratic * L**2 + unique * U`` for a history of length ``L`` with ``U`` unique ids.

    Only ratios between samples matter for balancing, so the unit is free. The default fits an attention model of width 64.
    """

    constant: float = 0.0
    linear: float = 320.0
    quadratic: float = 1.0
    unique: float = 0.0

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"CostModel({name}={value!r}): a coefficient must be a finite number >= 0")

    def __call__(self, lengths: ArrayLike, unique: ArrayLike | None = None) -> NDArray[np.float64]:
        """Cost of each length; any shape in, the same shape out.

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
        cls,
        dim: int,
        layers: int = 1,
        heads: int = 1,
        head_dim: int | None = None,
        feedforward: int = 0,
        candidates: int = 0,
    ) -> CostModel:
        """Multiply-adds of the forward of ``layers`` blocks with causal attention.

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
        """The model that explains measured compute times, see :func:`lightning_freescale.balance.fit.fit_cost`."""
        from lightning_freescale.balance.fit import fit_cost

        return fit_cost(np.asarray(sums, dtype=np.float64), np.asarray(seconds, dtype=np.float64), ranks)


def sample_features(lengths: ArrayLike, unique: ArrayLike | None = None) -> NDArray[np.float64]:
    """What the coefficients of :class:`CostModel` multiply, shape ``[samples, 4]``: 1, L, L**2, U (0 if not given)."""
    x = np.asarray(lengths, dtype=np.float64)
    u = np.zeros_like(x) if unique is None else np.asarray(unique, dtype=np.float64)
    return np.stack([np.ones_like(x), x, x * x, u], axis=-1)
