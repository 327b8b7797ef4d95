"""The search from the first plan to one that is as good as the bound allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lightning_freescale.balance.solver.all_plans import are_few, best_plan
from lightning_freescale.balance.solver.bounds import Bound, lower_bound
from lightning_freescale.balance.solver.exchanges import exchange
from lightning_freescale.balance.solver.lpt import first_plan, longest_first, zigzag
from lightning_freescale.balance.solver.problem import Ints, Problem, dearest_first, to_integers
from lightning_freescale.balance.solver.swaps import refine
from lightning_freescale.balance.solver.token_limit import brought_within, dearest_to_fastest, fewer_tokens

CLOSE_ENOUGH = 1.0003
"""Swaps stop within this factor of the lower bound."""
_WORTH_EXCHANGES, _WORTH_ANOTHER_WAY = 1.0008, 1.01
"""What is further above the bound than this goes on to exchanges; of many groups within a limit, to another first plan.
Exchanges stop here, too: one rank at a time, they take more of the host the nearer they come than a step could gain."""
_BLOCKS, _TIGHT = 8, 0.98
"""How many blocks are planned by themselves, as long as their bound is nearly that of the whole."""
_BEGINNINGS, _FEW, _MANY = 4, 256, 4096
"""How often the search begins anew, at most, where it falls short with no more groups than the second; with more than the third
another first plan within a limit on tokens takes too long."""
_PATIENCE, _PATIENCE_OF_FEW = 30, 8
"""Of exchanges. Few groups begin anew instead, which finds as much in a third of the time."""
_GOLDEN = 2654435761


def search(problem: Problem, fallback: Ints | None = None) -> tuple[Ints | None, float]:
    """Return the rank of every group, None if no plan within the limits was found, and the time that no plan can beat.

    Args:
        problem: what to plan.
        fallback: the rank of every group in a plan to start from where none is found, shape ``[groups]``.

    Returns:
        the plan, and the time of ``problem.exact`` that none can beat.
    """
    bound = lower_bound(problem)
    # the search goes by speeds in whole numbers, what is said of its plan by those that were given
    exact = problem.exact
    least = bound.time if exact is problem else lower_bound(exact).time
    plan = _planned(problem, bound, bound.time) if problem.tokens is None else _within_token_limit(problem, bound, fallback)
    if plan is not None and _time(problem, plan) <= CLOSE_ENOUGH * bound.time:
        return plan, least
    if are_few(problem):
        plan = best_plan(exact)
        if plan is None or problem.tokens is not None:  # the bound is of the counts alone
            return plan, least
        return plan, float(exact.times(plan).max())
    if plan is None:
        return None, least
    plain = zigzag(problem)
    return plain if problem.allows(plain) and _time(problem, plain) < _time(problem, plan) else plan, least


def _within_token_limit(problem: Problem, bound: Bound, fallback: Ints | None) -> Ints | None:
    """Return a plan within the limit on tokens: the one without it, brought within, or what the first other way finds.

    Of few groups, the best of all ways.
    """
    plan = search(replace(problem, tokens=None))[0]
    if plan is not None and problem.allows(plan):
        return plan
    ways: tuple[Callable[[], Ints | None], ...] = (
        lambda: None if plan is None else brought_within(problem, plan),
        lambda: _by_tokens(problem),
        lambda: first_plan(problem, bound.time),
        lambda: fallback,
    )
    best = None
    for way in ways:
        found = way()
        if found is None or not problem.allows(found):
            continue
        found = _swapped(problem, found, bound.time)
        best = found if best is None or _time(problem, found) < _time(problem, best) else best
        near = _WORTH_EXCHANGES if len(found) <= _FEW else _WORTH_ANOTHER_WAY
        if len(found) > _MANY or _time(problem, best) <= near * bound.time:
            break
    return None if best is None else _exchanged(problem, best, bound.time)


def _by_tokens(problem: Problem) -> Ints | None:
    """Return a plan that balances the tokens, which is the best that can be done for their limit."""
    assert problem.tokens is not None
    same_speed, order = np.ones_like(problem.slowness), np.argsort(-problem.tokens, kind="stable")
    tokens = to_integers(problem.tokens[order].astype(np.float64), same_speed)
    plan = search(replace(problem, cost=tokens, size=problem.size[order], tokens=None, slowness=same_speed, unrounded=None))[0]
    return None if plan is None else plan[np.argsort(order, kind="stable")]


def _planned(problem: Problem, bound: Bound, time: float) -> Ints | None:
    """Return a plan whose slowest rank should be done at ``time``, which is no less than the bound's."""
    simple = problem.limits_counts_only and not np.ptp(problem.slowness)
    plan, part, groups, first = np.empty(len(problem.cost), dtype=np.int64), problem, np.arange(len(problem.cost)), 0
    for _ in range(_BLOCKS):
        block, tight = bound.block, bound.time > max(_TIGHT * time, CLOSE_ENOUGH * part.ideal_time)
        if block is None or not simple or not tight:
            break
        found = _refined(part.part(block.groups, block.ranks), time)
        if found is None:
            return None
        plan[groups[block.groups]] = first + found
        first += block.ranks
        part, groups = part.part(block.others, part.ranks - block.ranks), groups[block.others]
        bound = lower_bound(part, rows=1)  # in a block no other one matters
    rest = _refined(part, time)
    if rest is None or not first:
        return rest
    plan[groups] = first + rest
    return _improved(problem, plan, time)


