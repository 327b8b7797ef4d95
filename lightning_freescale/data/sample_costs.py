"""What the samples of a map-style data set cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance import CostModel
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.data.validation import numbers


class SampleCosts:
    """Lengths, unique ids and the cost that follows from them.

    Args:
        dataset: map-style data set.
        lengths: history length of every sample, or None.
        unique_ids: number of unique ids of every sample, or None.
        cost: a function of the lengths (and, if given, the unique ids), or without ``lengths`` of one sample; or the costs
            themselves; ``CostModel()`` if None.
        size: number of samples.

    Attributes:
        costs: predicted compute time, shape ``[samples]``.

    Raises:
        ValueError: there is nothing to tell the costs from, or it does not fit.
    """

    def __init__(self, dataset: Any, lengths: Any, unique_ids: Any, cost: Any, size: int) -> None:
        if lengths is None and cost is None:
            raise ValueError(
                "FreeScaleDataModule(lengths=None) cannot balance: pass lengths=, the history length of every sample, or "
                "cost=, a function of a sample or the costs themselves"
            )
        if unique_ids is not None and lengths is None:
            raise ValueError("unique_ids= goes with lengths=: pass the history length of every sample, too")
        self.lengths = None if lengths is None else numbers("lengths", lengths, size)
        self.unique_ids = None if unique_ids is None else numbers("unique_ids", unique_ids, size)
        if cost is not None and not callable(cost):
            self.costs = numbers("cost", cost, size)
        elif self.lengths is None:
            self.costs = numbers("cost(sample)", [cost(dataset[index]) for index in range(size)], size)
        else:
            self.costs = self.by(cost or CostModel())

    def by(self, cost: Callable[..., Any], samples: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Costs by another function of the lengths and, if they were given, the unique ids; of some samples or of all."""
        given = self._given(samples)
        return numbers("cost(lengths)", cost(*given), len(given[0]))

    def features(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """See :func:`sample_features`, shape ``[samples, 4]``."""
        return sample_features(*self._given(samples))

    def _given(self, samples: NDArray[np.int64] | None) -> list[NDArray[np.float64]]:
        assert self.lengths is not None
        given = [self.lengths] if self.unique_ids is None else [self.lengths, self.unique_ids]
        return given if samples is None else [values[samples] for values in given]
