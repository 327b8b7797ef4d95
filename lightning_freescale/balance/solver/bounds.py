"""The time below which no plan's slowest rank can be, and the ranks that make it so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.solver.problem import Ints, Problem

_SAME = 1.5e-7
"""Costs have 24 bits: what differs by a share smaller than this is rounding."""
_FINE = 2e-4
"""Steps between possible times that are smaller than this share of the time change nothing."""
_MANY = 1024


@dataclass(frozen=True)
class Block:
    """Some ranks that can hardly do better, on average, than the bound, with the groups that they hold between them.

    Attributes:
        groups: their numbers, in order.
        others: those of all other groups, in order.
        ranks: how many ranks they are.
    """

    groups: Ints
    others: Ints
    ranks: int


@dataclass(frozen=True)
class Bound:
    """What no plan can beat.

    Attributes:
        time: of the slowest rank.
        block: the ranks that keep it up; None if all of them do.
    """

    time: float
    block: Block | None = None


def lower_bound(problem: Problem, rows: int | None = None) -> Bound:
    """Return the bound.

    It is the largest of the work spread perfectly and, for every ``m``, what the ``m`` most expensive groups need. With
    ``m = k * ranks + j``, ``1 <= j <= ranks``, the ``j`` ranks that hold most of them hold at least ``(k + 1) * j``: if they
    held fewer, one of them would hold ``k`` at most, and so would all the others. So they have on average as much as the
    ``(k + 1) * j`` cheapest of the ``m``, with the cheapest others that so many ranks must take for the numbers of samples to
    come out. Groups that are too expensive for three to share a rank are compared pair by pair, too. Where all costs are
    multiples of one, times are too, and the bound is rounded up to one.

    Args:
        problem: what to plan.
        rows: look at no ``k`` from here on, and not for pairs or multiples. Quicker, and lower.
    """
    # a limit on tokens is left out: it can only raise the times
    cost = problem.cost[::-1]
    groups, ranks, single = len(cost), problem.ranks, bool((problem.size == 1).all())
    cheapest = np.zeros(groups + 1, dtype=np.int64)
    np.cumsum(cost, out=cheapest[1:])
    last = groups if rows is None else min(groups, rows * ranks)
    least = _least_samples(problem) if single else np.zeros(ranks, dtype=np.int64)
    # a row for every k, a column for every j; the last row may be too long
    k, j = np.arange(-(-last // ranks))[:, None], np.arange(1, ranks + 1)
    upto, beside = groups - k * (ranks - j), np.maximum(least - (k + 1) * j, 0)
    held = (cheapest[upto] + cheapest[beside]).ravel()[:last] - cheapest[groups - last : groups][::-1]
    mean = held / np.resize(_paces(problem), last)
    mean[(least > upto).ravel()[:last]] = np.inf  # not so many are left: no plan is like that
    largest = int(mean.argmax())
    time = max(float(mean[largest]), problem.ideal_time)
    if rows is None:
        time = _rounded_up(problem, cost, max(time, _of_pairs(problem, cheapest, int(least[0]))))
    if mean[largest] <= problem.ideal_time or (largest + 1) % ranks == 0:
        return Bound(time)
    if largest >= ranks:  # of two kinds of groups, all of the expensive ones are what these ranks share
        costs = problem.cost[largest : min((largest // ranks + 1) * ranks, groups)]
        last = largest + int((costs[:-1] / costs[1:]).argmax()) if len(costs) > 1 else largest
        largest = last if (last + 1) % ranks else largest
    row, column = divmod(largest, ranks)
    ends = [groups - int(upto[row, column]), largest + 1, groups - int(beside[row, column])]
    before, expensive, between, cheap = np.split(np.arange(groups), ends)
    return Bound(time, Block(np.concatenate([expensive, cheap]), np.concatenate([before, between]), column + 1))


def _of_pairs(problem: Problem, cheapest: Ints, least: int) -> float:
    """Return the time of a rank that must hold two of the expensive groups, or three of some cheaper ones.

    With ``a + b = 2 * ranks + 1``: if each of the ``a`` most expensive is alone among the ``b`` most expensive, the others of
    those are ``2 * (ranks - a) + 1``, and so three share a rank. ``cheapest`` has what the 0, 1, 2, ... cheapest groups cost.
    """
    groups, ranks = len(problem.cost), problem.ranks
    b = np.arange(ranks + 1, min(2 * ranks, groups) + 1)
    if not len(b):
        return 0.0
    held = problem.cost[2 * ranks - b] + problem.cost[b - 1] + cheapest[max(least - 2, 0)]
    if problem.max_samples > 2:
        three = cheapest[groups - b[1:] + 3] - cheapest[groups - b[1:]] + cheapest[max(least - 3, 0)]
        held[1:] = np.minimum(held[1:], three)
    return float(held.max() * problem.slowness.min())


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
    """Return ``time``, or the next one that whole multiples of a cost, or what is nearly such, can add up to."""
    if np.ptp(problem.slowness) or len(cost) < 2:
        return time
    slow, same_count = int(problem.slowness[0]), problem.min_samples == problem.max_samples
    values = cost[np.concatenate([[True], cost[1:] > cost[:-1]])]
    # where every rank has as many samples, only what is beyond the cheapest one's cost must be a multiple
    offset = int(values[0]) if same_count else 0
    base, finest = problem.min_samples * offset, _FINE * time / slow
    if len(values) > _MANY or (len(values) > 1 and np.diff(values).min() < finest):
        return time
    step = _common_step(values, offset, finest)
    if not step:
        return max(time, float(slow * (base + _in_steps(cost - offset, values - offset, problem.ranks))))
    rounding = 2 * _SAME * time / slow
    steps = math.ceil((time / slow - base - rounding) / step)
    return max(time, slow * (base + steps * step - rounding))


def _in_steps(cost: Ints, values: Ints, ranks: int) -> int:
    """Return what a rank holds at least if it has its share of steps, rounded up; ``values`` are the costs that differ.

    Every cost has a whole number of steps, of about the smallest difference between two. Some rank has the mean number or more:
    no less than the groups that are cheapest by the step. With a linear and a quadratic part in the cost, steps are lengths.
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