def _refined(problem: Problem, time: float) -> Ints | None:
    plans = (make() for make in (lambda: first_plan(problem, time), lambda: zigzag(problem)))
    first = next((plan for plan in plans if plan is not None and problem.allows(plan)), None)
    if first is None:
        return None
    plan = _improved(problem, first, time)
    few = problem.limits_counts_only and problem.ranks > 2 and len(problem.cost) <= _FEW
    if few and _time(problem, plan) > _WORTH_EXCHANGES * time:
        plan = _best_of_beginnings(problem, plan, time)
    return plan


def _best_of_beginnings(problem: Problem, plan: Ints, time: float) -> Ints:
    """Return the best of a plan and those that longest first leads to when costs are as if they were up to a quarter higher."""
    number, best = np.arange(1, 1 + len(problem.cost)), _time(problem, plan)
    for beginning in range(1, 1 + _BEGINNINGS):
        if best <= CLOSE_ENOUGH * time:
            break
        more = (number * beginning * _GOLDEN >> 7) % 256  # Knuth's hash: scattered, and the same everywhere
        cost = problem.cost + (problem.cost >> 10) * more
        order = dearest_first(cost)
        other = np.empty_like(plan)
        other[order] = longest_first(replace(problem, cost=cost[order]))
        if problem.allows(other):
            other = _improved(problem, other, time)
            plan, best = min((plan, best), (other, _time(problem, other)), key=lambda found: found[1])
    return plan


def _improved(problem: Problem, plan: Ints, time: float) -> Ints:
    return _exchanged(problem, _swapped(problem, plan, time), time)


def _swapped(problem: Problem, plan: Ints, time: float) -> Ints:
    if not problem.limits_counts_only:
        plan = dearest_to_fastest(problem, plan)
    return refine(problem, plan, CLOSE_ENOUGH * time)


def _exchanged(problem: Problem, plan: Ints, time: float) -> Ints:
    good, patience = _WORTH_EXCHANGES * time, _PATIENCE if len(plan) > _FEW else _PATIENCE_OF_FEW
    return exchange(problem, plan, good, patience) if _time(problem, plan) > good else plan


def level_tokens(problem: Problem, plan: Ints, tokens: Ints) -> Ints:
    """Return a plan in which the rank with most tokens has fewer, and the slowest is no slower.

    Args:
        problem: what was planned.
        plan: the rank of every group.
        tokens: at least 1, shape ``[groups]``.
    """
    if np.ptp(problem.slowness):  # a limit on the costs would not be one on the times
        return plan
    found = fewer_tokens(problem, plan, tokens, _time(problem, plan), CLOSE_ENOUGH * int(tokens.sum()) / problem.ranks)
    return found if problem.allows(found) else plan


def _time(problem: Problem, plan: Ints) -> int:
    return int(problem.times(plan).max())
