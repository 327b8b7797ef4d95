"""Lower the slowest rank's load by swaps and moves between pairs of ranks."""

from __future__ import annotations

import numpy as np

from lightning_freescale.balance.solver.bounds import Ints, Mask, Problem

ROUNDS, PATIENCE = 200, 8
CANDIDATES = 64
"""Samples of a rank that are tried, evenly spread from expensive to cheap; ranks with more are balanced by their number."""
_SPARSE = 16
"""How many times more slots than samples the table may have."""
_NEVER = np.iinfo(np.int64).max


def refine(problem: Problem, rank_of_sample: Ints, target: float) -> Ints:
    """Pair the slowest ranks with the quickest, make the best swap of each pair, and repeat; return the rank of every sample.

    Stops when no rank is above ``target``, after ``PATIENCE`` rounds that could not help the slowest rank, or after
    ``ROUNDS``: never by a clock, so all ranks stop at the same plan. No swap makes the slower of its two ranks slower.
    """
    count = np.bincount(rank_of_sample, minlength=problem.ranks)
    sparse = problem.ranks * int(count.max()) > _SPARSE * len(rank_of_sample)  # only if outliers leave the rest to few ranks
    if problem.ranks == 1 or sparse or problem.largest_load(rank_of_sample) <= target:
        return rank_of_sample
    sample = _samples_of_ranks(problem, rank_of_sample, count)
    cost, limits = _Amounts(problem.cost, sample), list[_Amounts]()
    if problem.min_samples < problem.max_samples:
        limits.append(_Amounts(np.ones_like(problem.cost), sample, problem.min_samples, problem.max_samples))
    if problem.tokens is not None:
        limits.append(_Amounts(problem.tokens, sample, 0, problem.max_tokens))
    slots = sample.shape[1]
    columns = np.arange(slots) if slots <= CANDIDATES else np.unique(np.linspace(0, slots - 1, CANDIDATES).astype(np.int64))
    refined, failed = np.append(rank_of_sample, -1), 0  # the last is for empty slots
    for _ in range(ROUNDS):
        above = int(np.count_nonzero(cost.held > target))
        if not above or failed == PATIENCE:
            break
        # while the slowest finds no partner, the others would gain nothing, and it tries another one
        pairs, by_load = min(1 if failed else above, problem.ranks // 2), np.argsort(-cost.held, kind="stable")
        slow, quick = by_load[:pairs], by_load[::-1][(np.arange(pairs) + failed) % (problem.ranks - pairs)]
        costs = cost.table[slow[:, None], columns], cost.table[quick[:, None], columns]
        best = _best_swap(*costs, cost.held[slow], cost.held[quick], _blocked_swaps(limits, slow, quick, columns))
        found = best >= 0
        failed = 0 if found[0] else failed + 1
        give, take = (columns[place] for place in np.divmod(best[found], len(columns)))
        ours, theirs = (slow[found], give), (quick[found], take)
        refined[sample[ours]], refined[sample[theirs]] = quick[found], slow[found]
        sample[ours], sample[theirs] = sample[theirs], sample[ours]
        for amounts in (cost, *limits):
            amounts.swap(ours, theirs)
    return refined[:-1]


def _samples_of_ranks(problem: Problem, rank_of_sample: Ints, count: Ints) -> Ints:
    """Return the samples of every rank, shape ``[ranks, slots]``, the most expensive first; an empty slot holds -1."""
    slots = int(count.max()) + (problem.min_samples < problem.max_samples)  # an empty slot turns a swap into a move
    key = rank_of_sample.astype(np.min_scalar_type(problem.ranks))  # numpy sorts short integers in linear time
    by_rank = np.argsort(key, kind="stable")
    table = np.full((problem.ranks, slots), -1)
    table[rank_of_sample[by_rank], np.arange(len(key)) - np.repeat(np.cumsum(count) - count, count)] = by_rank
    return table


class _Amounts:
    """Costs, samples or tokens in a table ``[ranks, slots]``, and how many each rank holds within its limits."""

    def __init__(self, values: Ints, sample: Ints, least: int = 0, most: int = _NEVER) -> None:
        self.table = np.append(values, 0)[sample]  # an empty slot is sample -1
        self.held: Ints = self.table.sum(axis=1)
        self.least, self.most = least, most
        self.largest = int(self.table.max())

    def swap(self, ours: tuple[Ints, Ints], theirs: tuple[Ints, Ints]) -> None:
        """Swap the slots ``(ranks, columns)`` of one side with those of the other."""
        more = self.table[ours] - self.table[theirs]
        self.held[ours[0]] -= more
        self.held[theirs[0]] += more
        self.table[ours], self.table[theirs] = self.table[theirs], self.table[ours]

    def allowed(self, slow: Ints, quick: Ints) -> tuple[Ints, Ints]:
        """Return the least and the most that each pair may move from slow to quick within the limits, shape ``[pairs]``."""
        low = np.maximum(self.held[slow] - self.most, self.least - self.held[quick])
        return low, np.minimum(self.held[slow] - self.least, self.most - self.held[quick])


def _blocked_swaps(limits: list[_Amounts], slow: Ints, quick: Ints, columns: Ints) -> Mask:
    """Return which swaps a limit forbids, shape ``[pairs, candidates, candidates]``; an empty array if none."""
    blocked = np.zeros((0, 0, 0), dtype=bool)
    for limit in limits:
        low, high = limit.allowed(slow, quick)
        near = np.flatnonzero((low > -limit.largest) | (high < limit.largest))  # a single swap could exceed the limit
        if len(near):
            blocked = blocked if blocked.size else np.zeros((len(slow), len(columns), len(columns)), dtype=bool)
            ours, theirs = limit.table[slow[near][:, None], columns], limit.table[quick[near][:, None], columns]
            more = ours[:, :, None] - theirs[:, None, :]
            blocked[near] |= (more < low[near][:, None, None]) | (more > high[near][:, None, None])
    return blocked


def _best_swap(slow: Ints, quick: Ints, slow_load: Ints, quick_load: Ints, blocked: Mask) -> Ints:
    """Return which sample to give and which to take so that the larger of the two loads becomes smallest.

    Args:
        slow: costs that the slow rank of each pair may give, shape ``[pairs, candidates]``; 0 is an empty slot.
        quick: costs that its partner may give back, the same shape.
        slow_load: summed cost of the slow ranks, shape ``[pairs]``.
        quick_load: of their partners.
        blocked: swaps that are not allowed, shape ``[pairs, candidates, candidates]``; empty if all are.

    Returns:
        ``give * candidates + take`` of every pair, the first of equals; -1 where no swap helps. Shape ``[pairs]``.
    """
    pairs, candidates = slow.shape
    more = slow[:, :, None] - quick[:, None, :]
    larger = quick_load[:, None, None] + more
    np.subtract(slow_load[:, None, None], more, out=more)
    np.maximum(larger, more, out=larger)
    if blocked.size:
        larger[blocked] = _NEVER
    flat = larger.reshape(pairs, candidates * candidates)
    best = flat.argmin(axis=1)
    return np.where(flat[np.arange(pairs), best] < slow_load, best, -1)
