"""The first plan: longest first, each group to the rank that is done soonest (Graham 1969), within the limits."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from lightning_freescale.balance.solver.problem import Ints, Problem
from lightning_freescale.balance.solver.swaps import compiled, worth_compiling

_OUTLIER_RANKS = 24
"""How many ranks are filled before all others at most."""
_RUN, _COMPILED_RUN, _HEAPED = 32, 160, 512
"""Shorter runs of ranks are left to the heap, for so many groups."""
_NEVER = np.iinfo(np.int64).max


def first_plan(problem: Problem, time: float) -> Ints | None:
    """Return the rank of every group, shape ``[groups]``; None if no place was found for one.

    Args:
        problem: what to plan.
        time: when all ranks should be done, as far as can be.
    """
    if problem.limits_counts_only:
        filled = _filled_with_outliers(problem, time)
        if not filled:
            return longest_first(problem)
        plan = np.full(len(problem.cost), -1)
        for rank, groups in enumerate(filled):
            plan[groups] = rank
        left = np.flatnonzero(plan < 0)
        plan[left] = len(filled) + longest_first(problem.part(left, problem.ranks - len(filled)))
        return plan
    ways = [(np.arange(len(problem.cost)), problem.cost)]
    scarce = [problem.size] if problem.tokens is None else [problem.tokens + 1, problem.size]
    ways += [(np.argsort(-amount, kind="stable"), amount) for amount in scarce]  # spread what is scarce first
    for order, amount in ways:
        found = _longest_first_within_limits(problem, order, amount)
        if found is not None:
            return found
    return _fullest_first(problem, scarce[0])


def zigzag(problem: Problem) -> Ints:
    """Return FreeScale's plan at equal counts: sorted by cost, given to the ranks forwards and backwards in turn."""
    there_and_back = np.concatenate([np.arange(problem.ranks), np.arange(problem.ranks)[::-1]])
    return np.resize(there_and_back, len(problem.cost))


def longest_first(problem: Problem) -> Ints:
    """Return the plan where nothing but the number of single samples is limited.

    Of ranks in order of their times, each is the next one until one before it is done again: such a run of ranks takes a group
    each at once. Where runs are short, a heap is quicker. Both find the same plan.
    """
    fast_first = np.argsort(problem.slowness, kind="stable")
    slowness, bits, groups = problem.slowness[fast_first], problem.ranks.bit_length(), len(problem.cost)
    # time * 2**bits + rank: one whole number orders by time, then by rank
    key, number, cost = np.arange(problem.ranks), (1 << bits) - 1, problem.cost << bits
    room, at_max = np.full(problem.ranks, problem.max_samples - 1), problem.ranks_at_max
    placed, done = np.empty(groups, dtype=np.int64), 0
    compile_heap = worth_compiling(groups)
    shortest = _COMPILED_RUN if compile_heap else _RUN
    while done < groups:
        run, short = 0, min(len(key), groups - done) < shortest
        if not short:
            soonest = key[: groups - done]
            rank = soonest & number
            left, after = room[rank], soonest + cost[done : done + len(rank)] * slowness[rank]
            full = np.flatnonzero(left == 0)  # these take one more, as only so many ranks may, and are done
            after[full] = _NEVER
            again = soonest[1:] > np.minimum.accumulate(after)[:-1]
            run = int(again.argmax()) + 1
            run = min(run if again[run - 1] else len(rank), int(full[at_max]) if len(full) > at_max else groups)
        if run < shortest:
            run = min(groups - done, groups if short else _HEAPED)
            place = _compiled_heap if compile_heap else _heap
            key, at_max = place(key, cost[done : done + run], slowness, room, at_max, placed[done : done + run])
        else:
            placed[done : done + run] = rank[:run]
            room[rank[:run]] = left[:run] - 1
            key = np.concatenate([key[run:], after[:run]])
            key.sort(kind="stable")  # quick with what is nearly in order
            filled = int(np.searchsorted(full, run))
            key, at_max = key[: len(key) - filled], at_max - filled
        if not at_max:
            key = key[room[key & number] > 0]
        done += run
    return fast_first[placed]


def _compiled_heap(key: Ints, cost: Ints, slowness: Ints, room: Ints, at_max: int, placed: Ints) -> tuple[Ints, int]:
    heap, at_max = compiled(place_longest_first)(key, cost, slowness, room, at_max, placed)
    return np.sort(np.array(heap, dtype=np.int64)), at_max


def _heap(key: Ints, cost: Ints, slowness: Ints, room: Ints, at_max: int, placed: Ints) -> tuple[Ints, int]:
    # lists are what the interpreter is quick with
    left: Any = room.tolist()
    chosen: Any = [0] * len(cost)
    heap, at_max = place_longest_first(key.tolist(), cost.tolist(), slowness.tolist(), left, at_max, chosen)
    room[:], placed[:] = left, chosen
    return np.array(sorted(heap), dtype=np.int64), at_max


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


def place_longest_first(key: Any, costs: Any, slowness: Any, room: Any, at_max: int, placed: Any) -> tuple[Any, int]:
    """Fill ``placed`` with the rank of every group, each of one sample; return what is left of the keys, and of ``at_max``.

    Args:
        key: time of every rank that may take more, times a power of two above the number of ranks, plus its number; in order.
        costs: times that power, from the most expensive to the cheapest, shape ``[groups]``.
        slowness: shape ``[ranks]``.
        room: groups that each rank may still take, shape ``[ranks]``; changed in place.
        at_max: how many ranks may take one more.
        placed: shape ``[groups]``.
    """
    number, replace = 1, heapq.heapreplace
    while number <= len(slowness):
        number *= 2
    heap = [entry for entry in key]  # noqa: C416 (list(key) is not the list that the compiler needs)
    for group, cost in enumerate(costs):
        while at_max == 0 and room[heap[0] & number - 1] == 0:
            heapq.heappop(heap)  # full for good
        rank = heap[0] & number - 1
        placed[group] = rank
        if room[rank]:
            room[rank] -= 1
            replace(heap, heap[0] + cost * slowness[rank])
        else:
            at_max -= 1
            heapq.heappop(heap)
    return heap, at_max


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


def _fullest_first(problem: Problem, amount: Ints) -> Ints | None:
    """Return a plan that gives every group, the largest first, to the fullest rank with room for it; None if one has none."""
    held, filled, tokens = (np.zeros(problem.ranks, dtype=np.int64) for _ in range(3))
    token = np.zeros_like(problem.size) if problem.tokens is None else problem.tokens
    rank_of_group, at_max = np.empty(len(amount), dtype=np.int64), problem.ranks_at_max
    for left, group in zip(range(len(amount), 0, -1), np.argsort(-amount, kind="stable").tolist()):
        after = held + problem.size[group]
        fits = after <= problem.max_samples - (at_max == 0)
        if problem.tokens is not None:
            fits &= tokens + token[group] <= problem.max_tokens
        if left <= np.count_nonzero(held == 0):  # no rank stays empty
            fits &= held == 0
        if not fits.any():
            return None
        rank = int(np.where(fits, filled, -1).argmax())
        rank_of_group[group], at_max = rank, at_max - int(after[rank] == problem.max_samples)
        held[rank], filled[rank], tokens[rank] = after[rank], filled[rank] + amount[group], tokens[rank] + token[group]
    return rank_of_group
