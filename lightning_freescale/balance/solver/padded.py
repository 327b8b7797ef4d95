"""Plans for ranks that pad their samples: a rank's cost is its number of samples times the cost of the most expensive one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.solver.bounds import Ints, Problem

_BITS = 30
"""Costs are compared to so many bits: times a number of samples, they still fit 64."""
_FEW = 1024
"""So many samples of one rank, or fewer, are cut into the parts that cost least in all; more into parts that cost the same."""
_BLOCKS, _PRICES = 192, 10
"""Of runs that cost little in all: blocks of samples, and prices of a run that are tried."""
_LONGEST, _SEVERAL = (0.5, 0.7, 1.0), 16
"""Shares of a rank's load that one of its runs may have, tried in turn; for so many ranks or fewer, more have too many runs."""
_CLOSE = 4096
"""The search ends where the best load found is above the bound by less than one part in so many."""


@dataclass(frozen=True)
class PaddedPlan:
    """A plan of runs: samples that follow each other when they are sorted by cost.

    Attributes:
        rank_of_sample: shape ``[samples]``.
        part_of_sample: which of its rank's parts a sample is in, shape ``[samples]``.
        bound: the slowest rank's load that no plan can beat, in the units of :attr:`Problem.cost`.
    """

    rank_of_sample: Ints
    part_of_sample: Ints
    bound: float


def padded_loads(cost: NDArray[Any], rank_of_sample: Ints, part_of_sample: Ints | None, ranks: int) -> NDArray[Any]:
    """Return the padded cost of every rank, shape ``[ranks]``: of each part, its samples times the most expensive one.

    Args:
        cost: of each sample, shape ``[samples]``, not negative.
        rank_of_sample: shape ``[samples]``.
        part_of_sample: which of its rank's parts a sample is in, shape ``[samples]``; None if each rank has one.
        ranks: number of ranks.
    """
    parts = 1 if part_of_sample is None else int(part_of_sample.max(initial=0)) + 1
    place = rank_of_sample * parts + (0 if part_of_sample is None else part_of_sample)
    most = np.zeros(ranks * parts, dtype=np.asarray(cost).dtype)
    np.maximum.at(most, place, cost)
    return (most * np.bincount(place, minlength=ranks * parts)).reshape(ranks, parts).sum(axis=1)


