"""The search for a plan that reaches the lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lightning_freescale.balance.solver.bounds import Block, Ints, Mask, Problem, dearest_first, lower_bound, to_integers
from lightning_freescale.balance.solver.exchanges import exchange
from lightning_freescale.balance.solver.lpt import first_plan, longest_first, zigzag
from lightning_freescale.balance.solver.swaps import refine

CLOSE_ENOUGH = 1.0003
"""Swaps stop within this factor of the lower bound."""
_WORTH_EXCHANGES, _WORTH_ANOTHER_WAY = 1.0008, 1.01
"""Factors of the bound above which exchanges, and other first plans of many samples within a token limit, are tried.
Exchanges also stop at the first: near the bound they take more time on the host than a step could gain."""
_BLOCKS, _TIGHT = 8, 0.98
"""Maximum number of blocks that are planned separately, and the minimum ratio of their bound to the whole bound."""
_BEGINNINGS, _FEW, _MANY = 4, 256, 4096
"""Maximum number of further first plans, the maximum number of samples for which they are tried, and the number of samples
above which further first plans within a token limit take too long."""
_PATIENCE, _PATIENCE_OF_FEW = 30, 8
"""Patience of the exchanges. With few samples, other first plans find as much in a third of the time."""
_GOLDEN = 2654435761
_ALL_PLANS = 2**16
"""Maximum number of plans up to which all are compared. That takes a few milliseconds."""
_SLOWER = (1.0003, 1.01, 1.03, 1.1, 1.3, 2.0, 1e3)
"""Factors by which the load of a plan may rise, tried in turn until its tokens are within their limit."""


def search(problem: Problem, fallback: Ints | None = None) -> tuple[Ints | None, float]:
    """Return the rank of each sample, None if no plan within the limits was found, and the bound on the largest load.

    ``fallback`` is a plan to start from if none is found, shape ``[samples]``.
    """
    bound, block = lower_bound(problem)
    plan = _planned(problem, bound, block) if problem.tokens is None else _within_token_limit(problem, bound, fallback)
    if plan is not None and problem.largest_load(plan) <= CLOSE_ENOUGH * bound:
        return plan, bound
    if len(problem.cost) * math.log2(problem.ranks) <= math.log2(_ALL_PLANS):
        plan = _best_of_all_plans(problem)
        if plan is None or problem.tokens is not None:  # the bound ignores the token limit
            return plan, bound
        return plan, float(problem.largest_load(plan))
    if plan is None:
        return None, bound
    plain = zigzag(problem)
    better = problem.allows(plain) and problem.largest_load(plain) < problem.largest_load(plan)
    return plain if better else plan, bound


# -- plans without a limit on tokens


def _planned(problem: Problem, load: float, block: Block | None) -> Ints:
    """Return a plan that aims at ``load``, the lower bound, with the ranks that cause it planned separately."""
    plan, part, samples, first = np.empty(len(problem.cost), dtype=np.int64), problem, np.arange(len(problem.cost)), 0
    bound = load
    for _ in range(_BLOCKS):
        if block is None or bound <= max(_TIGHT * load, CLOSE_ENOUGH * part.ideal_load):
            break
        plan[samples[block.samples]] = first + _refined(part.part(block.samples, block.ranks), load)
        first += block.ranks
        part, samples = part.part(block.others, part.ranks - block.ranks), samples[block.others]
        bound, block = lower_bound(part, rows=1)  # enough to find the next block
    rest = _refined(part, load)
    if not first:
        return rest
    plan[samples] = first + rest
    return _improved(problem, plan, load)


def _refined(problem: Problem, load: float) -> Ints:
    first = first_plan(problem, load)
    # without a limit on tokens, equal counts are always allowed
    plan = _improved(problem, first if first is not None and problem.allows(first) else zigzag(problem), load)
    few = problem.ranks > 2 and len(problem.cost) <= _FEW
    if few and problem.largest_load(plan) > _WORTH_EXCHANGES * load:
        plan = _best_of_beginnings(problem, plan, load)
    return plan


def _best_of_beginnings(problem: Problem, plan: Ints, load: float) -> Ints:
    """Return the best of a plan and the plans that longest first finds for costs raised by up to a quarter."""
    number, best = np.arange(1, 1 + len(problem.cost)), problem.largest_load(plan)
    for beginning in range(1, 1 + _BEGINNINGS):
        if best <= CLOSE_ENOUGH * load:
            break
        more = (number * beginning * _GOLDEN >> 7) % 256  # Knuth's hash scatters alike on every machine
        cost = problem.cost + (problem.cost >> 10) * more
        order = dearest_first(cost)
        other = np.empty_like(plan)
        other[order] = longest_first(replace(problem, cost=cost[order]))
        if problem.allows(other):
            other = _improved(problem, other, load)
            plan, best = min((plan, best), (other, problem.largest_load(other)), key=lambda found: found[1])
    return plan


def _improved(problem: Problem, plan: Ints, load: float) -> Ints:
    return _exchanged(problem, refine(problem, plan, CLOSE_ENOUGH * load), load)


def _exchanged(problem: Problem, plan: Ints, load: float) -> Ints:
    good, patience = _WORTH_EXCHANGES * load, _PATIENCE if len(plan) > _FEW else _PATIENCE_OF_FEW
    return exchange(problem, plan, good, patience) if problem.largest_load(plan) > good else plan


def _best_of_all_plans(problem: Problem) -> Ints | None:
    """Return the first of the best plans within the limits; None if there is none."""
    held, load = _of_all_plans(np.ones_like(problem.cost), problem.ranks), _of_all_plans(problem.cost, problem.ranks)
    allowed: Mask = np.logical_and.reduce((held >= problem.min_samples) & (held <= problem.max_samples))
    allowed &= np.count_nonzero(held == problem.max_samples, axis=0) <= problem.ranks_at_max
    if problem.tokens is not None:
        allowed &= (_of_all_plans(problem.tokens, problem.ranks) <= problem.max_tokens).all(axis=0)
    if not allowed.any():
        return None
    largest = load.max(axis=0).astype(np.float64)
    largest[~allowed] = np.inf
    return int(largest.argmin()) // problem.ranks ** np.arange(len(problem.cost)) % problem.ranks


def _of_all_plans(values: Ints, ranks: int) -> Ints:
    """Return each rank's sum in all plans, shape ``[ranks, plans]``; the index of a plan has a digit for each sample."""
    sums = np.zeros((ranks, 1), dtype=np.int64)
    for value in values.tolist():
        sums = np.concatenate([sums + value * (np.arange(ranks) == rank)[:, None] for rank in range(ranks)], axis=1)
    return sums


