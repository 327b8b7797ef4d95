"""Plans for ranks that pad their samples: a rank's cost is its number of samples times the cost of the dearest one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.solver.problem import Ints, Problem

_BITS = 30
"""Costs are compared to so many bits: times a number of samples and a slowness, they still fit 64."""
_FEW = 1024
"""So many groups of one rank, or fewer, are cut into the parts that cost least in all; more into parts that cost the same."""
_BLOCKS, _PRICES = 192, 10
"""Of runs that cost little in all: blocks of groups, and prices of a run that are tried."""
_LONGEST, _SEVERAL = (0.5, 0.7, 1.0), 16
"""Shares of a rank's time that one of its runs may take, tried in turn; for so many ranks or fewer, more have too many runs."""
_CLOSE = 4096
"""The search ends where the best time found is above the bound by less than one part in so many."""


@dataclass(frozen=True)
class PaddedPlan:
    """A plan of runs: groups of samples that follow each other when they are sorted by cost.

    Attributes:
        rank_of_group: shape ``[groups]``.
        part_of_group: which of its rank's parts a group is in, shape ``[groups]``.
        bound: the slowest rank's time that no plan can beat, in the units of :attr:`Problem.cost`.
    """

    rank_of_group: Ints
    part_of_group: Ints
    bound: float


def padded_loads(cost: NDArray[Any], rank_of_sample: Ints, part_of_sample: Ints | None, ranks: int) -> NDArray[Any]:
    """Return the padded cost of every rank, shape ``[ranks]``: of each part, its samples times the dearest one.

    Args:
        cost: of each sample, shape ``[samples]``, not negative.
        rank_of_sample: shape ``[samples]``.
        part_of_sample: which of its rank's parts a sample is in, shape ``[samples]``; None if each rank has one.
        ranks: number of ranks.
    """
    parts = 1 if part_of_sample is None else int(part_of_sample.max(initial=0)) + 1
    place = rank_of_sample * parts + (0 if part_of_sample is None else part_of_sample)
    dearest = np.zeros(ranks * parts, dtype=np.asarray(cost).dtype)
    np.maximum.at(dearest, place, cost)
    return (dearest * np.bincount(place, minlength=ranks * parts)).reshape(ranks, parts).sum(axis=1)


