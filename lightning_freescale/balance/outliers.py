"""Bring samples that dominate their steps together, so that fewer steps are dominated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.assign import counts


def pool_outliers(
    order: NDArray[np.int64], edges: Sequence[int], costs: NDArray[np.float64], ranks: int, window: int
) -> NDArray[np.int64]:
    """Exchange samples between the steps of a window so that those costing more than a rank's fair share come together.

    Not gradient-identical: it changes which samples share a step, never which an epoch has. A sample moves by less than
    ``window`` steps, which is its age bound. After WLB-LLM's outlier delay (arXiv 2503.17924), with a bound.

    Args:
        order: the samples of an epoch in drawn order, shape ``[samples]``.
        edges: where its steps begin and end, ``steps + 1`` positions.
        costs: predicted compute time of every sample of the data set.
        ranks: how many ranks share a step.
        window: how many consecutive steps exchange samples.

    Returns:
        The new order, with the same edges.
    """
    pooled = order.copy()
    for first in range(0, len(edges) - 1, window):
        inner = np.asarray(edges[first : first + window + 1])
        part = order[inner[0] : inner[-1]]
        pooled[inner[0] : inner[-1]] = part[_arrange(costs[part], inner - inner[0], ranks)]
    return pooled


def _arrange(cost: NDArray[np.float64], edges: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Positions of a window's samples in their new order."""
    fair = cost.sum() / (len(edges) - 1) / ranks
    outliers = np.flatnonzero(cost > fair)
    outliers = outliers[np.argsort(-cost[outliers], kind="stable")]
    # one per rank and step, the dearest together, where a deal of the order would begin a rank's run; the others keep theirs
    sizes = (np.array(counts(int(after - edge), ranks)) for edge, after in zip(edges, edges[1:]))
    taken = np.concatenate([edge + size.cumsum() - size for edge, size in zip(edges, sizes)])[: len(outliers)]
    result = np.empty(len(cost), dtype=np.int64)
    free = np.ones(len(cost), dtype=bool)
    result[taken], free[taken] = outliers[: len(taken)], False
    result[free] = np.setdiff1d(np.arange(len(cost)), outliers[: len(taken)])
    return result
