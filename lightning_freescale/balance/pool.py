"""Batches of nearly equal cost from a stream, out of a pool of the samples that arrived last."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.pool_selection import CHANCES, choose

_NEVER = 2**40


class LocalPool:
    """Holds the costs of samples that have arrived and picks batches of a given total cost from them.

    A rank's own stream deviates from the mean of all ranks as a random walk, which the content of the pool absorbs. So that
    it neither overflows with cost nor runs out of it, the target moves by a little when the content is far from what as many
    average samples would cost. Deterministic: the same calls give the same batches. All ranks should start their pools
    together, see :func:`lightning_freescale.balance.pool_selection.choose` about giants.

    Args:
        batch_size: samples of a batch.
        pool_batches: the pool holds this many times ``batch_size`` samples. A bigger one meets its targets more closely.
        max_age: a sample leaves at the latest this many batches after the first that it could have been in; ``None``: no
            bound.

    Raises:
        ValueError: a pool as big as that could not keep the age bound.
    """

    def __init__(self, batch_size: int, pool_batches: int = 8, max_age: int | None = 32) -> None:
        if batch_size < 1 or pool_batches < 1:
            raise ValueError(f"LocalPool(batch_size={batch_size!r}, pool_batches={pool_batches!r}): both must be at least 1")
        if max_age is not None and max_age < pool_batches - 1:
            raise ValueError(
                f"max_age={max_age!r} cannot be kept with pool_batches={pool_batches}: the pool alone is worth more batches. "
                f"Use max_age={pool_batches - 1} or more, or pool_batches={max(max_age, 0) + 1}."
            )
        self.batch_size, self.pool_batches, self.max_age = batch_size, pool_batches, max_age
        self.costs: NDArray[np.float64] = np.empty(0)
        """What the samples in the pool cost, in the order of their arrival."""
        self.numbers: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """Their arrival numbers: the n-th sample ever added has number n."""
        self._arrived: NDArray[np.int64] = np.empty(0, dtype=np.int64)
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
        if self.max_age is None or not len(self):
            return 0
        within = np.bincount(self._left(), minlength=self.max_age + 1).cumsum()
        return int(max(0, (within - self.batch_size * np.arange(len(within))).max()))

    def add(self, costs: ArrayLike) -> None:
        """Samples arrive, in the units of the cost model, shape ``[samples]``.

        Raises:
            ValueError: there is no room, or a cost is negative or not finite.
        """
        cost = np.asarray(costs, dtype=np.float64)
        if cost.ndim != 1 or len(cost) > self.room:
            raise ValueError(f"LocalPool.add(costs of shape {cost.shape}): there is room for {self.room} samples")
        bad = np.flatnonzero(~(np.isfinite(cost) & (cost >= 0)))
        if bad.size:
            raise ValueError(f"LocalPool.add: cost {cost[bad[0]]} of sample {bad[0]} is not a finite number >= 0")
        self.costs = np.append(self.costs, cost)
        self.numbers = np.append(self.numbers, np.arange(self._added, self._added + len(cost)))
        self._arrived = np.append(self._arrived, np.full(len(cost), self._batches))
        self._added += len(cost)

    def take(self, target: float, count: int | None = None) -> NDArray[np.int64]:
        """Remove the next batch.

        Args:
            target: what it should cost.
            count: samples; ``batch_size`` if not given. More leave if more are due, fewer if the pool is smaller.

        Returns:
            Arrival numbers in ascending order.
        """
        count = min(len(self), max(self.batch_size if count is None else count, self.due))
        waited = (self._batches - self._arrived) / (self.max_age or 4 * self.pool_batches)
        chosen = choose(self.costs, waited, self.due, self._chances(), self._moved(target, count), count)
        numbers = self.numbers[chosen]
        self.costs, self.numbers, self._arrived = self.costs[~chosen], self.numbers[~chosen], self._arrived[~chosen]
        self._batches += 1
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Everything but the costs, in lists."""
        state = {"numbers": self.numbers.tolist(), "arrived": self._arrived.tolist()}
        return {**state, "batches": self._batches, "added": self._added}

    def load_state_dict(self, state: dict[str, Any], costs: ArrayLike) -> None:
        """Go on from ``state``; ``costs`` are those of its ``numbers``."""
        self.costs = np.array(costs, dtype=np.float64).reshape(len(state["numbers"]))
        self.numbers = np.array(state["numbers"], dtype=np.int64)
        self._arrived = np.array(state["arrived"], dtype=np.int64)
        self._batches, self._added = state["batches"], state["added"]

    def _left(self) -> NDArray[np.int64]:
        """How many batches each sample may still let pass."""
        return (_NEVER if self.max_age is None else self.max_age) - (self._batches - self._arrived)

    def _moved(self, target: float, count: int) -> float:
        """The target, moved against what the content of the pool exceeds ``len(self)`` average samples by.

        A constant small step keeps a random walk within bounds at the least price; it grows only where the rank's own mean
        is not the others'.
        """
        if target <= 0 or not count:
            return target
        excess = (self.costs.sum() / target * count - len(self)) / self.batch_size
        step, dead = 0.16 / self.pool_batches, self.pool_batches / 4
        outside = np.clip(excess, -dead, dead) - excess
        beyond = max(0.0, excess - self.pool_batches)
        return float(target * (1 - step * np.clip(outside, -1, 3) + 0.05 * beyond))

    def _chances(self) -> NDArray[np.int64] | None:
        """Batches with which a giant may leave are the same on all ranks, which start together."""
        longest = 4 * self.pool_batches if self.max_age is None else self.max_age + 1
        period = max(1, longest // CHANCES)
        if self._batches % period != period - 1:
            return None
        return self._left() // period + 1
