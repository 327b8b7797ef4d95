"""Plans for ranks that pad: the cost of a rank is its number of samples times the cost of its most expensive one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.solver.bounds import Ints, Problem

_BITS = 30
"""Number of bits of a cost that are compared, so that a cost times a number of samples fits in 64 bits."""
_FEW = 1024
"""Maximum number of samples that a single rank cuts into the parts with the least total cost."""
_BLOCKS, _PRICES = 192, 10
"""Number of blocks of samples, and of prices of a run, that are tried for runs with a low total cost."""
_LONGEST, _SEVERAL = (0.5, 0.7, 1.0), 16
"""Limits on the cost of a run, as shares of a rank's load, and the maximum number of ranks for which they are tried."""
_CLOSE = 4096
"""The search ends when the best load is within 1 / 4096 of the bound."""


@dataclass(frozen=True)
class PaddedPlan:
    """A plan of runs, which are neighbours among the samples sorted by cost."""

    rank_of_sample: Ints  # shape [samples]
    part_of_sample: Ints  # index of each sample's part within its rank, shape [samples]
    bound: float  # lower bound on the load of the slowest rank, in the unit of Problem.cost


def padded_loads(cost: NDArray[Any], rank_of_sample: Ints, part_of_sample: Ints | None, ranks: int) -> NDArray[Any]:
    """Return the padded cost of each rank, shape ``[ranks]``: the number of samples of each part times its highest cost.

    ``part_of_sample`` is None if each rank has one part.
    """
    parts = 1 if part_of_sample is None else int(part_of_sample.max(initial=0)) + 1
    place = rank_of_sample * parts + (0 if part_of_sample is None else part_of_sample)
    most = np.zeros(ranks * parts, dtype=np.asarray(cost).dtype)
    np.maximum.at(most, place, cost)
    return (most * np.bincount(place, minlength=ranks * parts)).reshape(ranks, parts).sum(axis=1)


