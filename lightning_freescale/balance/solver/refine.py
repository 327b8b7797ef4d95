"""Lower the slowest rank's time by swaps and moves between pairs of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.solver.compiled import compiled, worth_compiling
from lightning_freescale.balance.solver.problem import Ints, Problem
from lightning_freescale.balance.solver.swaps import best_exchange, best_exchange_loop

ROUNDS, PATIENCE = 200, 8
_SPARSE = 16
CANDIDATES = 64
"""Units of a rank that are tried, evenly spread from dearest to cheapest; ranks with more are balanced by their number."""


def refine(problem: Problem, rank_of_unit: Ints, target: float) -> Ints:
    """Pair the slowest ranks with the quickest, make the best exchange of each pair, and repeat.

    Stops when no rank is above ``target``, after ``PATIENCE`` rounds that could not help the slowest rank, or after
    ``ROUNDS``: never by a clock, so all ranks stop at the same plan. No exchange makes the slower of its two ranks slower.
    """
    slots = problem.ranks * int(np.bincount(rank_of_unit).max())
    sparse = slots > _SPARSE * len(rank_of_unit)  # only if giants leave all the rest to a few ranks
    if sparse or problem.times(rank_of_unit).max() <= target:
        return rank_of_unit
    board = _Board(problem, rank_of_unit)
    failed = 0
    for _ in range(ROUNDS):
        slow = int(np.count_nonzero(board.time > target))
        if not slow or failed == PATIENCE:
            break
        tried = 1 if failed else slow  # while the slowest finds no partner, the others' gains are none
        failed = 0 if board.exchange(*_pairs(np.argsort(-board.time, kind="stable"), tried, failed)) else failed + 1
    return board.rank_of_unit()


def _pairs(by_time: Ints, slow: int, shift: int) -> tuple[Ints, Ints]:
    """The slowest ranks, and for each one of the others, quickest first; ``shift`` gives them other partners."""
    pairs = min(slow, len(by_time) // 2)
    others = len(by_time) - pairs
    return by_time[:pairs], by_time[pairs + (others - 1 - (np.arange(pairs) + shift) % others)]


class _Board:
    """The units of every rank in a table ``[ranks, slots]``; an empty slot holds -1 and costs nothing."""

    def __init__(self, problem: Problem, rank_of_unit: Ints) -> None:
        count = np.bincount(rank_of_unit, minlength=problem.ranks)
        slots = int(count.max()) + (problem.least < problem.most)  # an empty slot turns a swap into a move
        order = problem.order
        key = rank_of_unit[order].astype(np.min_scalar_type(problem.ranks))  # numpy sorts short integers in linear time
        by_rank = order[np.argsort(key, kind="stable")]
        slot = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
        self.unit = np.full((problem.ranks, slots), -1)
        self.unit[rank_of_unit[by_rank], slot] = by_rank
        self.columns = np.unique(np.linspace(0, slots - 1, min(slots, CANDIDATES)).astype(np.int64))
        self.compiled = worth_compiling(len(order))
        self.slowness, self.cost = problem.slowness, self._table(problem.cost)
        self.load: Ints = self.cost.sum(axis=1)
        self.limits = []
        if problem.least < problem.most or not problem.plain:
            self.limits.append(_Limit(self._table(problem.size), problem.least, problem.most))
        if problem.tokens is not None:
            self.limits.append(_Limit(self._table(problem.tokens), 0, problem.token_limit))

    @property
    def time(self) -> Ints:
        """Of every rank."""
        return self.load * self.slowness

    def exchange(self, slow: Ints, quick: Ints) -> bool:
        """Make the best exchange of every pair that has one; whether the first pair had."""
        best = self._best(slow, quick)
        found = best >= 0
        self._swap(slow[found], quick[found], best[found])
        return bool(found[0])

    def _best(self, slow: Ints, quick: Ints) -> Ints:
        columns, blocked = self.columns, np.zeros((0, 0, 0), dtype=bool)
        for limit in self.limits:
            tight = limit.tight(slow, quick)
            if len(tight) and not blocked.size:
                blocked = np.zeros((len(slow), len(columns), len(columns)), dtype=bool)
            if len(tight):
                blocked[tight] |= limit.blocked(slow[tight], quick[tight], columns)
        arguments = (
            self.cost[slow[:, None], columns],
            self.cost[quick[:, None], columns],
            self.load[slow],
            self.load[quick],
            self.slowness[slow],
            self.slowness[quick],
            blocked,
        )
        return compiled(best_exchange_loop)(*arguments) if self.compiled else best_exchange(*arguments)

    def rank_of_unit(self) -> Ints:
        """The plan as it stands."""
        filled = self.unit >= 0
        result = np.empty(int(filled.sum()), dtype=np.int64)
        result[self.unit[filled]] = np.nonzero(filled)[0]
        return result

    def _table(self, values: Ints) -> Ints:
        return np.where(self.unit >= 0, values[self.unit], 0)

    def _swap(self, slow: Ints, quick: Ints, best: Ints) -> None:
        give, take = (self.columns[place] for place in np.divmod(best, len(self.columns)))
        more = self.cost[slow, give] - self.cost[quick, take]
        self.load[slow] -= more
        self.load[quick] += more
        for limit in self.limits:
            limit.swap(slow, give, quick, take)
        for table in (self.unit, self.cost):
            table[slow, give], table[quick, take] = table[quick, take], table[slow, give]


class _Limit:
    """Samples or tokens that a rank may hold."""

    def __init__(self, table: Ints, least: int, most: int) -> None:
        self.table, self.least, self.most = table, least, most
        self.held: Ints = table.sum(axis=1)
        self._largest = int(table.max())

    def tight(self, slow: Ints, quick: Ints) -> Ints:
        """The pairs that a single exchange could take out of the limits."""
        low, high = self.least + self._largest, self.most - self._largest
        safe = (self.held >= low) & (self.held <= high)
        return np.flatnonzero(~(safe[slow] & safe[quick]))

    def blocked(self, slow: Ints, quick: Ints, columns: Ints) -> NDArray[np.bool_]:
        """Which exchanges would leave the limits, shape ``[pairs, candidates, candidates]``."""
        more = self.table[slow[:, None], columns][:, :, None] - self.table[quick[:, None], columns][:, None, :]
        after_slow, after_quick = self.held[slow][:, None, None] - more, self.held[quick][:, None, None] + more
        return (after_slow < self.least) | (after_slow > self.most) | (after_quick < self.least) | (after_quick > self.most)

    def swap(self, slow: Ints, give: Ints, quick: Ints, take: Ints) -> None:
        """Follow an exchange."""
        table = self.table
        more = table[slow, give] - table[quick, take]
        self.held[slow] -= more
        self.held[quick] += more
        table[slow, give], table[quick, take] = table[quick, take], table[slow, give]