def padded_search(problem: Problem, parts: int = 1) -> PaddedPlan | None:
    """Return the best plan of runs, of ``parts`` runs per rank; None if none keeps the limits.

    With one part, the plan is optimal: sorted by cost, a sample can take the place of a cheaper one in the run of a more
    expensive one without making any run more expensive, so some best plan consists of runs. For a given load, each run takes
    as many samples as it can, and the least load for which the runs suffice is found by bisection.

    Limits on tokens hold for each part by itself, limits on samples for all parts of a rank together.
    """
    samples, ranks = len(problem.cost), problem.ranks
    parts = min(parts, samples // ranks)
    shift = max(0, int(problem.cost[0]).bit_length() - _BITS)
    search = _Search(((problem.cost >> shift) + bool(shift)).tolist(), _most_per_run(problem, parts))
    if ranks == 1 and samples <= _FEW:
        ends, cost = search.cheapest(parts)
        return None if ends is None else _plan(problem, ends, parts, float(cost) * 2.0**shift)
    if ranks * (problem.max_samples - 1) + problem.ranks_at_max == samples:  # the mode sets how many samples a rank has
        counts = np.sort(np.full(ranks, problem.max_samples) - (np.arange(ranks) >= problem.ranks_at_max))
        ends = counts.cumsum().tolist()
        return _plan(problem, ends, 1, float(problem.cost[0]) * float(counts[0])) if search.allows(ends) else None
    ends, least = search.least(ranks * parts)
    if ends is None:
        return None
    # costs were rounded up to the next whole number: each is more expensive by at most one
    bound = float(least - bool(shift) * samples) * 2.0**shift
    if parts == 1:
        return _plan(problem, ends, parts, max(bound, problem.ideal_load))
    # all runs together cost at least as much, and some rank has their mean
    most = np.array(search.most)
    total = _cheap_runs(problem.cost, most, ranks * parts, lower=True)[1]
    return _joint_plan(problem, ends, most, parts, max(bound, total / ranks, problem.ideal_load))


def _plan(problem: Problem, ends: list[int], parts: int, bound: float) -> PaddedPlan:
    """Return the plan of some runs, of which each rank takes so many, one rank after the other."""
    sizes = np.diff(_each_filled(ends, problem.ranks * parts, len(problem.cost)), prepend=0)
    rank_of_run, part_of_run = np.repeat(np.arange(problem.ranks), parts), np.tile(np.arange(parts), problem.ranks)
    return PaddedPlan(np.repeat(rank_of_run, sizes), np.repeat(part_of_run, sizes), bound)


def _joint_plan(problem: Problem, ends: list[int], most: Ints, parts: int, bound: float) -> PaddedPlan:
    """Return the plan of some runs, or of others that cost less in all, assigned to the ranks together."""
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
    """Return the ends of so many runs that each has a sample: those that would have none take one each from the end."""
    return [min(end, samples - runs + place) for place, end in enumerate([*ends, *[samples] * (runs - len(ends))], start=1)]


def _assign_runs(costs: Ints, ranks: int, parts: int) -> tuple[Ints, Ints]:
    """Return rank and part of each run: the most expensive run goes to the rank with the least load, at equal counts."""
    load, held = [0] * ranks, [0] * ranks
    rank_of_run, part_of_run = np.empty(len(costs), dtype=np.int64), np.empty(len(costs), dtype=np.int64)
    for run in np.argsort(-costs, kind="stable").tolist():
        rank = min((rank for rank in range(ranks) if held[rank] < parts), key=load.__getitem__)
        rank_of_run[run], part_of_run[run] = rank, held[rank]
        load[rank], held[rank] = load[rank] + int(costs[run]), held[rank] + 1
    return rank_of_run, part_of_run


def _cheap_runs(cost: Ints, most: Ints, runs: int, *, lower: bool = False, longest: float = np.inf) -> tuple[list[int], float]:
    """Return runs that cost little in all, as their ends, and a bound on what so many runs cost; by Lagrange relaxation.

    Runs end where blocks of a few samples end. If samples cost the same within a block, the best runs do so as well.

    Args:
        cost: the most expensive first.
        most: how many samples a run may have that begins at each of them.
        runs: how many there may be.
        lower: let each sample be as cheap as the cheapest one of its block, for a bound on any runs.
        longest: what a run may cost.
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


def _most_per_run(problem: Problem, parts: int) -> list[int]:
    """Return how many samples a run may have that begins at each of them."""
    samples = len(problem.cost)
    most = np.full(samples, problem.max_samples if problem.max_samples >= samples else max(1, problem.max_samples // parts))
    if problem.tokens is not None:
        longest = np.maximum.accumulate(problem.tokens[::-1])[::-1]  # of all samples from here on
        most = np.minimum(most, problem.max_tokens // np.maximum(longest, 1))
    return most.tolist()


class _Search:
    """Finds runs of costs, given the most expensive first.

    Args:
        costs: whole numbers, at least 1.
        most: how many a run may have that begins at each of them.
    """

    def __init__(self, costs: list[int], most: list[int]) -> None:
        self._costs, self.most = costs, most

    def least(self, runs: int) -> tuple[list[int] | None, int]:
        """Return the ends of the runs with the smallest largest cost, None if no runs are allowed, and a bound on it."""
        low, best = max(self._costs[0], sum(self._costs) // runs), None
        high = self._costs[0] * len(self._costs)
        cost = low
        while low <= high:
            ends, other = self._fill(runs, cost)
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

    def _fill(self, runs: int, cost: int) -> tuple[list[int] | None, int]:
        """Return the ends of runs within a cost, and the largest cost of them; or None and the next cost worth a trial."""
        costs, most, samples = self._costs, self.most, len(self._costs)
        place, largest, following, ends = 0, 0, self._costs[0] * samples + 1, []
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

    def cheapest(self, runs: int) -> tuple[list[int] | None, int]:
        """Return the ends of so many runs that cost least in all, None if no runs are allowed, and what they cost."""
        costs, most = np.array(self._costs), np.array(self.most)
        start, end = np.arange(len(costs))[:, None], np.arange(len(costs) + 1)[None]
        impossible = np.iinfo(np.int64).max // 4
        each = np.where((end > start) & (end - start <= most[:, None]), (end - start) * costs[:, None], impossible)
        best, starts = np.where(end[0] == 0, 0, impossible), []
        for _ in range(runs):  # the least cost of the first samples in so many runs, by where the last run ends
            total = best[:-1, None] + each
            starts.append(total.argmin(axis=0))
            best = total.min(axis=0)
        if best[-1] >= impossible:
            return None, 0
        ends = [len(costs)]
        for begin in starts[:0:-1]:
            ends.append(int(begin[ends[-1]]))
        return ends[::-1], int(best[-1])

    def allows(self, ends: list[int]) -> bool:
        """Return whether no run has more than it may."""
        return all(end - start <= self.most[start] for start, end in pairwise([0, *ends]))
