"""What a sample costs: predicted compute time as a function of its history length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class CostModel:
    """``constant + linear * L + quadratic * L**2`` for a history of length ``L``.

    Only ratios between samples matter for balancing, so the unit is free. The default fits an attention model of width 64.
    """

    constant: float = 0.0
    linear: float = 320.0
    quadratic: float = 1.0

    def __post_init__(self) -> None:
        for name in ("constant", "linear", "quadratic"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"CostModel({name}={value!r}): a coefficient must be a finite number >= 0")

    def __call__(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Cost of each length; any shape in, the same shape out."""
        x = np.asarray(lengths, dtype=np.float64)
        return self.constant + self.linear * x + self.quadratic * x * x

    @classmethod
    def from_config(cls, dim: int, layers: int = 1) -> CostModel:
        """Multiply-adds of ``layers`` HSTU blocks of width ``dim``: five projections and causal attention.

        Source: HSTU (arXiv 2402.17152): ``5 * dim**2 * L`` for U, V, Q, K and output, ``dim * L**2`` for the causal half
        of scores and weighted sum.
        """
        if dim < 1 or layers < 1:
            raise ValueError(f"CostModel.from_config(dim={dim!r}, layers={layers!r}): both must be at least 1")
        return cls(linear=5.0 * dim * dim * layers, quadratic=float(dim * layers))
