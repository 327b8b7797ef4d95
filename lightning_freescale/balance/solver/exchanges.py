"""Lower the slowest rank's time by exchanging several groups at once, where no single swap does it."""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from lightning_freescale.balance.solver.problem import Ints, Mask, Problem

_KINDS = ((1, 1), (1, 0), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4), (2, 0), (3, 1), (1, 3), (4, 3), (3, 4))
"""How many groups one rank gives and takes."""
_CANDIDATES = {0: 0, 1: 1 << 20, 2: 64, 3: 16, 4: 10}
"""Groups of a rank, evenly spread, that so many are chosen from."""
_NEAREST = np.array([[0], [-1]]), np.array([[0], [-1], [1], [-2], [2], [-3], [3], [-4]])
"""Places around the best one to take from, where numbers alone are limited, and where something else forbids some."""
_PARTNERS, _OTHERS, _FILLED, _ROUNDS = 8, 32, 4, 800
_ROUNDS_WITHIN = 60
"""With groups of several samples, or a limit on tokens: what they leave room for, no bound knows."""

Range = tuple[float, float]


def exchange(problem: Problem, rank_of_group: Ints, target: float, patience: int) -> Ints:
    """Exchange groups of the slowest rank for others of a quick one, until no rank is above ``target``.

    Where no quick rank has what helps, the quickest is made quicker at the cost of others that stay below the target,
    ``patience`` times in a row at most. Ends after a fixed number of exchanges, or where neither can be done.
    """
    ranks = _Ranks(problem, rank_of_group)
    failed = 0
    for _ in range(_ROUNDS if problem.limits_counts_only else _ROUNDS_WITHIN):
        time = ranks.load * problem.slowness
        by_time = np.argsort(time, kind="stable").tolist()
        slow = by_time[-1]
        if time[slow] <= target or failed > patience:
            break
        # the quickest have most room, but perhaps only groups that are dearer still
        partners = by_time[: min(_PARTNERS, problem.ranks - 1)] + by_time[_PARTNERS : -1 : 1 + problem.ranks // _OTHERS]
        if any(ranks.relieve(slow, quick, target) for quick in partners):
            failed = 0
        elif any(
            ranks.fill(quick, other, target)
            for place, quick in enumerate(by_time[:_FILLED])  # the quickest may hold a single group
            for other in by_time[place + 1 : place + _PARTNERS]
            if time[other] < target
        ):
            failed += 1
        else:
            break
    return ranks.plan()


class _Ranks:
    """The groups of every rank, the most expensive first, what they cost, and what was found of a rank since it changed."""

    def __init__(self, problem: Problem, rank_of_group: Ints) -> None:
        self._problem = problem
        self.load = np.bincount(rank_of_group, problem.cost, problem.ranks).astype(np.int64)
        by_rank = np.argsort(rank_of_group, kind="stable")
        self._groups = np.split(by_rank, np.bincount(rank_of_group, minlength=problem.ranks).cumsum()[:-1])
        self._limits = list[_Limit]()
        if (problem.size > 1).any():
            self._limits.append(_Limit(problem.size, rank_of_group, problem.min_samples, problem.max_samples, problem.ranks))
        if problem.tokens is not None:
            self._limits.append(_Limit(problem.tokens, rank_of_group, 0, problem.max_tokens, problem.ranks))
        self._counts = len(self._limits) == (problem.tokens is not None)
        self._sums: list[dict[int, _Ways]] = [{} for _ in range(problem.ranks)]
        self._kinds = list(_KINDS)
        self._changes = [0] * problem.ranks
        self._in_vain = set[tuple[int, int, int, int]]()

    def plan(self) -> Ints:
        rank_of_group = np.empty(len(self._problem.cost), dtype=np.int64)
        for rank, groups in enumerate(self._groups):
            rank_of_group[groups] = rank
        return rank_of_group

    def relieve(self, slow: int, quick: int, target: float) -> bool:
        """Have the later of two ranks be done sooner by the best exchange; return whether there is one."""
        pair = slow, quick, self._changes[slow], self._changes[quick]
        if pair in self._in_vain:
            return False
        pace, other = (int(self._problem.slowness[rank]) for rank in (slow, quick))
        ours, theirs = int(self.load[slow]), int(self.load[quick])
        wanted = (ours * pace - theirs * other) / (pace + other)
        enough = ours - target / pace, target / other - theirs
        done = self._exchange(slow, quick, wanted, (1, (ours * pace - 1) // other - theirs), enough)
        if not done:
            self._in_vain.add(pair)
        return done

    def fill(self, quickest: int, other: int, target: float) -> bool:
        """Have ``other`` take as much as it can below the target, so that the quickest has more room."""
        room = target / int(self._problem.slowness[other]) - int(self.load[other])
        return self._exchange(quickest, other, room, (1, room), (0.9 * room, room))

    def _exchange(self, giver: int, taker: int, wanted: float, allowed: Range, enough: Range) -> bool:
        """Make the exchange that moves a cost nearest to ``wanted``, if there is one in the range that is ``allowed``."""
        found, moved = None, 0
        mine, others = self._groups[giver], self._groups[taker]
        for kind in self._kinds:
            many, back = kind
            if many > len(mine) or back > len(others) or not self._keeps_limits(len(mine), len(others), many - back):
                continue
            give, take = self._sums_of(giver, many), self._sums_of(taker, back)
            place = take.cost.searchsorted(give.cost - math.floor(wanted))
            near = place + _NEAREST[bool(self._limits)]
            np.maximum(near, 0, out=near)
            np.minimum(near, len(take.cost) - 1, out=near)
            more = give.cost - take.cost[near]
            off = np.abs(more - wanted)
            off[(more < allowed[0]) | (more > allowed[1])] = np.inf
            for limit, ours, theirs in zip(self._limits, give.amounts, take.amounts):
                off[limit.is_left(giver, taker, ours - theirs[near])] = np.inf
            best = int(off.argmin())
            if off.flat[best] < (np.inf if found is None else abs(moved - wanted)):
                found, moved = (give.chosen(best % len(give.cost)), take.chosen(near.flat[best])), int(more.flat[best])
            if found is not None and enough[0] <= moved <= enough[1]:  # other ranks may well do with the same kind
                self._kinds = [kind, *(other for other in self._kinds if other != kind)]
                break
        if found is None:
            return False
        gone, come = mine[found[0]], others[found[1]]
        self._groups[giver], self._groups[taker] = _without(mine, found[0], come), _without(others, found[1], gone)
        for limit in self._limits:
            limit.move(giver, taker, gone, come)
        self.load[giver] -= moved
        self.load[taker] += moved
        for rank in (giver, taker):
            self._sums[rank].clear()
            self._changes[rank] += 1
        return True

    def _sums_of(self, rank: int, many: int) -> _Ways:
        """Return the ways to choose so many groups of a rank, by what they cost."""
        if many not in self._sums[rank]:
            groups = self._groups[rank]
            places = _choices(len(groups), many)
            sums = _summed(self._problem.cost[groups], places)
            order = sums.argsort(kind="stable")
            amounts = [_summed(limit.values[groups], places)[order] for limit in self._limits]
            self._sums[rank][many] = _Ways(sums[order], places, order, amounts)
        return self._sums[rank][many]

    def _keeps_limits(self, giver: int, taker: int, less: int) -> bool:
        if not self._counts:  # of groups, which may have several samples each
            return True
        least, most = self._problem.min_samples, self._problem.max_samples
        return least <= giver - less <= most and least <= taker + less <= most


class _Ways(NamedTuple):
    """Ways to choose some groups of a rank, by their cost.

    Attributes:
        cost: shape ``[ways]``, in order.
        places: of the groups among those of the rank, shape ``[many, ways]``.
        order: which of ``places`` each way is, shape ``[ways]``.
        amounts: of what else is limited, shape ``[ways]`` each.
    """

    cost: Ints
    places: Ints
    order: Ints
    amounts: list[Ints]

    def chosen(self, way: int) -> Ints:
        """Return the places of a way's groups."""
        return self.places[:, self.order[way]]


class _Limit:
    """Samples of groups, or tokens, that each rank holds, and how many it may."""

    def __init__(self, values: Ints, rank_of_group: Ints, least: int, most: int | Ints, ranks: int) -> None:
        self.values, self._least, self._most = values, least, np.broadcast_to(most, ranks)
        self._held = np.bincount(rank_of_group, values, ranks).astype(np.int64)

    def is_left(self, giver: int, taker: int, more: Ints) -> Mask:
        """Return which of these exchanges would leave the limit: ``more`` is what each moves."""
        low, high = self._held[giver] - more, self._held[taker] + more
        return (np.minimum(low, high) < self._least) | (low > self._most[giver]) | (high > self._most[taker])

    def move(self, giver: int, taker: int, gone: Ints, come: Ints) -> None:
        """Take note of an exchange of groups."""
        more = int(self.values[gone].sum() - self.values[come].sum())
        self._held[giver] -= more
        self._held[taker] += more


def _summed(values: Ints, places: Ints) -> Ints:
    """Return the sum of ``values`` at each column of places."""
    sums = np.zeros(places.shape[1], dtype=np.int64)
    for row in places:
        sums += values[row]
    return sums


def _without(groups: Ints, places: Ints, more: Ints) -> Ints:
    """Return the groups, in order, without those at some places, and with more."""
    kept = np.ones(len(groups), dtype=bool)
    kept[places] = False
    changed = np.concatenate([groups[kept], more])
    changed.sort()
    return changed


@cache
def _choices(of: int, many: int) -> Ints:
    """Return ways to choose so many places, shape ``[many, ways]``."""
    places = np.linspace(0, of - 1, min(of, _CANDIDATES[many])).astype(np.int64)
    ways = np.array(list(combinations(range(len(places)), many)), dtype=np.int64)
    return np.ascontiguousarray(places[ways].T)
