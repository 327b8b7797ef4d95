"""The time below which no plan's slowest rank can be, and the ranks that make it so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.solver.problem import Ints, Mask, Problem

_SAME = 1.5e-7
"""Costs have 24 bits: what differs by a share smaller than this is rounding."""
_FINE = 2e-4
"""Steps between possible times that are smaller than this share of the time change nothing."""
_MANY = 1024


@dataclass(frozen=True)
class Block:
    """Some ranks that can hardly do better, on average, than the bound, with the groups that they hold between them.

    Attributes:
        groups: which of all, shape ``[groups]``.
        ranks: how many ranks they are.
    """

    groups: Mask
    ranks: int


@dataclass(frozen=True)
class Bound:
    """What no plan can beat.

    Attributes:
        time: of the slowest rank.
        block: the ranks that keep it up; None if all of them do, or two groups that must share a rank.
    """

    time: float
    block: Block | None = None


def lower_bound(problem: Problem, together: int | None = None) -> Bound:
    """Return the bound.

    It is the largest of the work spread perfectly and, for every ``m``, what the ``m`` most expensive groups need. With
    ``m = k * ranks + j``, ``1 <= j <= ranks``, either some rank holds ``k + 2`` of them, or ``j`` ranks hold at least
    ``k + 1`` each: then those have on average as much as the ``(k + 1) * j`` cheapest of them have. Each with the cheapest
    others that so many ranks must take for the numbers of samples to come out. Where all costs are multiples of one, times are
    too, and the bound is rounded up to one.

    Args:
        problem: what to plan.
        together: leave out that a rank may have to hold more than so many of the expensive groups. Quicker, and lower.
    """
    # a limit on tokens is left out: it can only raise the times
    cost = problem.cost[::-1]
    groups, ranks, single = len(cost), problem.ranks, bool((problem.size == 1).all())
    cheapest = np.concatenate([[0], cost.cumsum()])
    m = np.arange(1, 1 + min(groups, groups if together is None else together * ranks))
    k, j = (m - 1) // ranks, (m - 1) % ranks + 1
    dear = (k + 1) * j
    least = _least_samples(problem) if single else np.zeros(ranks, dtype=np.int64)
    beside = np.maximum(least[j - 1] - dear, 0)
    above = cheapest[groups - m]  # all that is cheaper than the m
    mean = (cheapest[groups - m + dear] - above + cheapest[np.minimum(beside, groups)]) / _paces(problem)[j - 1]
    mean[beside > groups - m] = np.inf  # not so many are left: no plan is like that
    shared = cheapest[np.minimum(groups - m + k + 2, groups)] - above + cheapest[np.maximum(least[0] - (k + 2), 0)]
    possible = (m >= k + 2) & (k + 2 <= problem.max_samples)
    needed = np.where(possible, np.minimum(mean, shared * int(problem.slowness.min())), mean)
    largest = int(needed.argmax())
    if needed[largest] <= problem.ideal_time:
        return Bound(_rounded_up(problem, cost, problem.ideal_time))
    time = _rounded_up(problem, cost, float(needed[largest]))
    if needed[largest] < mean[largest] or j[largest] == ranks:
        return Bound(time)
    if k[largest]:  # of two kinds of groups, all of the expensive ones are what these ranks share
        row = problem.cost[largest : min(int(k[largest] + 1) * ranks, groups)]
        last = largest + int((row[:-1] / row[1:]).argmax()) if len(row) > 1 else largest
        largest = last if needed[last] == mean[last] and j[last] < ranks else largest
    held = np.zeros(groups, dtype=bool)
    held[int(m[largest]) - int(dear[largest]) : int(m[largest])] = True
    held[groups - int(beside[largest]) :] = True
    return Bound(time, Block(held, int(j[largest])))


def _least_samples(problem: Problem) -> Ints:
    """Return how many samples any 1, 2, ... ranks hold at least, shape ``[ranks]``."""
    ranks = np.arange(1, problem.ranks + 1)
    others = problem.ranks - ranks
    at_max = np.minimum(others, problem.ranks_at_max)
    most = at_max * problem.max_samples + (others - at_max) * (problem.max_samples - 1)
    return np.maximum(ranks * problem.min_samples, int(problem.size.sum()) - most)


def _paces(problem: Problem) -> NDArray[np.float64]:
    """Return what the quickest 1, 2, ... ranks get done per time, shape ``[ranks]``."""
    return np.cumsum(1.0 / np.sort(problem.slowness))


def _rounded_up(problem: Problem, cost: Ints, time: float) -> float:
    """Return ``time``, or the next one that whole multiples of a cost can add up to."""
    if np.ptp(problem.slowness) or len(cost) < 2:
        return time
    slow, same_count = int(problem.slowness[0]), problem.min_samples == problem.max_samples
    values = cost[np.concatenate([[True], cost[1:] > cost[:-1]])]
    # where every rank has as many samples, only what is beyond the cheapest one's cost must be a multiple
    offset = int(values[0]) if same_count else 0
    step = _common_step(values, offset, _FINE * time / slow)
    if not step:
        return time
    base = problem.min_samples * offset
    rounding = 2 * _SAME * time / slow
    steps = math.ceil((time / slow - base - rounding) / step)
    return max(time, slow * (base + steps * step - rounding))


def _common_step(values: Ints, offset: int, finest: float) -> float:
    """Return the largest number that ``values - offset`` are multiples of, but for rounding; 0 if it is below ``finest``."""
    if len(values) > _MANY or (len(values) > 1 and np.diff(values).min() < finest):
        return 0.0
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
