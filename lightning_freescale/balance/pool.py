"""Batches of nearly equal cost from a stream, out of a pool of the samples that arrived last."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.validation import Floats, non_negative

Mask = NDArray[np.bool_]

_NEVER = 2**40
_OUTLIER_BATCHES = 4
"""Batches, within the age bound, with which an outlier may leave."""
_PRICE_OF_DEVIATION = 30.0
"""To miss the target by 1 % is as bad as to have waited, on average, 0.3 of the age bound less."""
_EXPENSIVE = 0.2
"""Share of the target beyond which what must leave leaves no room for an outlier beside it."""
_SWAPS = 24
_ROWS, _COLUMNS = 64, 1024  # candidates of a swap; more of them cost time and bring nothing


class LocalPool:
    """Holds the costs of samples that have arrived and picks batches of a given total cost from them.

    A rank's own stream deviates from the mean of all ranks as a random walk, which the content of the pool absorbs. So that
    it neither overflows with cost nor runs out of it, the target moves by a little when the content is far from what as many
    average samples would cost. Deterministic: the same calls give the same batches. All ranks should start their pools
    together, so that their outliers, which exceed the target even among the cheapest samples, leave with the same batches.

    Args:
        batch_size: samples of a batch.
        pool_batches: the pool holds this many times ``batch_size`` samples. A bigger one meets its targets more closely.
        max_pool_age: a sample leaves at the latest this many batches after the first that it could have been in; ``None``: no
            bound.

    Attributes:
        costs: what the samples in the pool cost, in the order of their arrival.
        numbers: their arrival numbers: the n-th sample ever added has number n.

    Raises:
        ValueError: a pool as big as that could not keep the age bound.
    """

    def __init__(self, batch_size: int, pool_batches: int = 8, max_pool_age: int | None = 32) -> None:
        if batch_size < 1 or pool_batches < 1:
            raise ValueError(f"LocalPool(batch_size={batch_size!r}, pool_batches={pool_batches!r}): both must be at least 1")
        if max_pool_age is not None and max_pool_age < pool_batches - 1:
            raise ValueError(
                f"max_pool_age={max_pool_age!r} cannot be kept with pool_batches={pool_batches}: the pool alone is worth more "
                f"batches. Use max_pool_age={pool_batches - 1} or more, or pool_batches={max(max_pool_age, 0) + 1}."
            )
        self.batch_size, self.pool_batches, self.max_pool_age = batch_size, pool_batches, max_pool_age
        self.costs: Floats = np.empty(0)
        self.numbers: Ints = np.empty(0, dtype=np.int64)
        self._arrived: Ints = np.empty(0, dtype=np.int64)  # how many batches had left before
        self._batches = self._added = 0

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def room(self) -> int:
        """How many more samples fit."""
        return self.batch_size * self.pool_batches - len(self)

    @property
    def oldest(self) -> int:
        """Age of the oldest sample in batches; 0 in an empty pool."""
        return int(self._batches - self._arrived[0]) if len(self) else 0

    @property
    def due(self) -> int:
        """How many of the oldest must leave with the next batch, or the age bound could not be kept later."""
        if self.max_pool_age is None or not len(self):
            return 0
        within = np.bincount(self._batches_left(), minlength=self.max_pool_age + 1).cumsum()
        return int(max(0, (within - self.batch_size * np.arange(len(within))).max()))

    def add_samples(self, costs: ArrayLike) -> None:
        """Add arrived samples, by their costs, shape ``[samples]``; ValueError if a cost or their number does not fit."""
        cost = non_negative("LocalPool.add_samples(costs=...)", costs)
        if len(cost) > self.room:
            raise ValueError(f"LocalPool.add_samples(costs of shape {cost.shape}): there is room for {self.room} samples")
        self.costs = np.append(self.costs, cost)
        self.numbers = np.append(self.numbers, np.arange(self._added, self._added + len(cost)))
        self._arrived = np.append(self._arrived, np.full(len(cost), self._batches))
        self._added += len(cost)

    def next_batch(self, target: float, count: int | None = None) -> Ints:
        """Remove the samples of the next batch and return their arrival numbers, in ascending order.

        Args:
            target: what the batch should cost.
            count: samples; ``batch_size`` if not given. More leave if more are due, fewer if the pool is smaller.
        """
        count = min(len(self), max(self.batch_size if count is None else count, self.due))
        chosen = self._choose(self._steady_target(target, count), count)
        numbers = self.numbers[chosen]
        self.costs, self.numbers, self._arrived = self.costs[~chosen], self.numbers[~chosen], self._arrived[~chosen]
        self._batches += 1
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the costs, in lists and whole numbers."""
        state = {"numbers": self.numbers.tolist(), "arrived": self._arrived.tolist()}
        return {**state, "batches": self._batches, "added": self._added}

    def load_state_dict(self, state: dict[str, Any], costs: ArrayLike) -> None:
        """Go on from ``state``; ``costs`` are those of its ``numbers``."""
        self.costs = np.array(costs, dtype=np.float64).reshape(len(state["numbers"]))
        self.numbers = np.array(state["numbers"], dtype=np.int64)
        self._arrived = np.array(state["arrived"], dtype=np.int64)
        self._batches, self._added = state["batches"], state["added"]

    def _batches_left(self) -> Ints:
        """Return how many batches each sample may still let pass."""
        return (_NEVER if self.max_pool_age is None else self.max_pool_age) - (self._batches - self._arrived)

    def _steady_target(self, target: float, count: int) -> float:
        """Return the target, moved against what the content of the pool exceeds ``len(self)`` average samples by."""
        if target <= 0 or not count:
            return target
        excess = (self.costs.sum() / target * count - len(self)) / self.batch_size
        # a constant small step keeps a random walk within bounds at the least price; it grows only where the rank's own mean
        # is not the others'
        step, dead = 0.16 / self.pool_batches, self.pool_batches / 4
        outside = np.clip(excess, -dead, dead) - excess
        beyond = max(0.0, excess - self.pool_batches)
        return float(target * (1 - step * np.clip(outside, -1, 3) + 0.05 * beyond))

    def _choose(self, target: float, count: int) -> Mask:
        """Return which ``count`` samples make the next batch: what is due, the oldest others, then swaps to the target."""
        costs, due = self.costs, self.due
        chosen = np.arange(len(costs)) < due
        outlier = (costs + np.sort(costs)[: count - 1].sum() > 1.01 * target) & ~chosen
        # Without communication the ranks cannot agree on a step for their outliers, but they can count: outliers leave with
        # every so many-th batch, the same on all ranks, which start together. So one expensive step pays for many outliers.
        longest = 4 * self.pool_batches if self.max_pool_age is None else self.max_pool_age + 1
        period = max(1, longest // _OUTLIER_BATCHES)
        if self._batches % period == period - 1:
            least = int(costs[chosen].sum() <= _EXPENSIVE * target)
            chosen |= _released_outliers(outlier, self._batches_left() // period + 1, least, count - due)
        locked, outlier = chosen.copy(), outlier & ~chosen
        missing = count - int(chosen.sum())
        cheapest = np.lexsort((costs, outlier, chosen))[:missing]  # outliers last
        crowded = costs[chosen].sum() + costs[cheapest].sum() > target  # what is chosen leaves no room for more
        chosen[cheapest if crowded else np.lexsort((outlier, chosen))[:missing]] = True  # else the oldest
        ascending = np.argsort(costs, kind="stable")
        waited = (self._batches - self._arrived) / (self.max_pool_age or 4 * self.pool_batches)
        _swap_towards(chosen, costs, ascending[~(locked | outlier)[ascending]], target, waited / count)
        return chosen


def _released_outliers(outlier: Mask, batches_left: Ints, least: int, most: int) -> Mask:
    """Return the oldest outliers, so many that the others can leave one at a time, with the outlier batches they have left."""
    where = np.flatnonzero(outlier)
    urgent = (np.arange(len(where)) + 2 - batches_left[where]).max(initial=least)
    released = np.zeros_like(outlier)
    released[where[: min(most, max(urgent, len(where) // _OUTLIER_BATCHES))]] = True
    return released


def _swap_towards(chosen: Mask, costs: Floats, free: Ints, target: float, gain: Floats) -> None:
    """Make the best single swaps of ``free`` samples, which are given from the cheapest to the most expensive."""
    price = _PRICE_OF_DEVIATION / target if target > 0 else 0.0
    total = costs[chosen].sum()
    for _ in range(_SWAPS):
        inside, outside = _spread(free[chosen[free]], _ROWS), _spread(free[~chosen[free]], _COLUMNS)
        if not len(inside) or not len(outside):
            break
        totals = total - costs[inside][:, None] + costs[outside]
        regret = price * np.abs(totals - target) + gain[inside][:, None] - gain[outside]
        out, into = np.unravel_index(regret.argmin(), regret.shape)
        if regret[out, into] >= price * abs(total - target) - 1e-9:
            break
        chosen[inside[out]], chosen[outside[into]] = False, True
        total = totals[out, into]


def _spread(candidates: Ints, most: int) -> Ints:
    """Return at most that many, evenly from the cheapest to the most expensive."""
    if len(candidates) <= most:
        return candidates
    return candidates[np.linspace(0, len(candidates) - 1, most).astype(np.int64)]
