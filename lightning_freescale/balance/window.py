"""The micro-batches of an optimizer step: which samples each has, so that those that cost much are computed at the same time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.solver import Ints, to_integers
from lightning_freescale.balance.validation import Floats

_LEVEL = 1.0003
"""A micro-batch is as good as level if its dearest sample keeps it within this factor of the others."""
_ONE_BY_ONE, _REPLACED = 64, 2
"""Ranks of a micro-batch whose company is chosen by itself at most."""


def share_window(costs: Floats, batches: int, ranks: int) -> Ints:
    """Return which micro-batch of a window each sample is computed in, shape ``[samples]``; all have as many samples.

    The ranks meet at every micro-batch, so a window takes as long as the slowest ranks of its micro-batches take together.
    Samples that cost more than a rank's fair share of a micro-batch come into the same one, the dearest of each rank, and the
    other ranks' samples are as dear, together, as there is time for. What is left costs the same in all others. Which
    micro-batch a sample is in does not change the window's gradient.

    Args:
        costs: shape ``[samples]``.
        batches: micro-batches; they divide the samples evenly.
        ranks: how many compute a micro-batch, each as many samples as any other.
    """
    cost = to_integers(costs, np.ones(ranks * batches, dtype=np.int64))
    each = len(cost) // (ranks * batches)
    batch_of_sample = np.empty(len(cost), dtype=np.int64)
    left = np.argsort(-cost, kind="stable")  # the dearest first
    for batch in range(batches - 1):
        mean = int(cost[left].sum()) / (ranks * (batches - batch))
        dearest = int(cost[left[0]] + cost[left[len(left) - each + 1 :]].sum())
        if dearest <= _LEVEL * mean:
            break
        chosen = _together(cost[left], dearest, ranks, each)
        batch_of_sample[left[chosen]] = batch
        left = left[~chosen]
    else:
        batch = batches - 1
    # as if every micro-batch had ranks of its own: those that are done at about the same time meet
    place = assign(cost[left], ranks * (batches - batch)).rank_of_sample
    by_load = np.argsort(-np.bincount(place, cost[left]), kind="stable")
    batch_of_sample[left] = batch + np.argsort(by_load, kind="stable")[place] // ranks
    return batch_of_sample


def _together(cost: Ints, level: int, ranks: int, each: int) -> NDArray[np.bool_]:
    """Return which samples come with the dearest ones, one for each rank, so that ranks are done at ``level`` as far as can be.

    Args:
        cost: from the dearest to the cheapest, shape ``[samples]``.
        level: when the rank with the dearest is done, with the cheapest company.
        ranks: how many there are.
        each: samples of a rank.
    """
    chosen = np.zeros(len(cost), dtype=bool)
    chosen[:ranks] = True
    for first in range(ranks):
        rest = np.flatnonzero(~chosen)[::-1]  # the cheapest first
        total = np.concatenate([[0], cost[rest].cumsum()])
        filled = ranks - first if first == _ONE_BY_ONE else 1
        company = filled * (each - 1)
        runs = total[company:] - total[: len(total) - company]
        # the dearest company there is time for: it leaves the cheapest to others
        time = filled * level - int(cost[first : first + filled].sum())
        start = max(0, int(np.searchsorted(runs, time, side="right")) - 1)
        company_of = rest[start : start + company]
        chosen[company_of] = True
        for _ in range(_REPLACED if filled == 1 else 0):
            time_left = time - int(cost[company_of].sum())
            rest = np.flatnonzero(~chosen)[::-1]
            wanted = np.searchsorted(cost[rest], cost[company_of] + time_left, side="right") - 1
            gain = np.where(wanted >= 0, cost[rest[wanted]] - cost[company_of], 0)
            best = int(gain.argmax())
            if gain[best] <= 0:
                break
            chosen[company_of[best]], chosen[rest[wanted[best]]] = False, True
            company_of[best] = rest[wanted[best]]
        if filled > 1:
            break
    return chosen
