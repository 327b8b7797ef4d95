"""Lower the slowest rank's time by swaps and moves between pairs of ranks, with numpy or compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from lightning_freescale.balance.solver.problem import Ints, Mask, Problem

ROUNDS, PATIENCE = 200, 8
CANDIDATES = 64
"""Groups of a rank that are tried, evenly spread from expensive to cheap; ranks with more are balanced by their number."""
_SPARSE = 16
"""How many times more slots than groups the table may have."""
_NEVER = np.iinfo(np.int64).max

SMALLEST = 2048
"""Groups from which on compiling is worth it: below, the interpreter needs less than a millisecond."""
numba_enabled = find_spec("numba") is not None
"""Set to False to plan without numba although it is installed."""


def worth_compiling(groups: int) -> bool:
    """Return whether to take the compiled path, which finds the same plan to the sample."""
    return numba_enabled and groups >= SMALLEST


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, compiled at its first call and kept on disk; it leaves the interpreter free for training."""
    import numba

    return numba.njit(cache=True, nogil=True)(function)


def refine(problem: Problem, rank_of_group: Ints, target: float) -> Ints:
    """Pair the slowest ranks with the quickest, make the best swap of each pair, and repeat; return the rank of every group.

    Stops when no rank is above ``target``, after ``PATIENCE`` rounds that could not help the slowest rank, or after
    ``ROUNDS``: never by a clock, so all ranks stop at the same plan. No swap makes the slower of its two ranks slower.
    """
    count = np.bincount(rank_of_group, minlength=problem.ranks)
    sparse = problem.ranks * int(count.max()) > _SPARSE * len(rank_of_group)  # only if outliers leave the rest to few ranks
    if problem.ranks == 1 or sparse or problem.times(rank_of_group).max() <= target:
        return rank_of_group
    group = _groups_of_ranks(problem, rank_of_group, count)
    cost, limits = _Amounts(problem.cost, group), list[_Amounts]()
    if problem.min_samples < problem.max_samples or not problem.limits_counts_only:
        limits.append(_Amounts(problem.size, group, problem.min_samples, problem.max_samples))
    if problem.tokens is not None:
        limits.append(_Amounts(problem.tokens, group, 0, problem.max_tokens))
    slots = group.shape[1]
    columns = np.arange(slots) if slots <= CANDIDATES else np.unique(np.linspace(0, slots - 1, CANDIDATES).astype(np.int64))
    compile_search = worth_compiling(len(rank_of_group))
    refined, failed = np.append(rank_of_group, -1), 0  # the last is for empty slots
    for _ in range(ROUNDS):
        time = cost.held * problem.slowness
        above = int(np.count_nonzero(time > target))
        if not above or failed == PATIENCE:
            break
        # while the slowest finds no partner, the others' gains are none, and it tries another one
        pairs, by_time = min(1 if failed else above, problem.ranks // 2), np.argsort(-time, kind="stable")
        slow, quick = by_time[:pairs], by_time[::-1][(np.arange(pairs) + failed) % (problem.ranks - pairs)]
        costs = cost.table[slow[:, None], columns], cost.table[quick[:, None], columns]
        pace = problem.slowness[slow], problem.slowness[quick]
        loads = cost.held[slow], cost.held[quick]
        if compile_search:
            best = compiled(best_swap_loop)(*costs, *loads, *pace, *_allowed_swaps(limits, slow, quick, columns))
        else:
            best = best_swap(*costs, *loads, *pace, _blocked_swaps(limits, slow, quick, columns))
        found = best >= 0
        failed = 0 if found[0] else failed + 1
        give, take = (columns[place] for place in np.divmod(best[found], len(columns)))
        ours, theirs = (slow[found], give), (quick[found], take)
        refined[group[ours]], refined[group[theirs]] = quick[found], slow[found]
        group[ours], group[theirs] = group[theirs], group[ours]
        for amounts in (cost, *limits):
            amounts.swap(ours, theirs)
    return refined[:-1]


def _groups_of_ranks(problem: Problem, rank_of_group: Ints, count: Ints) -> Ints:
    """Return the groups of every rank, shape ``[ranks, slots]``, the most expensive first; an empty slot holds -1."""
    slots = int(count.max()) + (problem.min_samples < problem.max_samples)  # an empty slot turns a swap into a move
    if worth_compiling(len(rank_of_group)):
        return compiled(table_of_ranks)(rank_of_group, problem.ranks, slots)
    key = rank_of_group.astype(np.min_scalar_type(problem.ranks))  # numpy sorts short integers in linear time
    by_rank = np.argsort(key, kind="stable")
    table = np.full((problem.ranks, slots), -1)
    table[rank_of_group[by_rank], np.arange(len(key)) - np.repeat(np.cumsum(count) - count, count)] = by_rank
    return table


def table_of_ranks(rank_of_group: Ints, ranks: int, slots: int) -> Ints:
    """Return the groups of every rank in their order, shape ``[ranks, slots]``; written out for numba."""
    table, held = np.full((ranks, slots), -1), np.zeros(ranks, dtype=np.int64)
    for group, rank in enumerate(rank_of_group):
        table[rank, held[rank]] = group
        held[rank] += 1
    return table


class _Amounts:
    """Costs, samples or tokens in a table ``[ranks, slots]``, and how many each rank holds within its limits."""

    def __init__(self, values: Ints, group: Ints, least: int = 0, most: int | Ints = _NEVER) -> None:
        self.table = np.append(values, 0)[group]  # an empty slot is group -1
        self.held: Ints = self.table.sum(axis=1)
        self.least, self.most = least, np.broadcast_to(most, len(group))  # the same for all, or one of each rank
        self.largest = int(self.table.max())

    def swap(self, ours: tuple[Ints, Ints], theirs: tuple[Ints, Ints]) -> None:
        """Swap the slots ``(ranks, columns)`` of one side with those of the other."""
        more = self.table[ours] - self.table[theirs]
        self.held[ours[0]] -= more
        self.held[theirs[0]] += more
        self.table[ours], self.table[theirs] = self.table[theirs], self.table[ours]

    def allowed(self, slow: Ints, quick: Ints) -> tuple[Ints, Ints]:
        """Return the least and the most that each pair may move from slow to quick within the limits, shape ``[pairs]``."""
        low = np.maximum(self.held[slow] - self.most[slow], self.least - self.held[quick])
        return low, np.minimum(self.held[slow] - self.least, self.most[quick] - self.held[quick])


def _blocked_swaps(limits: list[_Amounts], slow: Ints, quick: Ints, columns: Ints) -> Mask:
    """Return which swaps a limit forbids, shape ``[pairs, candidates, candidates]``; an empty array if none."""
    blocked = np.zeros((0, 0, 0), dtype=bool)
    for limit in limits:
        low, high = limit.allowed(slow, quick)
        near = np.flatnonzero((low > -limit.largest) | (high < limit.largest))  # a single swap could leave the limit
        if len(near):
            blocked = blocked if blocked.size else np.zeros((len(slow), len(columns), len(columns)), dtype=bool)
            ours, theirs = limit.table[slow[near][:, None], columns], limit.table[quick[near][:, None], columns]
            more = ours[:, :, None] - theirs[:, None, :]
            blocked[near] |= (more < low[near][:, None, None]) | (more > high[near][:, None, None])
    return blocked


def _allowed_swaps(limits: list[_Amounts], slow: Ints, quick: Ints, columns: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the same for the compiled loop, which looks at the limits of few swaps: what may be given and taken, and moved."""
    allowed = [(limit, *limit.allowed(slow, quick)) for limit in limits]
    # those that a single swap could leave
    near = [(limit, low, high) for limit, low, high in allowed if low.max() > -limit.largest or high.min() < limit.largest]
    ours, theirs = (np.empty((len(near), len(slow), len(columns)), dtype=np.int64) for _ in range(2))
    low, high = (np.empty((len(near), len(slow)), dtype=np.int64) for _ in range(2))
    for place, (limit, least, most) in enumerate(near):
        ours[place], theirs[place] = limit.table[slow[:, None], columns], limit.table[quick[:, None], columns]
        low[place], high[place] = least, most
    return ours, theirs, low, high


def best_swap(
    slow: Ints, quick: Ints, slow_load: Ints, quick_load: Ints, slow_pace: Ints, quick_pace: Ints, blocked: Mask
) -> Ints:
    """Return which group to give and which to take so that the later of the two ranks is done soonest.

    Args:
        slow: costs that the slow rank of each pair may give, shape ``[pairs, candidates]``; 0 is an empty slot.
        quick: costs that its partner may give back, the same shape.
        slow_load: summed cost of the slow ranks, shape ``[pairs]``.
        quick_load: of their partners.
        slow_pace: time per cost of the slow ranks, shape ``[pairs]``.
        quick_pace: of their partners.
        blocked: swaps that are not allowed, shape ``[pairs, candidates, candidates]``; empty if all are.

    Returns:
        ``give * candidates + take`` of every pair, the first of equals; -1 where no swap helps. Shape ``[pairs]``.
    """
    pairs, candidates = slow.shape
    more = slow[:, :, None] - quick[:, None, :]
    later = quick_load[:, None, None] + more
    later *= quick_pace[:, None, None]
    np.subtract(slow_load[:, None, None], more, out=more)
    more *= slow_pace[:, None, None]
    np.maximum(later, more, out=later)
    if blocked.size:
        later[blocked] = _NEVER
    flat = later.reshape(pairs, candidates * candidates)
    best = flat.argmin(axis=1)
    return np.where(flat[np.arange(pairs), best] < slow_load * slow_pace, best, -1)


def best_swap_loop(
    slow: Ints,
    quick: Ints,
    slow_load: Ints,
    quick_load: Ints,
    slow_pace: Ints,
    quick_pace: Ints,
    slow_amounts: Ints,
    quick_amounts: Ints,
    low: Ints,
    high: Ints,
) -> Ints:
    """Return what :func:`best_swap` does, to the index, written out as the loop that numba compiles.

    Instead of the swaps that are not allowed, it is told the amounts of what is limited, shape ``[limits, pairs, candidates]``,
    and how much of each may be moved, shape ``[limits, pairs]``.
    """
    pairs, candidates = slow.shape
    limits = len(low)
    result = np.full(pairs, -1)
    for p in range(pairs):
        least = slow_load[p] * slow_pace[p]
        for i in range(candidates):
            for j in range(candidates):
                more = slow[p, i] - quick[p, j]
                later = max((slow_load[p] - more) * slow_pace[p], (quick_load[p] + more) * quick_pace[p])
                if later < least:
                    allowed = True
                    for k in range(limits):
                        amount = slow_amounts[k, p, i] - quick_amounts[k, p, j]
                        if amount < low[k, p] or amount > high[k, p]:
                            allowed = False
                    if allowed:
                        least, result[p] = later, i * candidates + j
    return result
