"""How others share the samples of a step out: their algorithms, written anew from their descriptions.

All take what each sample costs (or how long it is), shape ``[samples]``, and return the rank of every sample; samples must
divide evenly among the ranks.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance import assign
from lightning_freescale.balance.assign import contiguous_split

Floats, Ints = NDArray[np.float64], NDArray[np.int64]
_HF_QUADRATIC = 0.001


def random(costs: Floats, ranks: int) -> Ints:
    """No balancing: contiguous runs of the drawn order, what ``torch.utils.data.DistributedSampler`` amounts to."""
    return contiguous_split(len(costs), ranks)


def zigzag(costs: Floats, ranks: int) -> Ints:
    """FreeScale's zig-zag through the sorted samples, forwards and backwards in turn (arXiv 2604.24073)."""
    return assign(costs, ranks, assignment_mode="zigzag").rank_of_sample


def karmarkar_karp_equal(costs: Floats, ranks: int) -> Ints:
    """Multiway largest differencing (Karmarkar and Karp 1982) at equal counts.

    As in verl (``seqlen_balancing.py``, ``equal_size=True``) and NVIDIA recsys-examples (``partitioner.py``): the sorted
    samples are cut into blocks of one sample per rank; the two blocks with the largest spread are merged, most expensive with
    cheapest, until one is left.
    """
    if len(costs) % ranks:
        raise ValueError(f"karmarkar_karp_equal: {len(costs)} samples do not divide among {ranks} ranks")
    number = count()  # the heap breaks ties by age
    heap = []
    for block in np.argsort(costs, kind="stable").reshape(-1, ranks):
        heapq.heappush(heap, _part(costs[block], block[:, None], next(number)))
    while len(heap) > 1:
        (_, _, first, its), (_, _, second, others) = heapq.heappop(heap), heapq.heappop(heap)
        members = np.concatenate([its, others[::-1]], axis=1)
        heapq.heappush(heap, _part(first + second[::-1], members, next(number)))
    rank_of_sample = np.empty(len(costs), dtype=np.int64)
    rank_of_sample[heap[0][3]] = np.arange(ranks)[:, None]
    return rank_of_sample


def _part(sums: Floats, members: Ints, number: int) -> tuple[float, int, Floats, Ints]:
    """Sets in ascending order of their sum, by falling spread in the heap."""
    order = np.argsort(sums, kind="stable")
    return float(sums[order[0]] - sums[order[-1]]), number, sums[order], members[order]


def contiguous_groups(lengths: Floats, ranks: int) -> Ints:
    """Contiguous groups of the samples sorted by length, of unequal sizes.

    As Hugging Face transformers' ``train_sampling_strategy="batch_rebalance"`` describes itself (pull request 47340): groups
    start equal; again and again the most expensive gives up one place and the cheapest gets one, until the costs have
    converged. (Here: until no move of as many as there are samples has lowered the highest cost; the best sizes count.) It
    is made for padded batches: a group costs ``size * longest + 0.001 * size * longest**2``.
    """
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    size = np.diff(np.arange(ranks + 1) * len(lengths) // ranks)
    best, least, failed = size.copy(), np.inf, 0
    while failed < len(lengths):
        cost = _padded(ordered, size)
        failed += 1
        if cost.max() < least:
            best, least, failed = size.copy(), cost.max(), 0
        size[int(np.argmax(np.where(size > 1, cost, -1.0)))] -= 1
        size[int(np.argmin(cost))] += 1
    rank_of_sample = np.empty(len(lengths), dtype=np.int64)
    rank_of_sample[order] = np.repeat(np.arange(ranks), best)
    return rank_of_sample


def _padded(ordered: Floats, size: Ints) -> Floats:
    longest = ordered[np.cumsum(size) - 1]
    return size * longest + _HF_QUADRATIC * size * longest**2
