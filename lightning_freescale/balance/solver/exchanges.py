"""Exchanges of several samples at once, which lower the slowest rank's load where no single swap does."""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from lightning_freescale.balance.solver.bounds import Ints, Problem

_KINDS = ((1, 1), (1, 0), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4), (2, 0), (3, 1), (1, 3), (4, 3), (3, 4))
"""Numbers of samples that one rank gives and takes."""
_CANDIDATES = {0: 0, 1: 1 << 20, 2: 64, 3: 16, 4: 10}
"""Maximum number of candidates, evenly spread over a rank's samples, by the number of samples to choose."""
_NEAREST = np.array([[0], [-1]]), np.array([[0], [-1], [1], [-2], [2], [-3], [3], [-4]])
"""Offsets around the best candidate that are tried, without and with a limit on tokens."""
_PARTNERS, _OTHERS, _FILLED, _ROUNDS = 8, 32, 4, 800
_ROUNDS_WITHIN = 60
"""Maximum number of rounds with a limit on tokens, which the lower bound ignores."""

Range = tuple[float, float]


def exchange(problem: Problem, rank_of_sample: Ints, target: float, patience: int) -> Ints:
    """Exchange samples between the slowest rank and a quick one until no rank is above ``target``.

    If no quick rank has samples that help, ranks below the target take samples of the quickest rank, at most ``patience``
    times in a row. The search ends after a fixed number of exchanges, or if no exchange is possible.
    """
    ranks = _Ranks(problem, rank_of_sample)
    failed = 0
    for _ in range(_ROUNDS if problem.tokens is None else _ROUNDS_WITHIN):
        by_load = np.argsort(ranks.load, kind="stable").tolist()
        slow = by_load[-1]
        if ranks.load[slow] <= target or failed > patience:
            break
        # the quickest rank can take most, but all its samples may be too expensive to give back
        partners = by_load[: min(_PARTNERS, problem.ranks - 1)] + by_load[_PARTNERS : -1 : 1 + problem.ranks // _OTHERS]
        if any(ranks.relieve(slow, quick, target) for quick in partners):
            failed = 0
        elif any(
            ranks.fill(quick, other, target)
            for place, quick in enumerate(by_load[:_FILLED])  # several, because the quickest may hold a single sample
            for other in by_load[place + 1 : place + _PARTNERS]
            if ranks.load[other] < target
        ):
            failed += 1
        else:
            break
    return ranks.plan()


class _Ranks:
    """The samples and loads of all ranks, with cached sums of each rank's samples until the rank changes."""

    def __init__(self, problem: Problem, rank_of_sample: Ints) -> None:
        self._problem = problem
        self.load = problem.loads(rank_of_sample)
        by_rank = np.argsort(rank_of_sample, kind="stable")
        self._samples = np.split(by_rank, np.bincount(rank_of_sample, minlength=problem.ranks).cumsum()[:-1])
        self._held: Ints | None = None  # tokens of each rank, if they are limited
        if problem.tokens is not None:
            self._held = np.bincount(rank_of_sample, problem.tokens, problem.ranks).astype(np.int64)
        self._sums: list[dict[int, _Ways]] = [{} for _ in range(problem.ranks)]
        self._kinds = list(_KINDS)
        self._changes = [0] * problem.ranks
        self._in_vain = set[tuple[int, int, int, int]]()

    def plan(self) -> Ints:
        rank_of_sample = np.empty(len(self._problem.cost), dtype=np.int64)
        for rank, samples in enumerate(self._samples):
            rank_of_sample[samples] = rank
        return rank_of_sample

    def relieve(self, slow: int, quick: int, target: float) -> bool:
        """Lower the larger of two loads by the best exchange; return False if there is none."""
        pair = slow, quick, self._changes[slow], self._changes[quick]
        if pair in self._in_vain:
            return False
        ours, theirs = int(self.load[slow]), int(self.load[quick])
        done = self._exchange(slow, quick, (ours - theirs) / 2, (1, ours - theirs - 1), (ours - target, target - theirs))
        if not done:
            self._in_vain.add(pair)
        return done

    def fill(self, quickest: int, other: int, target: float) -> bool:
        """Move samples to ``other``, up to the target, so that the quickest rank can take more."""
        free = target - int(self.load[other])
        return self._exchange(quickest, other, free, (1, free), (0.9 * free, free))

    def _exchange(self, giver: int, taker: int, wanted: float, allowed: Range, enough: Range) -> bool:
        """Move a cost in the range ``allowed``, as near to ``wanted`` as possible; stop searching in the range ``enough``."""
        found, moved = None, 0
        mine, others = self._samples[giver], self._samples[taker]
        for kind in self._kinds:
            many, back = kind
            if many > len(mine) or back > len(others) or not self._keeps_counts(len(mine), len(others), many - back):
                continue
            give, take = self._sums_of(giver, many), self._sums_of(taker, back)
            place = take.cost.searchsorted(give.cost - math.floor(wanted))
            near = place + _NEAREST[self._held is not None]
            np.maximum(near, 0, out=near)
            np.minimum(near, len(take.cost) - 1, out=near)
            more = give.cost - take.cost[near]
            off = np.abs(more - wanted)
            off[(more < allowed[0]) | (more > allowed[1])] = np.inf
            if self._held is not None and give.tokens is not None and take.tokens is not None:
                tokens = give.tokens - take.tokens[near]
                exceeds = np.maximum(self._held[giver] - tokens, self._held[taker] + tokens) > self._problem.max_tokens
                off[exceeds] = np.inf
            best = int(off.argmin())
            if off.flat[best] < (np.inf if found is None else abs(moved - wanted)):
                found, moved = (give.chosen(best % len(give.cost)), take.chosen(near.flat[best])), int(more.flat[best])
            if found is not None and enough[0] <= moved <= enough[1]:  # try this kind first for other ranks too
                self._kinds = [kind, *(other for other in self._kinds if other != kind)]
                break
        if found is None:
            return False
        given, taken = mine[found[0]], others[found[1]]
        self._samples[giver], self._samples[taker] = _without(mine, found[0], taken), _without(others, found[1], given)
        self.load[giver] -= moved
        self.load[taker] += moved
        if self._held is not None and self._problem.tokens is not None:
            tokens_moved = int(self._problem.tokens[given].sum() - self._problem.tokens[taken].sum())
            self._held[giver] -= tokens_moved
            self._held[taker] += tokens_moved
        for rank in (giver, taker):
            self._sums[rank].clear()
            self._changes[rank] += 1
        return True

    def _sums_of(self, rank: int, many: int) -> _Ways:
        if many not in self._sums[rank]:
            samples, tokens = self._samples[rank], self._problem.tokens
            places = _choices(len(samples), many)
            sums = _summed(self._problem.cost[samples], places)
            order = sums.argsort(kind="stable")
            tokens_of = None if tokens is None else _summed(tokens[samples], places)[order]
            self._sums[rank][many] = _Ways(sums[order], places, order, tokens_of)
        return self._sums[rank][many]

    def _keeps_counts(self, giver: int, taker: int, less: int) -> bool:
        least, most = self._problem.min_samples, self._problem.max_samples
        return least <= giver - less <= most and least <= taker + less <= most


class _Ways(NamedTuple):
    """Ways to choose some samples of a rank."""

    cost: Ints  # summed cost, sorted, shape [ways]
    places: Ints  # positions among the samples of the rank, shape [many, ways]
    order: Ints  # column of ``places`` for each way, shape [ways]
    tokens: Ints | None  # summed tokens, shape [ways]

    def chosen(self, way: int) -> Ints:
        return self.places[:, self.order[way]]


def _summed(values: Ints, places: Ints) -> Ints:
    sums = np.zeros(places.shape[1], dtype=np.int64)
    for row in places:
        sums += values[row]
    return sums


def _without(samples: Ints, places: Ints, more: Ints) -> Ints:
    """Return the sorted samples without those at some places, and with some more."""
    kept = np.ones(len(samples), dtype=bool)
    kept[places] = False
    changed = np.concatenate([samples[kept], more])
    changed.sort()
    return changed


@cache
def _choices(of: int, many: int) -> Ints:
    """Return ways to choose ``many`` of the places, shape ``[many, ways]``."""
    places = np.linspace(0, of - 1, min(of, _CANDIDATES[many])).astype(np.int64)
    ways = np.array(list(combinations(range(len(places)), many)), dtype=np.int64)
    return np.ascontiguousarray(places[ways].T)
