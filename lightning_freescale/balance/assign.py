"""Which rank computes which sample of a global batch."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Assignment:
    """The ranks of one global batch, with what they cost.

    Attributes:
        rank_of_sample: int array of shape ``[samples]``.
        imbalance: max over ranks of cost / mean over ranks.
        lower_bound: the imbalance that no assignment with these counts can beat.
    """

    rank_of_sample: NDArray[np.int64]
    imbalance: float
    lower_bound: float


def assign(costs: ArrayLike, ranks: int) -> Assignment:
    """Give every rank an equal number of samples (differing by one at most) and nearly equal cost.

    Longest processing time first with a cap on the count (Graham 1969). A pure function of its arguments: ties go to the
    lower index and the lower rank, so every rank computes the same plan by itself.

    Args:
        costs: shape ``[samples]``, in the units of the cost model, finite and >= 0.
        ranks: how many ranks share the samples; each gets at least one.

    Raises:
        ValueError: a cost is negative or not finite, or there are fewer samples than ranks.
    """
    cost = np.asarray(costs, dtype=np.float64)
    _check(cost, ranks)
    rank_of_sample = _longest_first(cost, ranks)
    return Assignment(rank_of_sample, imbalance(cost, rank_of_sample, ranks), lower_bound(cost, ranks))


def deal(samples: int, ranks: int) -> NDArray[np.int64]:
    """The unbalanced assignment: contiguous runs of the drawn order, with the counts that :func:`assign` uses."""
    return np.repeat(np.arange(ranks), np.asarray(counts(samples, ranks)))


def counts(samples: int, ranks: int) -> list[int]:
    """Samples per rank: equal, the first ``samples % ranks`` ranks take one more."""
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


def imbalance(cost: NDArray[np.float64], rank_of_sample: NDArray[np.int64], ranks: int) -> float:
    """Max over ranks of cost / mean over ranks; 1.0 when all costs are zero."""
    loads = np.bincount(rank_of_sample, weights=cost, minlength=ranks)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def lower_bound(cost: NDArray[np.float64], ranks: int) -> float:
    """No assignment with equal counts is better: the largest sample brings at least the smallest others with it."""
    if not cost.any():
        return 1.0
    ordered = np.sort(cost)
    others = len(cost) // ranks - 1
    return float(max(1.0, (ordered[-1] + ordered[:others].sum()) * ranks / cost.sum()))


def _longest_first(cost: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    share, spare = divmod(len(cost), ranks)
    value = cost.tolist()
    held = [0] * ranks
    loads = [(0.0, rank) for rank in range(ranks)]
    rank_of_sample = np.empty(len(cost), dtype=np.int64)
    for sample in np.argsort(-cost, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        while held[rank] >= share:
            if held[rank] == share and spare:
                spare -= 1
                break
            load, rank = heapq.heappop(loads)  # the full rank stays out of the heap
        rank_of_sample[sample] = rank
        held[rank] += 1
        heapq.heappush(loads, (load + value[sample], rank))
    return rank_of_sample


def _check(cost: NDArray[np.float64], ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"assign(ranks={ranks!r}): there must be at least one rank")
    if cost.ndim != 1:
        raise ValueError(f"assign(costs=...) has shape {cost.shape}: pass one cost per sample, shape [samples]")
    bad = np.flatnonzero(~(np.isfinite(cost) & (cost >= 0)))
    if bad.size:
        raise ValueError(f"assign(costs=...): cost {cost[bad[0]]} of sample {bad[0]} is not a finite number >= 0")
    if len(cost) < ranks:
        raise ValueError(f"assign: {len(cost)} samples for {ranks} ranks; every rank needs at least one sample")