def padded_search(problem: Problem, parts: int = 1) -> PaddedPlan | None:
    """Return the best plan of runs, of ``parts`` runs per rank; None if none keeps the limits.

    With equally fast ranks and one part, the plan is optimal: sorted by cost, a group can take the place of a cheaper one in
    the run of a dearer one without making any run dearer, so some best plan consists of runs. For a given time, each run takes
    as many groups as it can, and the least time for which the runs suffice is found by bisection.

    Limits on tokens hold for each part by itself, limits on samples for all parts of a rank together.
    """
    groups, ranks = len(problem.cost), problem.ranks
    parts = min(parts, groups // ranks)
    shift = max(0, int(problem.cost[0]).bit_length() - _BITS)
    search = _Search(((problem.cost >> shift) + bool(shift)).tolist(), _most_per_run(problem, parts))
    slowness = np.sort(problem.slowness)
    if ranks == 1 and groups <= _FEW:
        ends, cost = search.cheapest(parts)
        return None if ends is None else _plan(problem, ends, np.zeros(1, dtype=np.int64), parts, float(cost) * 2.0**shift)
    if ranks * (problem.max_samples - 1) + problem.ranks_at_max == groups:  # the mode says how many samples a rank has
        counts = np.sort(np.full(ranks, problem.max_samples) - (np.arange(ranks) >= problem.ranks_at_max))
        ends = counts.cumsum().tolist()
        if not search.allows(ends):
            return None
        bound = float(problem.cost[0]) * float(counts[0]) * float(slowness[0])
        return _plan(problem, ends, np.argsort(problem.slowness, kind="stable"), 1, bound)
    found, low = None, 0
    fast = np.repeat(slowness, parts).tolist()
    for order in (fast,) if fast[0] == fast[-1] else (fast, fast[::-1]):
        ends, bound = search.least(order)
        if ends is not None and (found is None or search.time(ends, order) < search.time(*found)):
            found = ends, order
        low = bound
    if found is None:
        return None
    if fast[0] != fast[-1]:  # no rank is faster than the fastest
        low = search.least([fast[0]] * len(fast))[1]
    in_order = np.argsort(problem.slowness, kind="stable")
    ranks_in_order = in_order if found[1] is fast else in_order[::-1]
    # costs were rounded up to the next whole number: each is dearer by at most one
    bound = float(low - bool(shift) * groups * fast[-1]) * 2.0**shift
    if parts > 1:  # all runs together are at least so dear, and some rank has the mean of them
        total = _cheap_runs(problem.cost, np.array(search.most), len(fast), lower=True)[1]
        bound = max(bound, total * problem.ideal_time / float(problem.cost.sum()))
    bound = max(bound, problem.ideal_time)
    if parts > 1 and fast[0] == fast[-1]:
        return _joint_plan(problem, found[0], np.array(search.most), parts, bound)
    return _plan(problem, found[0], ranks_in_order, parts, bound)


def _plan(problem: Problem, ends: list[int], ranks: Ints, parts: int, bound: float) -> PaddedPlan:
    """Return the plan of some runs, of which each of ``ranks`` takes so many, one rank after the other."""
    sizes = np.diff(_each_filled(ends, problem.ranks * parts, len(problem.cost)), prepend=0)
    rank_of_run, part_of_run = np.repeat(ranks, parts), np.tile(np.arange(parts), problem.ranks)
    return PaddedPlan(np.repeat(rank_of_run, sizes), np.repeat(part_of_run, sizes), bound)


def _joint_plan(problem: Problem, ends: list[int], most: Ints, parts: int, bound: float) -> PaddedPlan:
    """Return the plan of some runs, or of others that cost less in all, shared out among equally fast ranks."""
    ranks, runs = problem.ranks, problem.ranks * parts
    found: list[tuple[float, Ints, Ints, Ints]] = []
    for share in (None, *_LONGEST) if ranks <= _SEVERAL else (None,):
        if share is not None:
            ends, _ = _cheap_runs(problem.cost, most, runs, longest=share * found[0][0])
        if ends:
            sizes = np.diff(_each_filled(ends, runs, len(problem.cost)), prepend=0)
            times = problem.cost[np.cumsum(sizes) - sizes] * sizes
            rank_of_run, part_of_run = _share_out(times, ranks, parts)
            found.append((float(np.bincount(rank_of_run, times).max()), sizes, rank_of_run, part_of_run))
    _, sizes, rank_of_run, part_of_run = min(found, key=lambda plan: plan[0])
    return PaddedPlan(np.repeat(rank_of_run, sizes), np.repeat(part_of_run, sizes), bound)


def _each_filled(ends: list[int], runs: int, groups: int) -> list[int]:
    """Return the ends of so many runs that each has a group: those that would have none take one each from the end."""
    return [min(end, groups - runs + place) for place, end in enumerate([*ends, *[groups] * (runs - len(ends))], start=1)]


def _share_out(times: Ints, ranks: int, parts: int) -> tuple[Ints, Ints]:
    """Return rank and part of each run: the dearest run goes to the rank that has least, each rank takes as many."""
    load, held = [0] * ranks, [0] * ranks
    rank_of_run, part_of_run = np.empty(len(times), dtype=np.int64), np.empty(len(times), dtype=np.int64)
    for run in np.argsort(-times, kind="stable").tolist():
        rank = min((rank for rank in range(ranks) if held[rank] < parts), key=load.__getitem__)
        rank_of_run[run], part_of_run[run] = rank, held[rank]
        load[rank], held[rank] = load[rank] + int(times[run]), held[rank] + 1
    return rank_of_run, part_of_run


def _cheap_runs(cost: Ints, most: Ints, runs: int, *, lower: bool = False, longest: float = np.inf) -> tuple[list[int], float]:
    """Return runs that cost little in all, as their ends, and a bound on what so many runs cost; by Lagrange relaxation.

    Runs end where blocks of a few groups end. If groups cost the same within a block, the best runs do so as well.

    Args:
        cost: dearest first.
        most: how many groups a run may have that begins at each of them.
        runs: how many there may be.
        lower: let each group be as cheap as the cheapest one of its block, for a bound on any runs.
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
    """Return how many groups a run may have that begins at each of them."""
    groups = len(problem.cost)
    most = np.full(groups, problem.max_samples if problem.max_samples >= groups else max(1, problem.max_samples // parts))
    if problem.tokens is not None:
        longest = np.maximum.accumulate(problem.tokens[::-1])[::-1]  # of all groups from here on
        most = np.minimum(most, int(np.min(problem.max_tokens)) // np.maximum(longest, 1))
    return most.tolist()


class _Search:
    """Finds runs of costs, given dearest first.

    Args:
        costs: whole numbers, at least 1.
        most: how many a run may have that begins at each of them.
    """

    def __init__(self, costs: list[int], most: list[int]) -> None:
        self._costs, self.most = costs, most

    def least(self, slowness: list[int]) -> tuple[list[int] | None, int]:
        """Return the ends of the runs with the least largest time, None if no runs are allowed, and a bound on that time.

        ``slowness`` is that of each run, in their order. The bound is of runs in this order.
        """
        pace = sum(1 / each for each in slowness)
        low, best = max(self._costs[0] * slowness[0], int(sum(self._costs) / pace)), None
        high = self._costs[0] * max(slowness) * len(self._costs)
        time = low
        while low <= high:
            ends, other = self._fill(slowness, time)
            if ends is None:
                low = other
                if other > high:
                    break
            else:
                best, high = ends, other - 1
                if (other - low) * _CLOSE <= other:
                    break
            time = min((low + high) // 2, 2 * low) if best is None else (low + high) // 2
        return best, low

    def _fill(self, slowness: list[int], time: int) -> tuple[list[int] | None, int]:
        """Return the ends of runs within a time, and the largest time of them; or None and the next time worth a trial."""
        costs, most, samples = self._costs, self.most, len(self._costs)
        place, largest, following, ends = 0, 0, self._costs[0] * max(slowness) * samples + 1, []
        for slow in slowness:
            each = costs[place] * slow
            count = time // each
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
        for _ in range(runs):  # the least cost of the first groups in so many runs, by where the last run ends
            total = best[:-1, None] + each
            starts.append(total.argmin(axis=0))
            best = total.min(axis=0)
        if best[-1] >= impossible:
            return None, 0
        ends = [len(costs)]
        for begin in starts[:0:-1]:
            ends.append(int(begin[ends[-1]]))
        return ends[::-1], int(best[-1])

    def time(self, ends: list[int], slowness: list[int]) -> int:
        """Return the largest time of runs."""
        return max((end - start) * self._costs[start] * slow for (start, end), slow in zip(pairwise([0, *ends]), slowness))

    def allows(self, ends: list[int]) -> bool:
        """Return whether no run has more than it may."""
        return all(end - start <= self.most[start] for start, end in pairwise([0, *ends]))
