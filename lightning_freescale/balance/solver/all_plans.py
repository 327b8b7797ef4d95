"""The best of all plans, where there are few."""

from __future__ import annotations

import math

import numpy as np

from lightning_freescale.balance.solver.problem import Ints, Mask, Problem

_PLANS = 2**16
"""More are not looked at: as many take a few milliseconds."""


def are_few(problem: Problem) -> bool:
    """Return whether all plans may be looked at: of 16 groups on 2 ranks, of 10 on 3, of 8 on 4."""
    return len(problem.cost) * math.log2(problem.ranks) <= math.log2(_PLANS)


def best_plan(problem: Problem) -> Ints | None:
    """Return the first of the best of all plans within the limits; None if there is none."""
    held, load = _of_all_plans(problem.size, problem.ranks), _of_all_plans(problem.cost, problem.ranks)
    allowed: Mask = np.logical_and.reduce((held >= problem.min_samples) & (held <= problem.max_samples))
    allowed &= np.count_nonzero(held == problem.max_samples, axis=0) <= problem.ranks_at_max
    if problem.tokens is not None:
        tokens = _of_all_plans(problem.tokens, problem.ranks)
        allowed &= (tokens <= problem.max_tokens).all(axis=0)
    if not allowed.any():
        return None
    time = (load * problem.slowness[:, None]).max(axis=0).astype(np.float64)
    time[~allowed] = np.inf
    return int(time.argmin()) // problem.ranks ** np.arange(len(problem.cost)) % problem.ranks


def _of_all_plans(values: Ints, ranks: int) -> Ints:
    """Return what each rank has in all plans, shape ``[ranks, plans]``; a plan's number has a digit for each group."""
    sums = np.zeros((ranks, 1), dtype=np.int64)
    for value in values.tolist():
        sums = np.concatenate([sums + value * (np.arange(ranks) == rank)[:, None] for rank in range(ranks)], axis=1)
    return sums
