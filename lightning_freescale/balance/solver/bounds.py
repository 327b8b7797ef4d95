"""What no assignment can beat."""

from __future__ import annotations

from lightning_freescale.balance.solver.problem import Problem


def lower_bound(problem: Problem) -> float:
    """Time below which no assignment's slowest rank can be.

    The largest of: the work spread perfectly; the largest unit with the least company that its rank must hold; the two that
    must share a rank when there is one unit more than ranks, with theirs. A limit on tokens is left out: it only raises times.
    """
    cost = problem.cost[problem.order[::-1]]
    ranks, fastest = problem.ranks, int(problem.slowness.min())
    least = max(1, problem.least, int(problem.size.sum()) - problem.most * (ranks - 1))
    company = least - 1 if bool((problem.size == 1).all()) else 0
    bounds = [problem.spread, fastest * int(cost[-1] + cost[:company].sum())]
    if len(cost) > ranks:
        pair = int(cost[-ranks] + cost[-ranks - 1] + cost[: max(0, company - 1)].sum())
        bounds.append(fastest * pair)
    return float(max(bounds))
