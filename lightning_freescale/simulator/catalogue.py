"""Closed forms for the number of rows that batches of Zipf-distributed items need and share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from lightning_freescale.balance.validation import Floats
from lightning_freescale.simulator.quantity import Quantity, assumed

_BINS = 400
_STEEPEST = 3.0


@dataclass(frozen=True)
class Catalogue:
    """Items, one per row, whose popularity falls as ``rank ** -exponent``. Lookups are independent of each other.

    Raises:
        ValueError: ``rows`` is less than 1.
    """

    rows: int = 10_000_000
    exponent: Quantity = field(default_factory=lambda: assumed(1.05, 0.8, 1.2, "", "popularity of items in public data sets"))

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"Catalogue(rows={self.rows}): pass a number of at least 1")

    @property
    def edges(self) -> Floats:
        """The boundaries, as popularity ranks, of the bins whose rows count as equally popular."""
        return np.unique(np.geomspace(1, self.rows + 1, _BINS).round())

    def unique(self, tokens: Floats | float) -> Floats:
        """Return the expected number of different rows of ``tokens`` lookups, in the shape of ``tokens``."""
        chance, count = _popularity(self.rows, self.exponent.value)
        return _over_grid(tokens, lambda grid: -np.expm1(-np.outer(grid, chance)) @ count)

    def colliding(self, tokens: Floats | float, others: float) -> Floats:
        """Return the expected number of rows that ``tokens`` lookups share with ``others`` other lookups."""
        chance, count = _popularity(self.rows, self.exponent.value)
        needed = -np.expm1(-others * chance) * count
        return _over_grid(tokens, lambda grid: -np.expm1(-np.outer(grid, chance)) @ needed)

    def hot_owner(self, ranks: int) -> float:
        """Return the load of the most popular item's owner / mean load of the owners, if duplicate rows are sent."""
        chance, _ = _popularity(self.rows, self.exponent.value)
        return float(1 + (ranks - 1) * chance[0])

    def collision_rate(self, tokens: float) -> float:
        """Return the share of the rows of a global batch of ``tokens`` lookups that the batch before also needs."""
        return float(self.colliding(tokens, tokens) / self.unique(tokens))

    def fitted(self, collision_rate: Quantity, tokens: float) -> Catalogue:
        """Return the catalogue with the same number of rows whose global batches of ``tokens`` lookups have a collision rate.

        Raises:
            ValueError: No exponent up to 3 leads to this rate.
        """
        exponents = np.linspace(0.0, _STEEPEST, 61)
        rates = [replace(self, exponent=Quantity(each, "assumed")).collision_rate(tokens) for each in exponents.tolist()]
        # with more lookups than rows, the rate first falls; popularity is on the branch of this catalogue's exponent
        turn = int(np.argmin(rates))
        branch = slice(turn, None) if exponents[turn] < self.exponent.value else slice(turn, None, -1)
        rates, exponents = rates[branch], exponents[branch]
        if not 0.9 * rates[0] <= collision_rate.value <= rates[-1] / 0.9:  # chance explains such differences
            raise ValueError(
                f"the collision rate {collision_rate.value:.3f} ({collision_rate.source}) is not possible for {tokens:.0f} "
                f"lookups in {self.rows} rows, only rates from {rates[0]:.3f} to {rates[-1]:.3f} are. Check the number of "
                "rows, or pass an exponent."
            )
        ends = (collision_rate.low, collision_rate.value, collision_rate.high)
        low, value, high = (float(np.interp(rate, rates, exponents)) for rate in ends)
        source = f"from a collision rate of {collision_rate.value:.3f}, {collision_rate.source}"
        return replace(self, exponent=Quantity(value, collision_rate.word, min(low, high), max(low, high), "", source))


@lru_cache(maxsize=256)
def _popularity(rows: int, exponent: float) -> tuple[Floats, Floats]:
    """Return the probability of a row to be looked up and the number of rows for each bin."""
    edges = Catalogue(rows).edges
    count = np.diff(edges)
    first, last = edges[:-1] - 0.5, edges[1:] - 0.5  # limits of the integral around each row
    if abs(exponent - 1) < 1e-9:
        weight = np.log(last / first)
    else:
        weight = (last ** (1 - exponent) - first ** (1 - exponent)) / (1 - exponent)
    few = count == 1
    weight[few] = edges[:-1][few] ** -exponent
    return weight / weight.sum() / count, count


def _over_grid(tokens: Floats | float, function: Callable[[Floats], Floats]) -> Floats:
    """Evaluate the function on a grid and interpolate, because many ranks have similar numbers of tokens."""
    asked = np.asarray(tokens, dtype=np.float64)
    low, high = float(asked.min()), float(asked.max())
    if high <= 0:
        return np.zeros_like(asked)
    grid = np.unique(asked) if asked.size <= 24 else np.linspace(low, high, 24)
    return np.interp(asked, grid, function(grid))
