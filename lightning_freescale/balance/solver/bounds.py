"""The problem that the search solves, in whole numbers, and the load that the slowest rank of any plan reaches at least."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_SAME = 1.5e-7
"""Costs have 24 bits: a relative difference below this is rounding."""
_FINE = 2e-4
"""Steps between possible loads that are smaller than this share of the load change nothing."""
_MANY = 1024


@dataclass(frozen=True)
class Problem:
    """Samples to assign to equally fast ranks, the most expensive first.

    All numbers are whole, so sums do not depend on their order: every machine finds the same plan, and a plan can be hashed and
    compared.

    Attributes:
        cost: at least 1, shape ``[samples]``; so a rank without a sample always has the least load.
        ranks: number of ranks that share the samples.
        tokens: shape ``[samples]``, or None if nothing limits them.
        min_samples, max_samples: number of samples of a rank.
        ranks_at_max: number of ranks that may have ``max_samples``; the others may have one less.
        max_tokens: tokens of a rank at most.
    """

    cost: Ints
    ranks: int
    tokens: Ints | None
    min_samples: int
    max_samples: int
    ranks_at_max: int
    max_tokens: int

    @cached_property
    def ideal_load(self) -> float:
        """Load of every rank if the cost could be divided perfectly."""
        return float(self.cost.sum() / self.ranks)

    def allows(self, rank_of_sample: Ints) -> bool:
        """Return whether a plan keeps the limits on samples and tokens."""
        held = np.bincount(rank_of_sample, minlength=self.ranks)
        within = held.min() >= self.min_samples and held.max() <= self.max_samples
        fits = self.tokens is None or (np.bincount(rank_of_sample, self.tokens, self.ranks) <= self.max_tokens).all()
        return bool(within and fits)

    def allows_padded(self, rank_of_sample: Ints) -> bool:
        """Return whether a plan keeps the limits if every rank pads its samples to the one with most tokens."""
        held = np.bincount(rank_of_sample, minlength=self.ranks)
        most = np.zeros(self.ranks, dtype=np.int64)
        if self.tokens is not None:
            np.maximum.at(most, rank_of_sample, self.tokens)
        within = held.min() >= self.min_samples and held.max() <= self.max_samples
        return bool(within and (self.tokens is None or (held * most <= self.max_tokens).all()))

    def part(self, samples: Ints, ranks: int) -> Problem:
        """Return the problem of some samples, without a limit on tokens, on ``ranks`` ranks.

        If the numbers of samples are equal, they are equal in the part.
        """
        least, most, at_max = self.min_samples, self.max_samples, ranks
        if self.ranks * (most - 1) + self.ranks_at_max == len(self.cost):
            least, at_max = divmod(len(samples), ranks)
            most, at_max = least + bool(at_max), at_max or ranks
        return Problem(self.cost[samples], ranks, None, least, most, at_max, self.max_tokens)

    def loads(self, rank_of_sample: Ints) -> Ints:
        """Return the summed cost of every rank, shape ``[ranks]``."""
        # float64 sums of whole numbers below 2**53 are exact
        return np.bincount(rank_of_sample, self.cost, self.ranks).astype(np.int64)

    def largest_load(self, rank_of_sample: Ints) -> int:
        """Return the load of the slowest rank."""
        return int(self.loads(rank_of_sample).max())


def dearest_first(cost: Ints) -> Ints:
    """Return the same as a stable ``argsort(-cost)``, shape ``[samples]``, but many times faster."""
    below = int(cost.max(initial=0)) - cost
    order, bits, places = np.arange(len(cost)), int(below.max(initial=0)).bit_length(), len(cost).bit_length()
    if bits + places < 64:  # cost and place in one number: numpy sorts several times faster than it finds an order
        return np.sort(below << places | order) & ((1 << places) - 1)
    for shift in range(0, bits, 16):  # and short integers in linear time
        order = order[np.argsort((below[order] >> shift).astype(np.uint16), kind="stable")]
    return order


def to_integers(cost: NDArray[np.float64], ranks: int) -> Ints:
    """Return ``cost`` times a power of two, rounded, plus 1. Every sum and key of the search then fits 62 bits."""
    bits = min(52, 60 - ranks.bit_length())
    top, fine = int(np.frexp(cost.max())[1]), 61 - len(cost).bit_length()
    # the size of the sum, from whole numbers: a sum of floats would depend on their order
    size = int(np.rint(np.ldexp(cost, fine - top)).astype(np.int64).sum()).bit_length() + top - fine
    # at least 1 each, so that a rank without a sample is always the next one in the heap
    return np.rint(np.ldexp(cost, bits - size)).astype(np.int64) + 1


@dataclass(frozen=True)
class Block:
    """Some ranks that can hardly do better, on average, than the bound, with the samples that they share.

    Attributes:
        samples: their numbers, in order.
        others: the numbers of all other samples, in order.
        ranks: number of these ranks.
    """

    samples: Ints
    others: Ints
    ranks: int


@dataclass(frozen=True)
class Bound:
    """A load below which no plan's slowest rank can be.

    Attributes:
        load: of the slowest rank.
        block: the ranks that cause it; None if all of them do.
    """

    load: float
    block: Block | None = None


def lower_bound(problem: Problem, rows: int | None = None) -> Bound:
    """Return the bound.

    It is the largest of the mean load and, for every ``m``, the load that the ``m`` most expensive samples cause. With
    ``m = k * ranks + j``, ``1 <= j <= ranks``, the ``j`` ranks that hold most of them hold at least ``(k + 1) * j``: if they
    held fewer, one of them would hold ``k`` at most, and so would all the others. So their mean load is at least that of the
    ``(k + 1) * j`` cheapest of the ``m``, with the cheapest other samples that so many ranks must take to reach the numbers of
    samples. Samples that are too expensive for three to share a rank are also compared in pairs. If all costs are multiples of
    a number, loads are too, and the bound is rounded up to a multiple.

    Args:
        problem: the problem.
        rows: look at no ``k`` from here on, and not at pairs or multiples. This is faster and gives a lower bound.
    """
    # a limit on tokens is left out: it can only raise the loads
    cost = problem.cost[::-1]
    samples, ranks = len(cost), problem.ranks
    cheapest = np.zeros(samples + 1, dtype=np.int64)
    np.cumsum(cost, out=cheapest[1:])
    last = samples if rows is None else min(samples, rows * ranks)
    least = _least_samples(problem)
    # a row for every k, a column for every j; the last row may be too long
    k, j = np.arange(-(-last // ranks))[:, None], np.arange(1, ranks + 1)
    upto, beside = samples - k * (ranks - j), np.maximum(least - (k + 1) * j, 0)
    held = (cheapest[upto] + cheapest[beside]).ravel()[:last] - cheapest[samples - last : samples][::-1]
    mean = held / np.resize(j, last)
    mean[(least > upto).ravel()[:last]] = np.inf  # fewer samples are left: no plan is like that
    largest = int(mean.argmax())
    load = max(float(mean[largest]), problem.ideal_load)
    if rows is None:
        load = _rounded_up(problem, cost, max(load, _of_pairs(problem, cheapest, int(least[0]))))
    if mean[largest] <= problem.ideal_load or (largest + 1) % ranks == 0:
        return Bound(load)
    if largest >= ranks:  # of two kinds of samples, these ranks share all of the expensive ones
        costs = problem.cost[largest : min((largest // ranks + 1) * ranks, samples)]
        last = largest + int((costs[:-1] / costs[1:]).argmax()) if len(costs) > 1 else largest
        largest = last if (last + 1) % ranks else largest
    row, column = divmod(largest, ranks)
    ends = [samples - int(upto[row, column]), largest + 1, samples - int(beside[row, column])]
    before, expensive, between, cheap = np.split(np.arange(samples), ends)
    return Bound(load, Block(np.concatenate([expensive, cheap]), np.concatenate([before, between]), column + 1))


def _of_pairs(problem: Problem, cheapest: Ints, least: int) -> float:
    """Return the load of a rank that must hold two of the expensive samples, or three of some cheaper ones.

    With ``a + b = 2 * ranks + 1``: if each of the ``a`` most expensive is alone among the ``b`` most expensive, the others of
    those are ``2 * (ranks - a) + 1``, and so three share a rank. ``cheapest`` holds the costs of the 0, 1, 2, ... cheapest.
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
    """Return how many samples any 1, 2, ... ranks hold at least, shape ``[ranks]``."""
    ranks = np.arange(1, problem.ranks + 1)
    others = problem.ranks - ranks
    at_max = np.minimum(others, problem.ranks_at_max)
    most = at_max * problem.max_samples + (others - at_max) * (problem.max_samples - 1)
    return np.maximum(ranks * problem.min_samples, len(problem.cost) - most)


