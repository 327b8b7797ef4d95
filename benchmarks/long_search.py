"""A long search for a better assignment, to estimate the distance of a plan from the best one."""

from __future__ import annotations

import time
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

_PROPOSALS = 200_000  # between two checks of the clock, well below 0.1 s
_HOTTEST, _COOLING, _COLDEST = 1000, 0.8, 1e-5
"""The temperature starts hot, as a multiple of the square of what the best exceeds the level by, and falls by that factor."""


def search(
    costs: NDArray[np.float64], plan: NDArray[np.int64], ranks: int, limits: tuple[int, int], bound: float, seconds: float
) -> float:
    """Return the smallest imbalance found from ``plan``.

    The search sets a level between the lower bound and the best imbalance so far. Simulated annealing (Kirkpatrick et al. 1983)
    over moves, swaps and rotations among three ranks lowers the summed squares of the loads' excess over the level. If no load
    exceeds the level, the search sets a lower one. If annealing fails, it restarts from the best plan with another seed and a
    higher level.

    Args:
        costs: shape ``[samples]``.
        plan: the first plan, shape ``[samples]``.
        ranks: number of ranks that share the samples.
        limits: least and most samples that a rank may hold.
        bound: lower bound of the imbalance, at which the search stops.
        seconds: duration of the search.
    """
    cost = costs * ranks / costs.sum()  # a load is an imbalance
    best, reached = _table(plan, ranks, limits[1]), float(np.bincount(plan, cost, ranks).max())
    _anneal(cost, *(part.copy() for part in best), np.zeros(ranks), limits[0], 0.0, 1.0, 0, 0)  # compiled before time counts
    end, share, seed = time.perf_counter() + seconds, 0.5, 0
    while time.perf_counter() < end and reached > bound * 1.00001:
        level, seed, found = bound + share * (reached - bound), seed + 1, False
        members, held = (part.copy() for part in best)
        load = np.array([cost[row[:many]].sum() for row, many in zip(members, held)])
        heat = hottest = _HOTTEST * (reached - level) ** 2
        while heat > hottest * _COLDEST and not found and time.perf_counter() < end:
            found = _anneal(cost, members, held, load, limits[0], level, heat, seed, _PROPOSALS)
            heat, seed = heat * _COOLING, seed + 1
        if found:
            best, reached = (members, held), max(float(cost[row[:many]].sum()) for row, many in zip(members, held))
        share = 0.5 if found else min(0.98, 1 - (1 - share) / 1.5)
    return reached


def _table(plan: NDArray[np.int64], ranks: int, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples of each rank, shape ``[ranks, slots]``, and their numbers."""
    held = np.bincount(plan, minlength=ranks)
    members = np.full((ranks, min(most, 2 * int(held.max()))), -1)
    for rank in range(ranks):
        members[rank, : held[rank]] = np.flatnonzero(plan == rank)
    return members, held


@numba.njit(cache=True)
def _anneal(
    cost: Any, members: Any, held: Any, load: Any, least: int, level: float, heat: float, seed: int, proposals: int
) -> bool:
    """Change ``members``, ``held`` and ``load`` in place; return True if no load exceeds ``level``."""
    np.random.seed(seed)
    ranks = len(load)
    for _ in range(proposals):
        a, b, c = _slow(load, level), np.random.randint(ranks), np.random.randint(ranks)
        if a in (b, c) or (b == c and ranks > 2):
            continue
        three = ranks > 2 and np.random.random() < 0.3
        i, j, k = np.random.randint(held[a]), np.random.randint(held[b]), np.random.randint(held[c])
        move = not three and held[a] > least and held[b] < members.shape[1] and np.random.random() < 0.3
        give, take = cost[members[a, i]], 0.0 if move else cost[members[b, j]]
        back = cost[members[c, k]] if three else take
        after = load[a] - give + back, load[b] + give - take, load[c] + take - back
        change = _over(after[0], level) - _over(load[a], level) + _over(after[1], level) - _over(load[b], level)
        if three:
            change += _over(after[2], level) - _over(load[c], level)
        if change > 0 and np.random.random() >= np.exp(-change / heat):
            continue
        load[a], load[b] = after[0], after[1]
        if three:
            load[c] = after[2]
            members[a, i], members[b, j], members[c, k] = members[c, k], members[a, i], members[b, j]
        elif move:
            members[b, held[b]], members[a, i] = members[a, i], members[a, held[a] - 1]
            held[a], held[b] = held[a] - 1, held[b] + 1
        else:
            members[a, i], members[b, j] = members[b, j], members[a, i]
        if change < 0 and load.max() <= level:
            return True
    return False


@numba.njit(cache=True)
def _slow(load: Any, level: float) -> int:
    """Return a rank, preferably one that exceeds the level."""
    rank = np.random.randint(len(load))
    for _ in range(16):
        if load[rank] > level:
            break
        rank = np.random.randint(len(load))
    return rank


@numba.njit(cache=True)
def _over(load: float, level: float) -> float:
    return max(0.0, load - level) ** 2