# -- plans with a limit on tokens


def _within_token_limit(problem: Problem, load: float, fallback: Ints | None) -> Ints | None:
    """Return a plan within the limit on tokens, by the first way that comes near the bound; None if no way finds one."""
    plan = search(replace(problem, tokens=None))[0]
    if plan is not None and problem.allows(plan):
        return plan
    ways: tuple[Callable[[], Ints | None], ...] = (
        lambda: None if plan is None else _brought_within(problem, plan),
        lambda: _by_tokens(problem),
        lambda: first_plan(problem, load),
        lambda: fallback,
    )
    best = None
    for way in ways:
        found = way()
        if found is None or not problem.allows(found):
            continue
        found = refine(problem, found, CLOSE_ENOUGH * load)
        best = found if best is None or problem.largest_load(found) < problem.largest_load(best) else best
        near = _WORTH_EXCHANGES if len(found) <= _FEW else _WORTH_ANOTHER_WAY
        if len(found) > _MANY or problem.largest_load(best) <= near * load:
            break
    return None if best is None else _exchanged(problem, best, load)


def _by_tokens(problem: Problem) -> Ints | None:
    assert problem.tokens is not None
    order = np.argsort(-problem.tokens, kind="stable")
    tokens = to_integers(problem.tokens[order].astype(np.float64), problem.ranks)
    plan = search(replace(problem, cost=tokens, tokens=None))[0]
    return None if plan is None else plan[np.argsort(order, kind="stable")]


def _brought_within(problem: Problem, plan: Ints) -> Ints | None:
    """Return a plan that swaps bring within the limit on tokens at the least load; None if they find none."""
    assert problem.tokens is not None
    load = problem.largest_load(plan)
    for slower in _SLOWER:
        if problem.allows(plan):
            return plan
        plan = _fewer_tokens(problem, plan, problem.tokens, load * slower, problem.max_tokens)
    return plan if problem.allows(plan) else None


def level_tokens(problem: Problem, plan: Ints, tokens: Ints) -> Ints:
    """Return a plan with more equal tokens (at least 1 each, shape ``[samples]``) whose slowest rank is no slower."""
    target = CLOSE_ENOUGH * int(tokens.sum()) / problem.ranks
    found = _fewer_tokens(problem, plan, tokens, problem.largest_load(plan), target)
    return found if problem.allows(found) else plan


def _fewer_tokens(problem: Problem, plan: Ints, tokens: Ints, load: float, target: float) -> Ints:
    """Return a plan whose ranks have about ``target`` tokens at most, and no load above ``load``."""
    # cost and tokens change roles
    order = dearest_first(tokens)
    swapped = replace(problem, cost=tokens[order], tokens=problem.cost[order], max_tokens=int(load))
    found = np.empty_like(plan)
    found[order] = refine(swapped, plan[order], target)
    return found