def _rounded_up(problem: Problem, cost: Ints, load: float) -> float:
    """Return ``load``, or the next sum that whole multiples of a cost, or nearly such multiples, can make."""
    if len(cost) < 2:
        return load
    same_count = problem.min_samples == problem.max_samples
    values = cost[np.concatenate([[True], cost[1:] > cost[:-1]])]
    # if every rank has the same number of samples, only the part beyond the cheapest sample's cost must be a multiple
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
    """Return the least load of a rank that has its share of steps, rounded up; ``values`` are the different costs.

    Every cost has a whole number of steps, of about the smallest difference between two. Some rank has the mean number or more:
    no less than the samples that are cheapest by the step. With a linear and a quadratic part in the cost, steps are lengths.
    """
    if len(values) < 2:
        return 0
    sizes = np.rint(np.diff(values, prepend=0) / np.diff(values).min()).astype(np.int64).cumsum()
    steps = sizes[np.searchsorted(values, cost)]
    cost, steps = cost[steps > 0], steps[steps > 0]
    if not len(steps):
        return 0
    order = np.argsort(cost / steps, kind="stable")
    cost, steps, share = cost[order], steps[order], -(-int(steps.sum()) // ranks)
    held = steps.cumsum()
    last = int(np.searchsorted(held, share))
    missing = share - int(held[last] - steps[last])
    return int(cost[:last].sum()) + int(cost[last]) * missing // int(steps[last])


def _common_step(values: Ints, offset: int, finest: float) -> float:
    """Return the largest number that ``values - offset`` are multiples of, but for rounding; 0 if it is below ``finest``."""
    beyond = (values - offset).astype(np.float64)
    value, beyond = values[beyond > 0], beyond[beyond > 0]
    step = float(beyond[0]) if len(beyond) else 0.0
    while step > finest:  # Euclid's algorithm
        times = np.rint(beyond / step)
        left = np.abs(beyond - times * step)
        coarse = left[left > 0.01 * step]
        if not len(coarse):
            # sums in any order would not be the same on all machines
            step = math.fsum(beyond * times) / math.fsum(times * times)
            return step if (np.abs(beyond - times * step) <= _SAME * value).all() else 0.0
        step = float(coarse.min())
    return 0.0
