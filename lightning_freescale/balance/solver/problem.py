"""What the search works on, in whole numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """Groups of samples that stay together (most often single samples) to share out among ranks, the most expensive first.

    A rank's time is its summed cost times its ``slowness``. All numbers are whole, so sums do not depend on their order:
    numpy and numba find the same plan on every machine, and a plan can be hashed and compared.

    Attributes:
        cost: at least 1, shape ``[groups]``; so a rank without a group is always the least loaded.
        size: samples in each group, shape ``[groups]``.
        tokens: shape ``[groups]``, or None if nothing limits them.
        slowness: shape ``[ranks]``; all 1 if the ranks are equally fast.
        min_samples, max_samples: how many a rank may hold.
        ranks_at_max: how many ranks may hold ``max_samples``, the others one less.
        max_tokens: how many a rank may hold, all the same or shape ``[ranks]``.
        unrounded: slowness before it was rounded, shape ``[ranks]``; None if it was not.
    """

    cost: Ints
    size: Ints
    tokens: Ints | None
    slowness: Ints
    min_samples: int
    max_samples: int
    ranks_at_max: int
    max_tokens: int | Ints
    unrounded: NDArray[np.float64] | None = None

    @property
    def ranks(self) -> int:
        """How many ranks share the groups."""
        return len(self.slowness)

    @cached_property
    def exact(self) -> Problem:
        """The same with the slowness that ranks have: what a plan is worth and the bound are told by it."""
        slowness: Any = self.unrounded
        return self if slowness is None else replace(self, slowness=slowness, unrounded=None)

    @cached_property
    def ideal_time(self) -> float:
        """Time of every rank if the work could be spread perfectly."""
        # exactly rounded, whatever the processor
        pace = math.fsum(1.0 / self.slowness) if np.ptp(self.slowness) else self.ranks / float(self.slowness[0])
        return float(self.cost.sum() / pace)

    @cached_property
    def limits_counts_only(self) -> bool:
        """Whether nothing but the number of single samples is limited."""
        return self.tokens is None and bool((self.size == 1).all())

    def allows(self, rank_of_group: Ints) -> bool:
        """Return whether a plan is within the limits on samples and tokens."""
        held = np.bincount(rank_of_group, None if self.limits_counts_only else self.size, self.ranks)
        within = held.min() >= self.min_samples and held.max() <= self.max_samples
        fits = self.tokens is None or (np.bincount(rank_of_group, self.tokens, self.ranks) <= self.max_tokens).all()
        return bool(within and fits)

    def allows_padded(self, rank_of_group: Ints) -> bool:
        """Return whether a plan is within the limits if every rank pads its groups to the one with most tokens."""
        held = np.bincount(rank_of_group, minlength=self.ranks)
        most = np.zeros(self.ranks, dtype=np.int64)
        if self.tokens is not None:
            np.maximum.at(most, rank_of_group, self.tokens)
        within = held.min() >= self.min_samples and held.max() <= self.max_samples
        return bool(within and (self.tokens is None or (held * most <= self.max_tokens).all()))

    def part(self, groups: Ints, ranks: int) -> Problem:
        """Return that of some groups, single samples without a limit on tokens, on so many ranks, all equally fast.

        Where the numbers of samples are equal, they are in the part.
        """
        least, most, at_max = self.min_samples, self.max_samples, ranks
        if self.ranks * (most - 1) + self.ranks_at_max == len(self.cost):
            least, at_max = divmod(len(groups), ranks)
            most, at_max = least + bool(at_max), at_max or ranks
        slowness = self.slowness[:ranks]
        return Problem(self.cost[groups], self.size[: len(groups)], None, slowness, least, most, at_max, self.max_tokens)

    def times(self, rank_of_group: Ints) -> Ints:
        """Return the summed cost times slowness of every rank, shape ``[ranks]``."""
        # float64 sums of whole numbers below 2**53 are exact
        return np.bincount(rank_of_group, self.cost, self.ranks).astype(np.int64) * self.slowness


def dearest_first(cost: Ints) -> Ints:
    """Return what a stable ``argsort(-cost)`` does, shape ``[groups]``; many times as quick."""
    below = int(cost.max(initial=0)) - cost
    order, bits, places = np.arange(len(cost)), int(below.max(initial=0)).bit_length(), len(cost).bit_length()
    if bits + places < 64:  # cost and place in one number: numpy sorts several times as quickly as it finds an order
        return np.sort(below << places | order) & ((1 << places) - 1)
    for shift in range(0, bits, 16):  # and short integers in linear time
        order = order[np.argsort((below[order] >> shift).astype(np.uint16), kind="stable")]
    return order


def to_integers(cost: NDArray[np.float64], slowness: Ints) -> Ints:
    """Return ``cost`` times a power of two, rounded, so that every sum and key of the search fits 62 bits; plus 1."""
    bits = min(52, 61 - len(slowness).bit_length() - int(slowness.max()).bit_length())
    top, fine = int(np.frexp(cost.max())[1]), 61 - len(cost).bit_length()
    # the sum's size, from whole numbers: a sum of floats would depend on their order
    size = int(np.rint(np.ldexp(cost, fine - top)).astype(np.int64).sum()).bit_length() + top - fine
    # at least 1 each, so that a rank without a group is always the next one in the heap
    return np.rint(np.ldexp(cost, bits - size)).astype(np.int64) + 1
