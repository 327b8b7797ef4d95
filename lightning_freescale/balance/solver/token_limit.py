"""Plans that keep a limit on tokens, out of plans that do not, by swaps that leave the slowest rank nearly as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_freescale.balance.solver.problem import Ints, Problem, dearest_first
from lightning_freescale.balance.solver.swaps import refine

_SLOWER = (1.0003, 1.01, 1.03, 1.1, 1.3, 2.0, 1e3)
"""How many times the time of a plan may become what it was, one after the other, until its tokens are within their limit."""


def brought_within(problem: Problem, plan: Ints) -> Ints | None:
    """Return a plan within the limit on tokens, as quick as swaps find it; None if they find none.

    Args:
        problem: what to plan.
        plan: the rank of every group, within the limits on the number of samples.
    """
    assert problem.tokens is not None
    time = int(problem.times(plan).max())
    for slower in _SLOWER:
        if problem.allows(plan):
            return plan
        plan = fewer_tokens(problem, plan, problem.tokens, time * slower, int(np.min(problem.max_tokens)))
    return plan if problem.allows(plan) else None


def fewer_tokens(problem: Problem, plan: Ints, tokens: Ints, time: float, target: float) -> Ints:
    """Return a plan whose ranks have no more tokens than ``target``, or not many more, and are done by ``time``.

    Args:
        problem: what was planned; its own limit on tokens is left out.
        plan: the rank of every group, done by ``time``.
        tokens: shape ``[groups]``.
        time: in which every rank is to be done.
        target: where to stop.
    """
    # the same swaps, with the parts of cost and tokens exchanged
    order, same_speed = dearest_first(tokens), np.ones_like(problem.slowness)
    most = (time // problem.slowness).astype(np.int64)
    size = problem.size[order]
    swapped = replace(problem, cost=tokens[order], size=size, tokens=problem.cost[order], max_tokens=most)
    swapped = replace(swapped, slowness=same_speed, unrounded=None)
    found = np.empty_like(plan)
    found[order] = refine(swapped, plan[order], target)
    return found


def dearest_to_fastest(problem: Problem, plan: Ints) -> Ints:
    """Return the same plan with the ranks renamed, so that those with most to do are the fastest: limits are alike for all."""
    if not np.ptp(problem.slowness):
        return plan
    load = np.bincount(plan, problem.cost, problem.ranks)
    renamed = np.empty(problem.ranks, dtype=np.int64)
    renamed[np.argsort(-load, kind="stable")] = np.argsort(problem.slowness, kind="stable")
    return renamed[plan]
