"""The first plan: longest first, each unit to the rank that is done soonest (Graham 1969), within the limits."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from lightning_freescale.balance.solver.company import demanding
from lightning_freescale.balance.solver.compiled import compiled, worth_compiling
from lightning_freescale.balance.solver.problem import Ints, Problem


def first_plan(problem: Problem) -> Ints | None:
    """The rank of every unit; None if no place was found for one."""
    if problem.plain:
        return _plain(problem)
    rank_of_unit = _limited(problem, problem.order, problem.cost)
    if rank_of_unit is None and problem.tokens is not None:  # spread what is scarce first
        rank_of_unit = _limited(problem, np.argsort(-problem.tokens, kind="stable"), problem.tokens + 1)
    return rank_of_unit


def zigzag(problem: Problem) -> Ints:
    """The paper's fixed-batch-size deal: sorted by cost, dealt to the ranks forwards and backwards in turn."""
    there_and_back = np.concatenate([np.arange(problem.ranks), np.arange(problem.ranks)[::-1]])
    rank_of_unit = np.empty(len(problem.cost), dtype=np.int64)
    rank_of_unit[problem.order] = np.resize(there_and_back, len(problem.cost))
    return rank_of_unit


def _plain(problem: Problem) -> Ints:
    order, groups = problem.order, demanding(problem)
    rank_of_unit = np.full(len(order), -1)
    for rank, group in enumerate(groups):
        rank_of_unit[group] = rank
    order = order[rank_of_unit[order] < 0]
    fast_first = np.argsort(problem.slowness, kind="stable")[len(groups) :]
    rank_of_unit[order] = fast_first[_dealt(problem, problem.cost[order], problem.slowness[fast_first])]
    return rank_of_unit


def _dealt(problem: Problem, ordered: Ints, slowness: Ints) -> Ints:
    """Dealt to the ranks that are left."""
    spare = problem.ranks if problem.spare is None else problem.spare
    left, step = np.full(len(slowness), problem.most - 1), slowness * len(slowness)
    if worth_compiling(len(ordered)):
        placed: Any = np.empty(len(ordered), dtype=np.int64)
        compiled(deal_longest_first)(ordered, step, left, spare, placed)
    else:  # lists are what the interpreter is quick with
        placed = [0] * len(ordered)
        deal_longest_first(ordered.tolist(), step.tolist(), left.tolist(), spare, placed)
    return np.asarray(placed)


def deal_longest_first(costs: Any, step: Any, left: Any, spare: int, placed: Any) -> None:
    """Fill ``placed`` with the rank of every unit; ``left`` is how many each rank may still take, ``spare`` may take one more.

    The heap holds ``time * ranks + rank``: one whole number orders by time, then by rank. ``step`` is slowness times ranks.
    """
    ranks, replace = len(left), heapq.heapreplace
    heap = [rank for rank in range(ranks)]  # noqa: C416 (list(range) is not the list that the compiler needs)
    for unit, cost in enumerate(costs):
        key = heap[0]
        rank = key % ranks
        free = left[rank]
        while free == 0 and spare == 0:
            heapq.heappop(heap)  # full for good
            key = heap[0]
            rank = key % ranks
            free = left[rank]
        placed[unit] = rank
        if free:
            left[rank] = free - 1
            replace(heap, key + cost * step[rank])
        else:
            spare -= 1
            heapq.heappop(heap)


def _limited(problem: Problem, order: Ints, cost: Ints) -> Ints | None:
    """As above for units of several samples, and with a limit on the tokens."""
    ranks, held, tokens = problem.ranks, [0] * problem.ranks, [0] * problem.ranks
    value, size, slowness = cost.tolist(), problem.size.tolist(), problem.slowness.tolist()
    token = [0] * len(value) if problem.tokens is None else problem.tokens.tolist()
    spare = ranks if problem.spare is None else problem.spare
    heap = sorted((0, slowness[rank], rank) for rank in range(ranks))
    rank_of_unit = np.empty(len(order), dtype=np.int64)
    for unit in order.tolist():
        passed = []
        while True:
            if not heap:
                return None
            time, slow, rank = heapq.heappop(heap)
            after = held[rank] + size[unit]
            fits = after <= problem.most - (spare == 0) and tokens[rank] + token[unit] <= problem.token_limit
            if fits:
                break
            passed.append((time, slow, rank))
        rank_of_unit[unit], held[rank] = rank, after
        tokens[rank] += token[unit]
        spare -= problem.spare is not None and after == problem.most
        for entry in [*passed, (time + value[unit] * slow, slow, rank)]:
            heapq.heappush(heap, entry)
    return rank_of_unit
