"""Choose samples of a given total cost, the ones that have waited longest first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHANCES = 4
"""Batches, within the age bound, with which a giant may leave."""
_PRICE_OF_DEVIATION = 30.0
"""To miss the target by 1 % is as bad as to have waited, on average, 0.3 of the age bound less."""
_DEAR = 0.2
"""Share of the target beyond which what must leave is no company for a giant."""
_SWAPS = 24
_ROWS, _COLUMNS = 64, 1024  # candidates of a swap; more of them cost time and bring nothing

Costs = NDArray[np.float64]
Mask = NDArray[np.bool_]


def choose(
    costs: Costs, waited: Costs, due: int, chances: NDArray[np.int64] | None, target: float, count: int
) -> NDArray[np.bool_]:
    """Which ``count`` samples make the next batch.

    Starts with what must leave and the oldest of the others, then swaps towards the target. A giant, which exceeds the target
    even among the cheapest, leaves with certain batches only: if those are the same on all ranks, one step pays for the
    giants of many.

    Args:
        costs: of the samples in the order of their arrival, shape ``[samples]``.
        waited: share of the longest possible wait that each has behind it, shape ``[samples]``.
        due: how many of the first must be chosen.
        chances: if giants may leave with this batch: with how many they may, this one included, shape ``[samples]``.
        target: what the chosen ones should cost.
        count: at least ``due``, at most the number of samples.

    Returns:
        A mask of shape ``[samples]``.
    """
    chosen = np.arange(len(costs)) < due
    giant = _giants(costs, target, count) & ~chosen
    if chances is not None:
        alone = costs[chosen].sum() <= _DEAR * target
        chosen |= _released(giant, chances, int(alone), count - due)
    locked, giant = chosen.copy(), giant & ~chosen
    _fill(chosen, costs, giant, target, count - int(chosen.sum()))
    ascending = np.argsort(costs, kind="stable")
    _swap(chosen, costs, ascending[~(locked | giant)[ascending]], target, waited / count)
    return chosen


def _giants(costs: Costs, target: float, count: int) -> Mask:
    return costs + np.sort(costs)[: count - 1].sum() > 1.01 * target


def _released(giant: Mask, chances: NDArray[np.int64], least: int, most: int) -> Mask:
    """The oldest giants, so many that the others can leave one at a time later."""
    where = np.flatnonzero(giant)
    if not len(where):
        return np.zeros_like(giant)
    urgent = int((np.arange(len(where)) + 2 - chances[where]).max())
    released = np.zeros_like(giant)
    released[where[: min(most, max(least, len(where) // CHANCES, urgent))]] = True
    return released


def _fill(chosen: Mask, costs: Costs, giant: Mask, target: float, missing: int) -> None:
    """The oldest, or the cheapest if what is chosen leaves no room for more; giants last."""
    cheapest = np.lexsort((costs, giant, chosen))[:missing]
    crowded = costs[chosen].sum() + costs[cheapest].sum() > target
    chosen[cheapest if crowded else np.lexsort((giant, chosen))[:missing]] = True


def _swap(chosen: Mask, costs: Costs, free: NDArray[np.int64], target: float, gain: Costs) -> None:
    """Best single swaps of ``free`` samples, given from the cheapest to the dearest."""
    price = _PRICE_OF_DEVIATION / target if target > 0 else 0.0
    total = costs[chosen].sum()
    for _ in range(_SWAPS):
        inside, outside = _thin(free[chosen[free]], _ROWS), _thin(free[~chosen[free]], _COLUMNS)
        if not len(inside) or not len(outside):
            break
        totals = total - costs[inside][:, None] + costs[outside]
        regret = price * np.abs(totals - target) + gain[inside][:, None] - gain[outside]
        out, into = np.unravel_index(regret.argmin(), regret.shape)
        if regret[out, into] >= price * abs(total - target) - 1e-9:
            break
        chosen[inside[out]], chosen[outside[into]] = False, True
        total = totals[out, into]


def _thin(candidates: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most that many, evenly from the cheapest to the dearest."""
    if len(candidates) <= most:
        return candidates
    return candidates[np.linspace(0, len(candidates) - 1, most).astype(np.int64)]
