"""What the search works on: units in whole numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """Units (samples, or groups of samples that stay together) to share out.

    A rank's time is its summed cost times its ``slowness``. All numbers are whole, so sums do not depend on their order and
    every machine finds the same plan.

    Attributes:
        cost: at least 1, shape ``[units]``; so a rank without a unit is always the least loaded.
        size: samples in each unit, shape ``[units]``.
        tokens: shape ``[units]``, or None if nothing limits them.
        slowness: shape ``[ranks]``; all 1 if the ranks are equally fast.
        least, most: samples that a rank may hold.
        spare: how many ranks may hold ``most``, the others one less; None if all may, at any counts.
        token_limit: tokens that a rank may hold.
    """

    cost: Ints
    size: Ints
    tokens: Ints | None
    slowness: Ints
    least: int
    most: int
    spare: int | None
    token_limit: int

    @property
    def ranks(self) -> int:
        """How many ranks share the units."""
        return len(self.slowness)

    @cached_property
    def spread(self) -> float:
        """Time of every rank if the work could be spread perfectly."""
        return float(self.cost.sum() / math.fsum(1.0 / self.slowness))  # exactly rounded, whatever the processor

    @cached_property
    def plain(self) -> bool:
        """No limit but the count."""
        return self.tokens is None and bool((self.size == 1).all())

    @cached_property
    def order(self) -> Ints:
        """Dearest first, ties by index."""
        return np.argsort(-self.cost, kind="stable")

    def allows(self, rank_of_unit: Ints) -> bool:
        """Whether a plan is within the limits on samples and tokens."""
        held = np.bincount(rank_of_unit, self.size, self.ranks)
        within = held.min() >= self.least and held.max() <= self.most
        fits = self.tokens is None or np.bincount(rank_of_unit, self.tokens, self.ranks).max() <= self.token_limit
        return bool(within and fits)

    def times(self, rank_of_unit: Ints) -> Ints:
        """Summed cost times slowness of every rank, shape ``[ranks]``."""
        # float64 sums of whole numbers below 2**53 are exact
        return np.bincount(rank_of_unit, self.cost, self.ranks).astype(np.int64) * self.slowness


def whole(cost: NDArray[np.float64], slowness: Ints) -> Ints:
    """``cost`` scaled by a power of two and rounded so that every sum and key of the search fits 62 bits, plus 1."""
    bits = min(52, 61 - len(slowness).bit_length() - int(slowness.max()).bit_length())
    top, fine = int(np.frexp(cost.max())[1]), 61 - len(cost).bit_length()
    # the sum's size, from whole numbers: a sum of floats would depend on their order
    size = int(np.rint(np.ldexp(cost, fine - top)).astype(np.int64).sum()).bit_length() + top - fine
    return np.rint(np.ldexp(cost, bits - size)).astype(np.int64) + 1
