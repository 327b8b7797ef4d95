"""The division of an optimizer step's samples among its micro-batches, so that expensive samples are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lightning_freescale.balance.assign import AssignmentMode, assign, assignment_bound, contiguous_split, imbalance
from lightning_freescale.balance.solver.bounds import Ints, Mask, dearest_first, to_integers
from lightning_freescale.balance.solver.search import CLOSE_ENOUGH
from lightning_freescale.balance.validation import Floats

_ONE_BY_ONE, _REPLACED = 64, 2
"""Maximum number of ranks whose samples are chosen separately, and of their samples that are replaced by better ones."""


def share_window(costs: Floats, batches: int, ranks: int) -> Ints:
    """Return the micro-batch of each sample of a window, shape ``[samples]``, at equal counts.

    The ranks wait for each other in every micro-batch. So a window takes the sum of the times of the slowest ranks. Samples
    that cost more than a rank's fair share of a micro-batch go to the same micro-batch, one to each rank. The other samples of
    that micro-batch are as expensive as its time allows. The remaining samples cost the same in all other micro-batches. The
    division does not change the gradient of the window. ``batches * ranks`` divides the number of samples.
    """
    cost = to_integers(costs, ranks * batches)
    each = len(cost) // (ranks * batches)
    batch_of_sample = np.empty(len(cost), dtype=np.int64)
    left = dearest_first(cost)
    for batch in range(batches - 1):
        mean = int(cost[left].sum()) / (ranks * (batches - batch))
        dearest = int(cost[left[0]] + cost[left[len(left) - each + 1 :]].sum())
        if dearest <= CLOSE_ENOUGH * mean:
            break
        chosen = _together(cost[left], dearest, ranks, each)
        batch_of_sample[left[chosen]] = batch
        left = left[~chosen]
    else:
        batch = batches - 1
    # plan as if each micro-batch had ranks of its own; ranks with similar loads form a micro-batch
    place = assign(cost[left], ranks * (batches - batch)).rank_of_sample
    by_load = np.argsort(-np.bincount(place, cost[left]), kind="stable")
    batch_of_sample[left] = batch + np.argsort(by_load, kind="stable")[place] // ranks
    return batch_of_sample


def window_bound(costs: Floats, batches: int, ranks: int, assignment_mode: AssignmentMode = "fixed") -> float:
    """Return a lower bound on the imbalance of a window, for any division among its micro-batches.

    A window takes at least the time of one step with all its samples. It also takes at least the time of its most expensive
    sample, with the cheapest samples that must be beside it, plus that of the cheapest samples in all other micro-batches.
    """
    bound, _ = assignment_bound(costs, ranks, assignment_mode=assignment_mode)
    if not costs.any():
        return bound
    cost, each = np.sort(costs), len(costs) // (ranks * batches)
    beside = each - 1 if assignment_mode in ("fixed", "zigzag") else 0
    with_dearest = ranks * (cost[-1] + cost[:beside].sum())
    return max(bound, float((with_dearest + cost[: (batches - 1) * ranks * each].sum()) / cost.sum()))


class DrawnWindow:
    """The micro-batches of an optimizer step as drawn, with which a balance report compares their plans.

    ``costs`` and ``tokens`` hold an array for each micro-batch, in drawn order, shape ``[samples]`` each.
    """

    def __init__(self, costs: Sequence[Floats], tokens: Sequence[Floats] | None, ranks: int) -> None:
        self._costs, self._tokens, self._ranks = costs, tokens, ranks
        self._bounds: dict[AssignmentMode, float] = {}

    @cached_property
    def unbalanced(self) -> float:
        """The imbalance without balancing, each micro-batch weighted by its cost."""
        return self._weighted(self._costs) or 1.0

    @cached_property
    def tokens_unbalanced(self) -> float | None:
        """The imbalance of tokens without balancing; None if tokens are unknown."""
        return None if self._tokens is None else self._weighted(self._tokens)

    def lower_bound(self, assignment_mode: AssignmentMode) -> float:
        """Return :func:`window_bound` of these micro-batches."""
        if assignment_mode not in self._bounds:
            whole = np.concatenate(self._costs)
            self._bounds[assignment_mode] = window_bound(whole, len(self._costs), self._ranks, assignment_mode)
        return self._bounds[assignment_mode]

    def _weighted(self, values: Sequence[Floats]) -> float | None:
        """Return the imbalance as drawn, each micro-batch weighted by its sum; None if all sums are zero."""
        total = sum(float(each.sum()) for each in values)
        splits = (contiguous_split(len(each), self._ranks) for each in values)
        slowest = sum(imbalance(each, split, self._ranks) * float(each.sum()) for each, split in zip(values, splits))
        return slowest / total if total else None


def _together(cost: Ints, level: int, ranks: int, each: int) -> Mask:
    """Return the mask of a micro-batch with the ``ranks`` most expensive samples, one on each rank, at about equal loads.

    ``cost`` is sorted from the most expensive sample. ``level`` is the load to reach: that of the rank with the most expensive
    sample and the cheapest others. ``each`` is the number of samples of a rank.
    """
    chosen = np.arange(len(cost)) < ranks
    one_by_one = min(ranks, _ONE_BY_ONE)
    for rank in range(one_by_one):
        others = _dearest_run(cost, chosen, each - 1, level - int(cost[rank]))
        _replace(cost, chosen, others, level - int(cost[rank]))
    rest = ranks - one_by_one
    if rest:
        _dearest_run(cost, chosen, rest * (each - 1), rest * level - int(cost[one_by_one:ranks].sum()))
    return chosen


def _dearest_run(cost: Ints, chosen: Mask, count: int, time: int) -> Ints:
    """Add the most expensive run within the time to ``chosen`` and return it; cheaper samples stay free for other ranks."""
    left = np.flatnonzero(~chosen)[::-1]  # the cheapest first
    total = np.concatenate([[0], cost[left].cumsum()])
    runs = total[count:] - total[: len(total) - count]
    start = max(0, int(np.searchsorted(runs, time, side="right")) - 1)
    run = left[start : start + count]
    chosen[run] = True
    return run


def _replace(cost: Ints, chosen: Mask, others: Ints, time: int) -> None:
    """Replace some of ``others``, the samples beside a rank's most expensive one, by more expensive ones within the time."""
    for _ in range(_REPLACED):
        left = np.flatnonzero(~chosen)[::-1]
        spare = time - int(cost[others].sum())
        if spare <= 0 or not len(others) or not len(left):
            return
        place = np.searchsorted(cost[left], cost[others] + spare, side="right") - 1
        gain = np.where(place >= 0, cost[left[place]] - cost[others], 0)
        best = int(gain.argmax())
        if gain[best] <= 0:
            return
        chosen[others[best]], chosen[left[place[best]]] = False, True
        others[best] = left[place[best]]
