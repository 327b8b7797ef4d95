"""The problem that the search solves, and the lower bound on the load of the slowest rank of any plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_SAME = 1.5e-7
"""Relative difference below which two costs are equal: costs have 24 bits."""
_FINE = 2e-4
"""Smallest step between possible loads that is considered, as a share of the load."""
_MANY = 1024
"""Number of different costs above which possible loads are not considered."""


@dataclass(frozen=True)
class Problem:
    """Samples to assign to equally fast ranks, the most expensive first.

    All numbers are whole, so that sums do not depend on their order and every machine finds the same plan.
    """

    cost: Ints  # at least 1, so that a rank without a sample always has the least load; shape [samples]
    ranks: int
    tokens: Ints | None  # shape [samples]; None if tokens are not limited
    min_samples: int  # of a rank
    max_samples: int  # of a rank
    ranks_at_max: int  # number of ranks that may have max_samples; the others may have one sample less
    max_tokens: int  # of a rank

    @cached_property
    def ideal_load(self) -> float:
        """The mean load of the ranks."""
        return float(self.cost.sum() / self.ranks)

    def allows(self, rank_of_sample: Ints, padded: bool = False) -> bool:
        """Return True if a plan keeps all limits; with ``padded``, each rank pads its samples to the one with most tokens."""
        held = np.bincount(rank_of_sample, minlength=self.ranks)
        within = held.min() >= self.min_samples and held.max() <= self.max_samples
        if self.tokens is None:
            return bool(within)
        if padded:
            tokens: Ints = np.zeros(self.ranks, dtype=np.int64)
            np.maximum.at(tokens, rank_of_sample, self.tokens)
            tokens *= held
        else:
            tokens = np.bincount(rank_of_sample, self.tokens, self.ranks)
        return bool(within and (tokens <= self.max_tokens).all())

    def part(self, samples: Ints, ranks: int) -> Problem:
        """Return the problem of some samples on some ranks, without a limit on tokens; equal counts stay equal."""
        least, most, at_max = self.min_samples, self.max_samples, ranks
        if self.ranks * (most - 1) + self.ranks_at_max == len(self.cost):
            least, at_max = divmod(len(samples), ranks)
            most, at_max = least + bool(at_max), at_max or ranks
        return Problem(self.cost[samples], ranks, None, least, most, at_max, self.max_tokens)

    def loads(self, rank_of_sample: Ints) -> Ints:
        """Return the summed cost of every rank, shape ``[ranks]``."""
        return np.bincount(rank_of_sample, self.cost, self.ranks).astype(np.int64)  # exact: sums stay below 2**53

    def largest_load(self, rank_of_sample: Ints) -> int:
        return int(self.loads(rank_of_sample).max())


def dearest_first(cost: Ints) -> Ints:
    """Return the result of a stable ``argsort(-cost)``, shape ``[samples]``, in a fraction of the time."""
    below = int(cost.max(initial=0)) - cost
    order, bits, places = np.arange(len(cost)), int(below.max(initial=0)).bit_length(), len(cost).bit_length()
    if bits + places < 64:  # cost and index in one number, because numpy's sort is several times faster than its argsort
        return np.sort(below << places | order) & ((1 << places) - 1)
    for shift in range(0, bits, 16):  # numpy sorts 16-bit integers in linear time
        order = order[np.argsort((below[order] >> shift).astype(np.uint16), kind="stable")]
    return order


def to_integers(cost: NDArray[np.float64], ranks: int) -> Ints:
    """Return ``cost`` times a power of two, rounded, plus 1. Every sum and key of the search then fits in 62 bits."""
    bits = min(52, 60 - ranks.bit_length())
    top, fine = int(np.frexp(cost.max())[1]), 61 - len(cost).bit_length()
    # sum whole numbers, because a sum of floats depends on their order
    size = int(np.rint(np.ldexp(cost, fine - top)).astype(np.int64).sum()).bit_length() + top - fine
    # at least 1, so that a rank without a sample is always the first one in the heap
    return np.rint(np.ldexp(cost, bits - size)).astype(np.int64) + 1


@dataclass(frozen=True)
class Block:
    """The ranks whose mean load cannot be below the bound, with the samples that they share."""

    samples: Ints  # sorted indices of these samples
    others: Ints  # sorted indices of all other samples
    ranks: int


def lower_bound(problem: Problem, rows: int | None = None) -> tuple[float, Block | None]:
    """Return the lower bound on the load of the slowest rank, and the ranks that cause it; None if all ranks do.

    The bound is the maximum of the mean load and, for every ``m``, the load that the ``m`` most expensive samples cause. Let
    ``m = k * ranks + j`` with ``1 <= j <= ranks``. The ``j`` ranks that hold most of these samples hold at least
    ``(k + 1) * j`` of them. With fewer, one of these ranks would hold at most ``k``, and so would all other ranks. Their mean
    load is therefore at least that of the ``(k + 1) * j`` cheapest of the ``m`` samples, plus the cheapest other samples that
    ``j`` ranks must take to reach the minimum count. Samples too expensive for three to share a rank are also compared in
    pairs. If all costs are multiples of a number, the loads are multiples too, and the bound is rounded up to a multiple.

    Args:
        problem: The problem. A limit on tokens is ignored, because it can only raise the loads.
        rows: If given, only ``k < rows`` is considered, without pairs and multiples. The bound is then lower.
    """
    cost = problem.cost[::-1]
    samples, ranks = len(cost), problem.ranks
    cheapest = np.zeros(samples + 1, dtype=np.int64)
    np.cumsum(cost, out=cheapest[1:])
    last = samples if rows is None else min(samples, rows * ranks)
    least = _least_samples(problem)
    # one row for each k, one column for each j; the last row may be too long
    k, j = np.arange(-(-last // ranks))[:, None], np.arange(1, ranks + 1)
    upto, beside = samples - k * (ranks - j), np.maximum(least - (k + 1) * j, 0)
    held = (cheapest[upto] + cheapest[beside]).ravel()[:last] - cheapest[samples - last : samples][::-1]
    mean = held / np.resize(j, last)
    mean[(least > upto).ravel()[:last]] = np.inf  # impossible, because too few samples are left
    largest = int(mean.argmax())
    load = max(float(mean[largest]), problem.ideal_load)
    if rows is None:
        load = _rounded_up(problem, cost, max(load, _of_pairs(problem, cheapest, int(least[0]))))
    if mean[largest] <= problem.ideal_load or (largest + 1) % ranks == 0:
        return load, None
    if largest >= ranks:  # with two kinds of samples, these ranks share all expensive ones
        costs = problem.cost[largest : min((largest // ranks + 1) * ranks, samples)]
        last = largest + int((costs[:-1] / costs[1:]).argmax()) if len(costs) > 1 else largest
        largest = last if (last + 1) % ranks else largest
    row, column = divmod(largest, ranks)
    ends = [samples - int(upto[row, column]), largest + 1, samples - int(beside[row, column])]
    before, expensive, between, cheap = np.split(np.arange(samples), ends)
    return load, Block(np.concatenate([expensive, cheap]), np.concatenate([before, between]), column + 1)


def _of_pairs(problem: Problem, cheapest: Ints, least: int) -> float:
    """Return the minimum load of a rank that must hold two expensive samples, or three cheaper ones.

    Let ``a + b = 2 * ranks + 1``. If none of the ``a`` most expensive samples shares its rank with another of the ``b`` most
    expensive, the remaining ``2 * (ranks - a) + 1`` of the ``b`` share ``ranks - a`` ranks, so that three share one rank.
    ``cheapest`` holds the cumulative cost of the samples, the cheapest first.
    """
    samples, ranks = len(problem.cost), problem.ranks
    b = np.arange(ranks + 1, min(2 * ranks, samples) + 1)
    if not len(b):
        return 0.0
    held = problem.cost[2 * ranks - b] + problem.cost[b - 1] + cheapest[max(least - 2, 0)]
    if problem.max_samples > 2:
        three = cheapest[samples - b[1:] + 3] - cheapest[samples - b[1:]] + cheapest[max(least - 3, 0)]
        held[1:] = np.minimum(held[1:], three)
    return float(held.max())


def _least_samples(problem: Problem) -> Ints:
    """Return the minimum number of samples of 1, 2, ... ranks together, shape ``[ranks]``."""
    ranks = np.arange(1, problem.ranks + 1)
    others = problem.ranks - ranks
    at_max = np.minimum(others, problem.ranks_at_max)
    most = at_max * problem.max_samples + (others - at_max) * (problem.max_samples - 1)
    return np.maximum(ranks * problem.min_samples, len(problem.cost) - most)


def _rounded_up(problem: Problem, cost: Ints, load: float) -> float:
    """Return ``load``, rounded up to a possible load if all costs are multiples, or nearly multiples, of one number."""
    if len(cost) < 2:
        return load
    same_count = problem.min_samples == problem.max_samples
    values = cost[np.concatenate([[True], cost[1:] > cost[:-1]])]
    # at equal counts, only the part above the cheapest sample's cost must be a multiple
    offset = int(values[0]) if same_count else 0
    base, finest = problem.min_samples * offset, _FINE * load
    if len(values) > _MANY or (len(values) > 1 and np.diff(values).min() < finest):
        return load
    step = _common_step(values, offset, finest)
    if not step:
        return max(load, float(base + _in_steps(cost - offset, values - offset, problem.ranks)))
    rounding = 2 * _SAME * load
    steps = math.ceil((load - base - rounding) / step)
    return max(load, base + steps * step - rounding)


def _in_steps(cost: Ints, values: Ints, ranks: int) -> int:
    """Return the minimum load of a rank that has its share of steps, rounded up.

    A step is about the smallest difference between two costs, and each cost is a whole number of steps. Some rank has at least
    the mean number of steps. Its load is at least that of the samples that are cheapest per step. If costs have a linear and a
    quadratic part in the length, steps are lengths. ``values`` are the different costs.
    """
    if len(values) < 2:
        return 0
    sizes = np.rint(np.diff(values, prepend=0) / np.diff(values).min()).astype(np.int64).cumsum()
    steps = sizes[np.searchsorted(values, cost)]
    cost, steps = cost[steps > 0], steps[steps > 0]
    order = np.argsort(cost / steps, kind="stable")
    cost, steps, share = cost[order], steps[order], -(-int(steps.sum()) // ranks)
    held = steps.cumsum()
    last = int(np.searchsorted(held, share))
    missing = share - int(held[last] - steps[last])
    return int(cost[:last].sum()) + int(cost[last]) * missing // int(steps[last])


def _common_step(values: Ints, offset: int, finest: float) -> float:
    """Return the largest number that divides ``values - offset`` up to rounding; 0 if it is below ``finest``."""
    beyond = (values - offset).astype(np.float64)
    value, beyond = values[beyond > 0], beyond[beyond > 0]
    step = float(beyond[0]) if len(beyond) else 0.0
    while step > finest:  # Euclid's algorithm
        times = np.rint(beyond / step)
        left = np.abs(beyond - times * step)
        coarse = left[left > 0.01 * step]
        if not len(coarse):
            # fsum, because the result of other sums depends on the machine
            step = math.fsum(beyond * times) / math.fsum(times * times)
            return step if (np.abs(beyond - times * step) <= _SAME * value).all() else 0.0
        step = float(coarse.min())
    return 0.0
