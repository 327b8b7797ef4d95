"""Units so dear that at equal counts it matters who shares their rank."""

from __future__ import annotations

import numpy as np

from lightning_freescale.balance.solver.bounds import lower_bound
from lightning_freescale.balance.solver.problem import Ints, Problem

_MOST, _PICKY = 24, 4
"""How many ranks are filled beforehand at most; a unit is picky if its company lies in the cheapest quarter."""


def demanding(problem: Problem) -> list[Ints]:
    """Whole ranks, one for each of the dearest units that would be over the bound with average company; from the dearest on.

    Each gets the dearest run of the cheap units with which it keeps to the bound. Longest first alone would fill those ranks
    with what happens to be left, and leave it to many exchanges to find the cheapest units.
    """
    bound, company = lower_bound(problem), problem.least - 1
    if not company or np.ptp(problem.slowness) or bound <= problem.spread:
        return []
    left, groups = problem.order[::-1], list[Ints]()  # cheapest first
    fuller = problem.spare or 0 if problem.least < problem.most else 1  # ranks that must be left for the other units
    while len(groups) < min(_MOST, problem.ranks - fuller):
        cost = problem.cost[left]
        total = np.concatenate([[0], np.cumsum(cost[:-1])])
        runs = total[company:] - total[:-company]
        first = max(0, int(np.searchsorted(runs, int(bound) - int(cost[-1]), side="right")) - 1)
        if first > len(runs) // _PICKY:
            break
        chosen = np.append(np.arange(first, first + company), len(left) - 1)
        groups.append(left[chosen])
        left = np.delete(left, chosen)
    return groups
