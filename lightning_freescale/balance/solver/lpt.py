"""The first plan: each sample, the longest first, goes to the rank with the least load (Graham 1969), within the limits."""

from __future__ import annotations

import heapq

import numpy as np

from lightning_freescale.balance.solver.bounds import Ints, Problem

_OUTLIER_RANKS = 24
"""Maximum number of ranks that are filled before all others."""
_RUN, _HEAPED = 32, 512
"""Length below which runs of ranks are planned by a heap, and the number of samples that the heap then plans."""
_NEVER = np.iinfo(np.int64).max


def first_plan(problem: Problem, load: float) -> Ints | None:
    """Return the rank of each sample, shape ``[samples]``; None if a sample fits nowhere. ``load`` is the load to aim at."""
    if problem.tokens is None:
        filled = _filled_with_outliers(problem, load)
        if not filled:
            return longest_first(problem)
        plan = np.full(len(problem.cost), -1)
        for rank, samples in enumerate(filled):
            plan[samples] = rank
        left = np.flatnonzero(plan < 0)
        plan[left] = len(filled) + longest_first(problem.part(left, problem.ranks - len(filled)))
        return plan
    scarce, alike = problem.tokens + 1, np.ones_like(problem.cost)
    by_cost = np.arange(len(problem.cost))
    for order, amount in ((by_cost, problem.cost), (np.argsort(-scarce, kind="stable"), scarce), (by_cost, alike)):
        found = _longest_first_within_limits(problem, problem.tokens, order, amount)
        if found is not None:
            return found
    return _fullest_first(problem, problem.tokens)


def zigzag(problem: Problem) -> Ints:
    """Return FreeScale's plan at equal counts: the sorted samples go to the ranks forwards and backwards in turn."""
    there_and_back = np.concatenate([np.arange(problem.ranks), np.arange(problem.ranks)[::-1]])
    return np.resize(there_and_back, len(problem.cost))


def longest_first(problem: Problem) -> Ints:
    """Return the plan if only the number of samples is limited.

    Ranks sorted by load take one sample each until a rank that took one has the least load again. Such a run of ranks is
    planned in one vectorized step. A heap is faster for short runs and finds the same plan.
    """
    bits, samples = problem.ranks.bit_length(), len(problem.cost)
    # load * 2**bits + rank: one whole number that sorts by load, then by rank
    key, number, cost = np.arange(problem.ranks), (1 << bits) - 1, problem.cost << bits
    free, at_max = np.full(problem.ranks, problem.max_samples - 1), problem.ranks_at_max
    placed, done = np.empty(samples, dtype=np.int64), 0
    while done < samples:
        run, short = 0, min(len(key), samples - done) < _RUN
        if not short:
            soonest = key[: samples - done]
            rank = soonest & number
            left, after = free[rank], soonest + cost[done : done + len(rank)]
            full = np.flatnonzero(left == 0)  # these take their last sample, which only ranks_at_max ranks may
            after[full] = _NEVER
            again = soonest[1:] > np.minimum.accumulate(after)[:-1]
            run = int(again.argmax()) + 1
            run = min(run if again[run - 1] else len(rank), int(full[at_max]) if len(full) > at_max else samples)
        if run < _RUN:
            run = min(samples - done, samples if short else _HEAPED)
            key, at_max = _heap(key, cost[done : done + run], number, free, at_max, placed[done : done + run])
        else:
            placed[done : done + run] = rank[:run]
            free[rank[:run]] = left[:run] - 1
            key = np.concatenate([key[run:], after[:run]])
            key.sort(kind="stable")  # fast if the keys are nearly sorted
            filled = int(np.searchsorted(full, run))
            key, at_max = key[: len(key) - filled], at_max - filled
        if not at_max:
            key = key[free[key & number] > 0]
        done += run
    return placed