def padded_search(problem: Problem, parts: int = 1) -> PaddedPlan | None:
    """Return the best plan with ``parts`` runs per rank; None if no plan of runs keeps the limits.

    With one part, the plan is optimal. Moving a sample to the run of a more expensive one, in exchange for a cheaper sample,
    makes no run more expensive. So some optimal plan consists of runs. For a given load, each run takes as many samples as it
    can. Bisection finds the least load for which the runs suffice.

    Limits on tokens apply to each part, limits on samples to all parts of a rank together.
    """
    samples, ranks = len(problem.cost), problem.ranks
    parts = min(parts, samples // ranks)
    shift = max(0, int(problem.cost[0]).bit_length() - _BITS)
    costs, most = (problem.cost >> shift) + bool(shift), _most_per_run(problem, parts)
    if ranks == 1 and samples <= _FEW:
        ends, cost = _cheapest(costs, most, parts)
        return None if ends is None else _plan(problem, ends, parts, float(cost) * 2.0**shift)
    if ranks * (problem.max_samples - 1) + problem.ranks_at_max == samples:  # the mode sets the counts
        counts = np.sort(np.full(ranks, problem.max_samples) - (np.arange(ranks) >= problem.ranks_at_max))
        if (counts > most[counts.cumsum() - counts]).any():
            return None
        return _plan(problem, counts.cumsum().tolist(), 1, float(problem.cost[0]) * float(counts[0]))
    ends, least = _least(costs.tolist(), most.tolist(), ranks * parts)
    if ends is None:
        return None
    # costs were rounded up, each by at most one
    bound = float(least - bool(shift) * samples) * 2.0**shift
    if parts == 1:
        return _plan(problem, ends, parts, max(bound, problem.ideal_load))
    # the total cost of all runs has a lower bound, and some rank has at least its mean
    total = _cheap_runs(problem.cost, most, ranks * parts, lower=True)[1]
    return _joint_plan(problem, ends, most, parts, max(bound, total / ranks, problem.ideal_load))


def _plan(problem: Problem, ends: list[int], parts: int, bound: float) -> PaddedPlan:
    sizes = np.diff(_each_filled(ends, problem.ranks * parts, len(problem.cost)), prepend=0)
    rank_of_run, part_of_run = np.repeat(np.arange(problem.ranks), parts), np.tile(np.arange(parts), problem.ranks)
    return PaddedPlan(np.repeat(rank_of_run, sizes), np.repeat(part_of_run, sizes), bound)


def _joint_plan(problem: Problem, ends: list[int], most: Ints, parts: int, bound: float) -> PaddedPlan:
    """Return the best plan that assigns these runs, or runs with a lower total cost, to the ranks."""
    ranks, runs = problem.ranks, problem.ranks * parts
    found: list[tuple[float, Ints, Ints, Ints]] = []
    for share in (None, *_LONGEST) if ranks <= _SEVERAL else (None,):
        if share is not None:
            ends, _ = _cheap_runs(problem.cost, most, runs, longest=share * found[0][0])
        if ends:
            sizes = np.diff(_each_filled(ends, runs, len(problem.cost)), prepend=0)
            costs = problem.cost[np.cumsum(sizes) - sizes] * sizes
            rank_of_run, part_of_run = _assign_runs(costs, ranks, parts)
            found.append((float(np.bincount(rank_of_run, costs).max()), sizes, rank_of_run, part_of_run))
    _, sizes, rank_of_run, part_of_run = min(found, key=lambda plan: plan[0])
    return PaddedPlan(np.repeat(rank_of_run, sizes), np.repeat(part_of_run, sizes), bound)


def _each_filled(ends: list[int], runs: int, samples: int) -> list[int]:
    """Return the ends of the runs such that none is empty: empty runs take one sample each from the end."""
    return [min(end, samples - runs + place) for place, end in enumerate([*ends, *[samples] * (runs - len(ends))], start=1)]


def _assign_runs(costs: Ints, ranks: int, parts: int) -> tuple[Ints, Ints]:
    """Return rank and part of each run: the most expensive run goes first, to the rank with the least load."""
    load, held = [0] * ranks, [0] * ranks
    rank_of_run, part_of_run = np.empty(len(costs), dtype=np.int64), np.empty(len(costs), dtype=np.int64)
    for run in np.argsort(-costs, kind="stable").tolist():
        rank = min((rank for rank in range(ranks) if held[rank] < parts), key=load.__getitem__)
        rank_of_run[run], part_of_run[run] = rank, held[rank]
        load[rank], held[rank] = load[rank] + int(costs[run]), held[rank] + 1
    return rank_of_run, part_of_run


def _cheap_runs(cost: Ints, most: Ints, runs: int, *, lower: bool = False, longest: float = np.inf) -> tuple[list[int], float]:
    """Return the ends of runs with a low total cost, and a bound on the total cost, by Lagrange relaxation.

    Runs end only where blocks of a few samples end. Within a block all samples count as equally expensive. With ``lower``, they
    cost as much as the cheapest one, for a lower bound on any runs. ``most`` is a result of :func:`_most_per_run`. ``runs``
    limits the number of runs, and ``longest`` the cost of a run.
    """
    edges = np.unique(np.linspace(0, len(cost), min(len(cost), _BLOCKS) + 1).astype(np.int64))
    sizes = edges[None, 1:] - edges[:-1, None]
    each = sizes * cost[edges[1:] - 1 if lower else edges[:-1]].astype(np.float64)[:, None]
    each[(each > longest) | (sizes > most[edges[:-1], None])] = np.inf
    low, high, bound, ends = 0.0, float(cost[0]) * len(cost), 0.0, list[int]()
    for _ in range(_PRICES):
        price = (low + high) / 2
        total, used, starts = np.zeros(len(edges)), [0] * len(edges), [0] * len(edges)
        for end in range(1, len(edges)):
            costs = total[:end] + each[:end, end - 1]
            start = starts[end] = int(costs.argmin())
            total[end], used[end] = costs[start] + price, used[start] + 1
        if not np.isfinite(total[-1]):
            break
        bound = max(bound, float(total[-1]) - price * runs)
        if used[-1] > runs:
            low = price
            continue
        high, place, ends = price, len(edges) - 1, []
        while place:
            ends, place = [int(edges[place]), *ends], starts[place]
    return ends, bound


def _most_per_run(problem: Problem, parts: int) -> Ints:
    """Return the maximum number of samples of a run that begins at each sample."""
    samples = len(problem.cost)
    most = np.full(samples, problem.max_samples if problem.max_samples >= samples else max(1, problem.max_samples // parts))
    if problem.tokens is not None:
        longest = np.maximum.accumulate(problem.tokens[::-1])[::-1]  # most tokens of this and all later samples
        most = np.minimum(most, problem.max_tokens // np.maximum(longest, 1))
    return most


def _least(costs: list[int], most: list[int], runs: int) -> tuple[list[int] | None, int]:
    """Return the ends of the runs with the smallest maximum cost, None if the limits allow none, and a bound on it."""
    low, best = max(costs[0], sum(costs) // runs), None
    high = costs[0] * len(costs)
    cost = low
    while low <= high:
        ends, other = _fill(costs, most, runs, cost)
        if ends is None:
            low = other
            if other > high:
                break
        else:
            best, high = ends, other - 1
            if (other - low) * _CLOSE <= other:
                break
        cost = min((low + high) // 2, 2 * low) if best is None else (low + high) // 2
    return best, low


def _fill(costs: list[int], most: list[int], runs: int, cost: int) -> tuple[list[int] | None, int]:
    """Return the ends of runs within a cost, and their maximum cost; or None and the next cost to try."""
    samples = len(costs)
    place, largest, following, ends = 0, 0, costs[0] * samples + 1, []
    for _ in range(runs):
        each = costs[place]
        count = cost // each
        if count >= most[place]:
            count = most[place]
        elif (count + 1) * each < following:
            following = (count + 1) * each
        if count < 1:
            return None, following
        count = min(count, samples - place)
        largest, place = max(largest, count * each), place + count
        ends.append(place)
        if place == samples:
            return ends, largest
    return None, following


def _cheapest(costs: Ints, most: Ints, runs: int) -> tuple[list[int] | None, int]:
    """Return the ends of the runs with the least total cost, None if the limits allow none, and that cost."""
    start, end = np.arange(len(costs))[:, None], np.arange(len(costs) + 1)[None]
    impossible = np.iinfo(np.int64).max // 4
    each = np.where((end > start) & (end - start <= most[:, None]), (end - start) * costs[:, None], impossible)
    best, starts = np.where(end[0] == 0, 0, impossible), []
    for _ in range(runs):  # dynamic programming: best[end] is the least cost of the first ``end`` samples so far
        total = best[:-1, None] + each
        starts.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if best[-1] >= impossible:
        return None, 0
    ends = [len(costs)]
    for begin in starts[:0:-1]:
        ends.append(int(begin[ends[-1]]))
    return ends[::-1], int(best[-1])
