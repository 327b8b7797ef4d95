"""The first plan: longest first, each group to the rank that is done soonest (Graham 1969), within the limits."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from lightning_freescale.balance.solver.problem import Ints, Problem
from lightning_freescale.balance.solver.swaps import compiled, worth_compiling

_OUTLIER_RANKS = 24
"""How many ranks are filled before all others at most."""


def first_plan(problem: Problem, time: float) -> Ints | None:
    """Return the rank of every group, shape ``[groups]``; None if no place was found for one.

    Args:
        problem: what to plan.
        time: when all ranks should be done, as far as can be.
    """
    if problem.limits_counts_only:
        filled = _filled_with_outliers(problem, time)
        if not filled:
            return _longest_first(problem)
        plan = np.full(len(problem.cost), -1)
        for rank, groups in enumerate(filled):
            plan[groups] = rank
        plan[plan < 0] = len(filled) + _longest_first(problem.part(plan < 0, problem.ranks - len(filled)))
        return plan
    rank_of_group = _longest_first_within_limits(problem, np.arange(len(problem.cost)), problem.cost)
    if rank_of_group is None and problem.tokens is not None:  # spread what is scarce first
        by_tokens = np.argsort(-problem.tokens, kind="stable")
        rank_of_group = _longest_first_within_limits(problem, by_tokens, problem.tokens + 1)
    return rank_of_group


def zigzag(problem: Problem) -> Ints:
    """Return FreeScale's plan at equal counts: sorted by cost, given to the ranks forwards and backwards in turn."""
    there_and_back = np.concatenate([np.arange(problem.ranks), np.arange(problem.ranks)[::-1]])
    return np.resize(there_and_back, len(problem.cost))


def _longest_first(problem: Problem) -> Ints:
    fast_first = np.argsort(problem.slowness, kind="stable")
    cost, slowness = problem.cost, problem.slowness[fast_first]
    room, pace = np.full(len(slowness), problem.max_samples - 1), slowness * len(slowness)
    if worth_compiling(len(cost)):
        placed: Any = np.empty(len(cost), dtype=np.int64)
        compiled(place_longest_first)(cost, pace, room, problem.ranks_at_max, placed)
    else:  # lists are what the interpreter is quick with
        placed = [0] * len(cost)
        place_longest_first(cost.tolist(), pace.tolist(), room.tolist(), problem.ranks_at_max, placed)
    return fast_first[np.asarray(placed)]


def _filled_with_outliers(problem: Problem, time: float) -> list[Ints]:
    """Return the groups of whole ranks, each an outlier and its company, from the most expensive outlier on.

    An outlier would keep its rank beyond ``time`` with average company. Longest first reaches it too late, with what happens
    to be left.
    """
    company = problem.min_samples - 1
    if not company or np.ptp(problem.slowness):
        return []
    left, filled = np.arange(len(problem.cost))[::-1], list[Ints]()  # the cheapest first
    # ranks that the other groups will need to hold one sample more
    fuller = problem.ranks_at_max if problem.min_samples < problem.max_samples else 1
    while len(filled) < min(_OUTLIER_RANKS, problem.ranks - fuller):
        cost = problem.cost[left]
        total = np.concatenate([[0], cost[:-1].cumsum()])
        runs = total[company:] - total[:-company]
        # the most expensive run that there is time for: it leaves the cheapest to the next outlier
        first = max(0, int(np.searchsorted(runs, int(time) - int(cost[-1]), side="right")) - 1)
        if first > len(runs) // 4:  # nearly any company does: no outlier any more
            break
        chosen = np.append(np.arange(first, first + company), len(left) - 1)
        filled.append(left[chosen])
        left = np.delete(left, chosen)
    return filled


def place_longest_first(costs: Any, pace: Any, room: Any, at_max: int, placed: Any) -> None:
    """Fill ``placed`` with the rank of every group, each of one sample.

    Args:
        costs: from the most expensive to the cheapest, shape ``[groups]``.
        pace: slowness times number of ranks, shape ``[ranks]``.
        room: groups that each rank may still take, shape ``[ranks]``; changed in place.
        at_max: how many ranks may take one more.
        placed: shape ``[groups]``.
    """
    ranks, replace = len(room), heapq.heapreplace
    # the heap holds time * ranks + rank: one whole number orders by time, then by rank
    heap = [rank for rank in range(ranks)]  # noqa: C416 (list(range) is not the list that the compiler needs)
    for group, cost in enumerate(costs):
        while at_max == 0 and room[heap[0] % ranks] == 0:
            heapq.heappop(heap)  # full for good
        key = heap[0]
        rank = key % ranks
        placed[group] = rank
        if room[rank]:
            room[rank] -= 1
            replace(heap, key + cost * pace[rank])
        else:
            at_max -= 1
            heapq.heappop(heap)


def _longest_first_within_limits(problem: Problem, order: Ints, cost: Ints) -> Ints | None:
    """Return the same for groups of several samples, and with a limit on the tokens; None if a group fits nowhere."""
    ranks, held, tokens = problem.ranks, [0] * problem.ranks, [0] * problem.ranks
    costs, size, slowness = cost.tolist(), problem.size.tolist(), problem.slowness.tolist()
    token = [0] * len(costs) if problem.tokens is None else problem.tokens.tolist()
    at_max = problem.ranks_at_max
    heap = sorted((0, slowness[rank], rank) for rank in range(ranks))
    rank_of_group = np.empty(len(order), dtype=np.int64)
    for group in order.tolist():
        passed = []
        while True:
            if not heap:
                return None
            time, slow, rank = heapq.heappop(heap)
            after = held[rank] + size[group]
            if after <= problem.max_samples - (at_max == 0) and tokens[rank] + token[group] <= problem.max_tokens:
                break
            passed.append((time, slow, rank))
        rank_of_group[group] = rank
        held[rank] = after
        tokens[rank] += token[group]
        at_max -= after == problem.max_samples
        for entry in [*passed, (time + costs[group] * slow, slow, rank)]:
            heapq.heappush(heap, entry)
    return rank_of_group