def _heap(key: Ints, cost: Ints, number: int, free: Ints, at_max: int, placed: Ints) -> tuple[Ints, int]:
    """Fill ``placed`` with the rank of each sample; return the remaining keys, sorted, and the remaining ``at_max``.

    ``number`` masks the bits of a key that hold the rank. ``free``, the number of samples that each rank may still take, is
    changed in place.
    """
    # lists, because the interpreter reads single items of arrays slowly
    heap, left, chosen = key.tolist(), free.tolist(), [0] * len(cost)
    for sample, each in enumerate(cost.tolist()):
        while at_max == 0 and left[heap[0] & number] == 0:
            heapq.heappop(heap)  # this rank is full
        rank = chosen[sample] = heap[0] & number
        if left[rank]:
            left[rank] -= 1
            heapq.heapreplace(heap, heap[0] + each)
        else:
            at_max -= 1
            heapq.heappop(heap)
    free[:], placed[:] = left, chosen
    return np.array(sorted(heap), dtype=np.int64), at_max


def _filled_with_outliers(problem: Problem, load: float) -> list[Ints]:
    """Return the samples of the ranks that hold an outlier, from the most expensive outlier on.

    With average samples beside it, an outlier would put its rank above ``load``. Longest first would give that rank the
    samples that are left at the end.
    """
    company = problem.min_samples - 1
    if not company:
        return []
    left, filled = np.arange(len(problem.cost))[::-1], list[Ints]()  # the cheapest first
    # number of ranks that must stay free to hold one sample more
    fuller = problem.ranks_at_max if problem.min_samples < problem.max_samples else 1
    while len(filled) < min(_OUTLIER_RANKS, problem.ranks - fuller):
        cost = problem.cost[left]
        total = np.concatenate([[0], cost[:-1].cumsum()])
        runs = total[company:] - total[:-company]
        # the most expensive run within the load, because it leaves the cheapest samples to the next outlier
        first = max(0, int(np.searchsorted(runs, int(load) - int(cost[-1]), side="right")) - 1)
        if first > len(runs) // 4:  # no outlier, because many runs fit beside it
            break
        chosen = np.append(np.arange(first, first + company), len(left) - 1)
        filled.append(left[chosen])
        left = np.delete(left, chosen)
    return filled


def _longest_first_within_limits(problem: Problem, tokens: Ints, order: Ints, amount: Ints) -> Ints | None:
    """Return the plan with a limit on tokens, in a given order and by a given amount; None if a sample fits nowhere."""
    amounts, token = amount.tolist(), tokens.tolist()
    held, filled = [0] * problem.ranks, [0] * problem.ranks
    at_max = problem.ranks_at_max
    heap = [(0, rank) for rank in range(problem.ranks)]
    rank_of_sample = np.empty(len(order), dtype=np.int64)
    for sample in order.tolist():
        passed = []
        while True:
            if not heap:
                return None
            load, rank = heapq.heappop(heap)
            after = held[rank] + 1
            if after <= problem.max_samples - (at_max == 0) and filled[rank] + token[sample] <= problem.max_tokens:
                break
            passed.append((load, rank))
        rank_of_sample[sample] = rank
        held[rank] = after
        filled[rank] += token[sample]
        at_max -= after == problem.max_samples
        for entry in [*passed, (load + amounts[sample], rank)]:
            heapq.heappush(heap, entry)
    return rank_of_sample


def _fullest_first(problem: Problem, tokens: Ints) -> Ints | None:
    """Return a plan that gives each sample, the largest first, to the fullest rank that can take it; None if none can."""
    held, filled = (np.zeros(problem.ranks, dtype=np.int64) for _ in range(2))
    rank_of_sample, at_max = np.empty(len(tokens), dtype=np.int64), problem.ranks_at_max
    for left, sample in zip(range(len(tokens), 0, -1), np.argsort(-tokens, kind="stable").tolist()):
        fits = held + 1 <= problem.max_samples - (at_max == 0)
        fits &= filled + tokens[sample] <= problem.max_tokens
        if left <= np.count_nonzero(held == 0):  # no rank may stay empty
            fits &= held == 0
        if not fits.any():
            return None
        # + held, so that of two ranks with equal tokens the one with more samples counts as fuller
        rank = int(np.where(fits, filled + held, -1).argmax())
        held[rank], filled[rank] = held[rank] + 1, filled[rank] + tokens[sample]
        rank_of_sample[sample], at_max = rank, at_max - int(held[rank] == problem.max_samples)
    return rank_of_sample
