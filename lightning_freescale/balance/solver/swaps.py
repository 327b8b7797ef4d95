"""Swaps and moves between pairs of ranks, which lower the load of the slowest rank."""

from __future__ import annotations

import numpy as np

from lightning_freescale.balance.solver.bounds import Ints, Mask, Problem

ROUNDS, PATIENCE = 200, 8
CANDIDATES = 64
"""Maximum number of a rank's samples that are tried, evenly spread from expensive to cheap."""
_SPARSE = 16
"""Maximum number of slots of the table per sample."""
_NEVER = np.iinfo(np.int64).max


def refine(problem: Problem, rank_of_sample: Ints, target: float) -> Ints:
    """Pair the slowest ranks with the quickest, make the best swap of each pair, and repeat; return the rank of each sample.

    The loop stops when no rank is above ``target``, after ``PATIENCE`` rounds that did not help the slowest rank, or after
    ``ROUNDS``. It reads no clock, so that all ranks stop at the same plan. No swap makes the slower of its two ranks slower.
    """
    count = np.bincount(rank_of_sample, minlength=problem.ranks)
    sparse = problem.ranks * int(count.max()) > _SPARSE * len(rank_of_sample)  # outliers leave the other samples to few ranks
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
    refined, failed = np.append(rank_of_sample, -1), 0  # the last element is for empty slots
    for _ in range(ROUNDS):
        above = int(np.count_nonzero(cost.held > target))
        if not above or failed == PATIENCE:
            break
        # after a failure, only the slowest rank tries another partner, because the step waits for it
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
    """Return the samples of each rank, the most expensive first, shape ``[ranks, slots]``; an empty slot holds -1."""
    slots = int(count.max()) + (problem.min_samples < problem.max_samples)  # a swap with an empty slot is a move
    key = rank_of_sample.astype(np.min_scalar_type(problem.ranks))  # numpy sorts 16-bit integers in linear time
    by_rank = np.argsort(key, kind="stable")
    table = np.full((problem.ranks, slots), -1)
    table[rank_of_sample[by_rank], np.arange(len(key)) - np.repeat(np.cumsum(count) - count, count)] = by_rank
    return table


class _Amounts:
    """Costs, samples or tokens in a table ``[ranks, slots]``, with the sum and the limits of each rank."""

    def __init__(self, values: Ints, sample: Ints, least: int = 0, most: int = _NEVER) -> None:
        self.table = np.append(values, 0)[sample]  # an empty slot is sample -1
        self.held: Ints = self.table.sum(axis=1)
        self.least, self.most = least, most
        self.largest = int(self.table.max())

    def swap(self, ours: tuple[Ints, Ints], theirs: tuple[Ints, Ints]) -> None:
        """Swap the slots ``(ranks, columns)`` of both sides."""
        more = self.table[ours] - self.table[theirs]
        self.held[ours[0]] -= more
        self.held[theirs[0]] += more
        self.table[ours], self.table[theirs] = self.table[theirs], self.table[ours]

    def allowed(self, slow: Ints, quick: Ints) -> tuple[Ints, Ints]:
        """Return the minimum and maximum amount that each pair may move from slow to quick, shape ``[pairs]``."""
        low = np.maximum(self.held[slow] - self.most, self.least - self.held[quick])
        return low, np.minimum(self.held[slow] - self.least, self.most - self.held[quick])


def _blocked_swaps(limits: list[_Amounts], slow: Ints, quick: Ints, columns: Ints) -> Mask:
    """Return the mask of forbidden swaps, shape ``[pairs, candidates, candidates]``; an empty array if none is."""
    blocked = np.zeros((0, 0, 0), dtype=bool)
    for limit in limits:
        low, high = limit.allowed(slow, quick)
        near = np.flatnonzero((low > -limit.largest) | (high < limit.largest))  # pairs whose swap could exceed the limit
        if len(near):
            blocked = blocked if blocked.size else np.zeros((len(slow), len(columns), len(columns)), dtype=bool)
            ours, theirs = limit.table[slow[near][:, None], columns], limit.table[quick[near][:, None], columns]
            more = ours[:, :, None] - theirs[:, None, :]
            blocked[near] |= (more < low[near][:, None, None]) | (more > high[near][:, None, None])
    return blocked


def _best_swap(slow: Ints, quick: Ints, slow_load: Ints, quick_load: Ints, blocked: Mask) -> Ints:
    """Return ``give * candidates + take`` of the swap that makes the larger load of each pair smallest, shape ``[pairs]``.

    The result is -1 for pairs that no swap helps. ``slow`` and ``quick`` hold the costs that may be swapped, shape
    ``[pairs, candidates]``, and 0 for empty slots.
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
