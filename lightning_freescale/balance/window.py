"""The samples of each micro-batch of an optimizer step, so that expensive ones are computed at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lightning_freescale.balance.assign import AssignmentMode, assign, assignment_bound, contiguous_split, imbalance
from lightning_freescale.balance.solver import CLOSE_ENOUGH, Ints, Mask, dearest_first, to_integers
from lightning_freescale.balance.validation import Floats

_ONE_BY_ONE, _REPLACED = 64, 2
"""Ranks of a micro-batch whose company is chosen by itself at most, and how many samples of it are replaced by better ones."""


def share_window(costs: Floats, batches: int, ranks: int) -> Ints:
    """Return which micro-batch of a window each sample is computed in, shape ``[samples]``; all have as many samples.

    The ranks meet at every micro-batch, so a window takes as long as the slowest ranks of its micro-batches take together.
    Samples that cost more than a rank's fair share of a micro-batch come into the same one, the most expensive of each rank.
    The other ranks' samples of it are as expensive, together, as the time allows. The remaining samples cost the same in all
    other micro-batches. Which micro-batch a sample is in does not change the window's gradient.

    Args:
        costs: shape ``[samples]``.
        batches: micro-batches; they divide the samples evenly.
        ranks: how many compute a micro-batch, each as many samples as any other.
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
    # as if every micro-batch had ranks of its own: those that are done at about the same time meet
    place = assign(cost[left], ranks * (batches - batch)).rank_of_sample
    by_load = np.argsort(-np.bincount(place, cost[left]), kind="stable")
    batch_of_sample[left] = batch + np.argsort(by_load, kind="stable")[place] // ranks
    return batch_of_sample


def window_bound(costs: Floats, batches: int, ranks: int, assignment_mode: AssignmentMode = "fixed") -> float:
    """Return the imbalance that no window of these samples can beat, however its micro-batches divide them.

    No window is quicker than its samples on ranks that meet only once; nor than its most expensive sample with the cheapest
    others that its rank must have there, and the cheapest samples in all other micro-batches.

    Args:
        costs: shape ``[samples]``.
        batches: micro-batches; they divide the samples evenly.
        ranks: how many compute a micro-batch.
        assignment_mode: of :func:`assign`.
    """
    bound, _ = assignment_bound(costs, ranks, assignment_mode=assignment_mode)
    if not costs.any():
        return bound
    cost, each = np.sort(costs), len(costs) // (ranks * batches)
    company = each - 1 if assignment_mode in ("fixed", "zigzag") else 0
    with_dearest = ranks * (cost[-1] + cost[:company].sum())
    return max(bound, float((with_dearest + cost[: (batches - 1) * ranks * each].sum()) / cost.sum()))


class DrawnWindow:
    """The micro-batches of an optimizer step as they were drawn; a balance report compares their plans with them.

    Args:
        costs: of each step's samples in drawn order, shape ``[samples]`` each.
        tokens: of the same samples, if known.
        ranks: how many share a step.
    """

    def __init__(self, costs: Sequence[Floats], tokens: Sequence[Floats] | None, ranks: int) -> None:
        self._costs, self._tokens, self._ranks = costs, tokens, ranks
        self._bounds: dict[AssignmentMode, float] = {}

    @cached_property
    def unbalanced(self) -> float:
        """Their imbalance without balancing, each weighted by its cost."""
        return self._weighted(self._costs) or 1.0

    @cached_property
    def tokens_unbalanced(self) -> float | None:
        """The same of their tokens; None if they are not known."""
        return None if self._tokens is None else self._weighted(self._tokens)

    def lower_bound(self, assignment_mode: AssignmentMode) -> float:
        """Return the imbalance that no window of them can beat in a mode of :func:`assign`."""
        if assignment_mode not in self._bounds:
            whole = np.concatenate(self._costs)
            self._bounds[assignment_mode] = window_bound(whole, len(self._costs), self._ranks, assignment_mode)
        return self._bounds[assignment_mode]

    def _weighted(self, values: Sequence[Floats]) -> float | None:
        """Return the imbalance as drawn, each step weighted by its sum; None if all sums are zero."""
        total = sum(float(each.sum()) for each in values)
        splits = (contiguous_split(len(each), self._ranks) for each in values)
        slowest = sum(imbalance(each, split, self._ranks) * float(each.sum()) for each, split in zip(values, splits))
        return slowest / total if total else None


def _together(cost: Ints, level: int, ranks: int, each: int) -> Mask:
    """Return the company of the most expensive samples, one of each rank, so that ranks reach ``level`` as far as possible.

    Args:
        cost: from the most expensive to the cheapest, shape ``[samples]``.
        level: when the rank with the most expensive one is done, with the cheapest company.
        ranks: how many there are.
        each: samples of a rank.
    """
    chosen = np.arange(len(cost)) < ranks
    one_by_one = min(ranks, _ONE_BY_ONE)
    for rank in range(one_by_one):
        company = _dearest_run(cost, chosen, each - 1, level - int(cost[rank]))
        _replace(cost, chosen, company, level - int(cost[rank]))
    rest = ranks - one_by_one
    if rest:
        _dearest_run(cost, chosen, rest * (each - 1), rest * level - int(cost[one_by_one:ranks].sum()))
    return chosen


def _dearest_run(cost: Ints, chosen: Mask, count: int, time: int) -> Ints:
    """Choose the most expensive neighbours within the time, and return them: they leave the cheapest to others."""
    left = np.flatnonzero(~chosen)[::-1]  # the cheapest first
    total = np.concatenate([[0], cost[left].cumsum()])
    runs = total[count:] - total[: len(total) - count]
    start = max(0, int(np.searchsorted(runs, time, side="right")) - 1)
    run = left[start : start + count]
    chosen[run] = True
    return run


def _replace(cost: Ints, chosen: Mask, company: Ints, time: int) -> None:
    """Replace some of a rank's company, in place, by more expensive samples that still fit into the time."""
    for _ in range(_REPLACED):
        left = np.flatnonzero(~chosen)[::-1]
        spare = time - int(cost[company].sum())
        if spare <= 0 or not len(company) or not len(left):
            return
        place = np.searchsorted(cost[left], cost[company] + spare, side="right") - 1
        gain = np.where(place >= 0, cost[left[place]] - cost[company], 0)
        best = int(gain.argmax())
        if gain[best] <= 0:
            return
        chosen[company[best]], chosen[left[place[best]]] = False, True
        company[best] = left[place[best]]
