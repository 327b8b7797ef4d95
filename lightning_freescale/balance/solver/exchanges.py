"""Lower the slowest rank's time by exchanging several groups at once, where no single swap does it."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np

from lightning_freescale.balance.solver.problem import Ints, Problem

_KINDS = ((1, 1), (1, 0), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4))
"""How many groups one rank gives and takes."""
_CANDIDATES = {0: 0, 1: 1 << 20, 2: 64, 3: 16, 4: 10}
"""Groups of a rank, evenly spread, that so many are chosen from."""
_PARTNERS, _OTHERS, _ROUNDS, _PATIENCE = 8, 32, 400, 8

Range = tuple[float, float]


def exchange(problem: Problem, rank_of_group: Ints, target: float) -> Ints:
    """Exchange groups of the slowest rank for others of a quick one, until no rank is above ``target``.

    For single samples without a limit on tokens. Where no quick rank has what helps, the quickest is made quicker at the
    cost of others that stay below the target. Ends after a fixed number of exchanges, or where neither can be done.
    """
    ranks = _Ranks(problem, rank_of_group)
    failed = 0
    for _ in range(_ROUNDS):
        time = ranks.load * problem.slowness
        by_time = np.argsort(time, kind="stable").tolist()
        slow = by_time[-1]
        if time[slow] <= target or failed > _PATIENCE:
            break
        # the quickest have most room, but perhaps only groups that are dearer still
        partners = by_time[: min(_PARTNERS, problem.ranks - 1)] + by_time[_PARTNERS : -1 : 1 + problem.ranks // _OTHERS]
        if any(ranks.relieve(slow, quick, target) for quick in partners):
            failed = 0
        elif any(ranks.fill(by_time[0], other, target) for other in by_time[1:_PARTNERS] if time[other] < target):
            failed += 1
        else:
            break
    return ranks.plan()


class _Ranks:
    """The groups of every rank, the most expensive first, and what they cost."""

    def __init__(self, problem: Problem, rank_of_group: Ints) -> None:
        self._problem = problem
        self.load = np.bincount(rank_of_group, problem.cost, problem.ranks).astype(np.int64)
        by_rank = np.argsort(rank_of_group, kind="stable")
        self._groups = np.split(by_rank, np.bincount(rank_of_group, minlength=problem.ranks).cumsum()[:-1])

    def plan(self) -> Ints:
        rank_of_group = np.empty(len(self._problem.cost), dtype=np.int64)
        for rank, groups in enumerate(self._groups):
            rank_of_group[groups] = rank
        return rank_of_group

    def relieve(self, slow: int, quick: int, target: float) -> bool:
        """Have the later of two ranks be done sooner by the best exchange; return whether there is one."""
        pace, other = (int(self._problem.slowness[rank]) for rank in (slow, quick))
        ours, theirs = int(self.load[slow]), int(self.load[quick])
        wanted = (ours * pace - theirs * other) / (pace + other)
        enough = ours - target / pace, target / other - theirs
        return self._exchange(slow, quick, wanted, (1, (ours * pace - 1) // other - theirs), enough)

    def fill(self, quickest: int, other: int, target: float) -> bool:
        """Have ``other`` take as much as it can below the target, so that the quickest has more room."""
        room = target / int(self._problem.slowness[other]) - int(self.load[other])
        return self._exchange(quickest, other, room, (1, room), (0.9 * room, room))

    def _exchange(self, giver: int, taker: int, wanted: float, allowed: Range, enough: Range) -> bool:
        """Make the exchange that moves a cost nearest to ``wanted``, if there is one in the range that is ``allowed``."""
        cost, found, moved = self._problem.cost, None, 0
        mine, others = self._groups[giver], self._groups[taker]
        for many, back in _KINDS:
            if many > len(mine) or back > len(others) or not self._keeps_limits(len(mine), len(others), many - back):
                continue
            give, take = _choices(len(mine), many), _choices(len(others), back)
            given, taken = cost[mine[give]].sum(axis=1), cost[others[take]].sum(axis=1)
            order = np.argsort(taken, kind="stable")
            place = np.searchsorted(taken[order], given - wanted)
            for near in (np.minimum(place, len(order) - 1), np.maximum(place - 1, 0)):
                more = given - taken[order[near]]
                best = int(np.where((more >= allowed[0]) & (more <= allowed[1]), np.abs(more - wanted), np.inf).argmin())
                within = allowed[0] <= more[best] <= allowed[1]
                if within and (found is None or abs(more[best] - wanted) < abs(moved - wanted)):
                    found, moved = (give[best], take[order[near[best]]]), int(more[best])
            if found is not None and enough[0] <= moved <= enough[1]:
                break
        if found is None:
            return False
        gone, come = mine[found[0]], others[found[1]]
        self._groups[giver] = np.sort(np.concatenate([np.delete(mine, found[0]), come]))
        self._groups[taker] = np.sort(np.concatenate([np.delete(others, found[1]), gone]))
        self.load[giver] -= moved
        self.load[taker] += moved
        return True

    def _keeps_limits(self, giver: int, taker: int, less: int) -> bool:
        least, most = self._problem.min_samples, self._problem.max_samples
        return least <= giver - less <= most and least <= taker + less <= most


@cache
def _choices(of: int, many: int) -> Ints:
    """Return ways to choose so many places, shape ``[ways, many]``."""
    places = np.linspace(0, of - 1, min(of, _CANDIDATES[many])).astype(np.int64)
    return places[np.array(list(combinations(range(len(places)), many)), dtype=np.int64)]
