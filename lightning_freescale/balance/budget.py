"""Steps whose size is a maximum number of tokens (or cost) of a rank, instead of a number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.solver.bounds import Ints, dearest_first
from lightning_freescale.balance.validation import is_non_negative, non_negative, whole_tokens

_GOLDEN = 2654435769
"""The golden ratio in 32 bits, whose multiples are evenly spread."""


@dataclass(frozen=True, eq=False)
class Budget:
    """The maximum number of tokens of a rank and step. :class:`BalancedSampler` takes it in place of a number of samples.

    Args:
        per_rank: Maximum number of tokens, in the unit of ``sizes``, of a rank and step.
        sizes: Tokens of each sample, shape ``[samples]``.

    Raises:
        ValueError: An argument is invalid, or a single sample is above ``per_rank``.

    Examples:
        >>> from lightning_freescale.balance import BalancedSampler
        >>> sampler = BalancedSampler([9, 1, 4, 2, 8, 3], Budget(10, [9, 1, 4, 2, 8, 3]), num_replicas=2, rank=0)
        >>> len(sampler), [samples.tolist() for samples in sampler.plan(epoch=0, step=0)]
        (2, [[4], [3, 5]])
    """

    per_rank: float
    sizes: ArrayLike

    def __post_init__(self) -> None:
        if not (isinstance(self.per_rank, Real) and is_non_negative(self.per_rank) and self.per_rank):
            raise ValueError(f"Budget(per_rank={self.per_rank!r}): pass a finite number > 0")
        sizes = non_negative("Budget(sizes=...)", self.sizes)
        if sizes.max(initial=0.0) > self.per_rank:
            raise ValueError(
                f"Budget(per_rank={self.per_rank:g}) is too small: sample {int(sizes.argmax())} alone has {sizes.max():g}. "
                "Pass at least that number, or truncate the histories."
            )

    @cached_property
    def in_whole_numbers(self) -> tuple[Ints, int]:
        """The sizes, rounded up, and ``per_rank``, rounded down, as :func:`whole_tokens` returns them."""
        return whole_tokens(np.asarray(self.sizes, dtype=np.float64), self.per_rank, "Budget(sizes=...)")


class Cut(NamedTuple):
    """A point in an epoch at which the remaining samples are divided into steps."""

    batches: int  # number of steps before it
    samples: int  # number of samples of those steps
    steps: int  # number of steps of the remaining samples


class BudgetSteps:
    """The division of an epoch into as few steps as the budget allows, the same number in every epoch.

    The samples, sorted by size, are divided into runs of as many samples as there are steps. Each step gets one sample of each
    run: the next one in the drawn order. The largest samples of all runs together are the largest possible step. If that step
    fits, every step of every epoch fits, with each sample on the rank of the largest one of its run. The numbers of samples of
    two steps differ by at most one, and their numbers of tokens are about equal. A sample is equally likely to be in each
    step, but two samples of the same run are never in the same step.

    Attributes:
        full_epoch: The boundaries of the steps of an epoch that is not resumed, ``steps + 1`` positions.

    Raises:
        ValueError: There are too few samples for the ranks.
    """

    def __init__(self, budget: Budget, ranks: int) -> None:
        self._budget = budget
        self._sizes, self._limit = budget.in_whole_numbers
        self._ranks = ranks
        steps, self._ranks_of_largest = self._fewest_steps(self._sizes, "BalancedSampler")
        self._whole = Cut(0, 0, steps)
        self.full_epoch = self._edges(self._whole)
        self._resumed = (0, [self._whole], self._ranks_of_largest)

    @property
    def fill(self) -> float:
        """The share of the budget that an epoch uses, 0 to 1."""
        return float(self._sizes.sum()) / (self._whole.steps * self._ranks * self._limit)

    def cuts(self, epoch: int) -> list[Cut]:
        """Return the cuts of an epoch: several if it was resumed with another budget or number of ranks."""
        return self._resumed[1] if epoch == self._resumed[0] else [self._whole]

    def for_epoch(self, epoch: int) -> list[int]:
        """Return the boundaries of the steps, ``steps + 1`` positions; those before the last cut are equal to it."""
        return self._edges(self.cuts(epoch)[-1])

    def ranks_within_budget(self, epoch: int, samples: Ints) -> Ints:
        """Return a rank for each sample of a step so that no rank is above the budget, shape ``[samples]``."""
        known = self._resumed[2] if epoch == self._resumed[0] else self._ranks_of_largest
        rank_of_sample = np.empty(len(samples), dtype=np.int64)
        rank_of_sample[dearest_first(self._sizes[samples])] = known[: len(samples)]
        return rank_of_sample

    def resume(self, epoch: int, batches: int, drawn: Ints, cuts: Sequence[Sequence[int]] | None = None) -> None:
        """Resume ``epoch`` after ``batches`` steps; see :meth:`BalancedSampler.resume`.

        The remaining samples are divided again if this run needs another number of steps for them. ``drawn`` holds the samples
        of the epoch in drawn order, shape ``[samples]``.
        """
        made = [Cut(*cut) for cut in cuts or [self._whole]] if batches else [self._whole]
        samples, ranks_of_largest = self._edges(made[-1])[batches], self._ranks_of_largest
        if 0 < samples < len(self._sizes):
            order = self.deal(drawn, made)
            steps, ranks_of_largest = self._fewest_steps(self._sizes[order[made[-1].samples :]], f"epoch {epoch}")
            if steps != made[-1].steps:
                left = self._sizes[order[samples:]]
                steps, ranks_of_largest = self._fewest_steps(left, f"the rest of epoch {epoch}")
                made.append(Cut(batches, samples, steps))
        self._resumed = (epoch, made, ranks_of_largest)

    def deal(self, drawn: Ints, cuts: list[Cut]) -> Ints:
        """Return the samples of an epoch, step by step, shape ``[samples]``; the samples of a step are in drawn order."""
        order = drawn
        for cut in cuts:
            rest = order[cut.samples :]
            order = np.concatenate([order[: cut.samples], rest[_dealt(self._sizes[rest], cut.steps)]])
        return order

    def _edges(self, cut: Cut) -> list[int]:
        left = len(self._sizes) - cut.samples
        ends = left // cut.steps * np.arange(cut.steps + 1) + _counts_of_rest(left, cut.steps)
        return [cut.samples] * cut.batches + (cut.samples + ends).tolist()

    def _fewest_steps(self, sizes: Ints, what: str) -> tuple[int, Ints]:
        """Return the smallest number of steps found to fit in any order, and the ranks of the largest step's samples."""
        ordered, most = np.sort(sizes)[::-1], len(sizes) // self._ranks
        too_few = max(1, -(-int(sizes.sum()) // (self._ranks * self._limit))) - 1  # at least one step, even of empty samples
        steps, found = too_few + 1, None
        while steps <= most and (found := self._packed(ordered, steps)) is None:
            too_few, steps = steps, min(steps + max(1, 2 * (steps - too_few)), most) if steps < most else most + 1
        if found is None:
            raise ValueError(
                f"{what}: {len(sizes)} samples for {self._ranks} ranks cannot be divided into steps with a sample on each rank "
                f"within Budget(per_rank={self._budget.per_rank:g}). Use fewer ranks or a larger budget, or resume from a "
                "checkpoint made at the end of an epoch."
            )
        while steps - too_few > 1:
            between = (steps + too_few) // 2
            fits = self._packed(ordered, between)
            too_few, steps, found = (between, steps, found) if fits is None else (too_few, between, fits)
        return steps, found

    def _packed(self, ordered: Ints, steps: int) -> Ints | None:
        """Return the ranks of the samples of the largest possible step, None if no plan within the budget was found."""
        sizes = ordered[::steps]
        rank_of_sample = assign(sizes, self._ranks, assignment_mode="free").rank_of_sample
        fits = np.bincount(rank_of_sample, sizes).max() <= self._limit
        always = len(ordered) // steps  # number of samples in every step; some steps have one more
        return rank_of_sample if fits and len(np.unique(rank_of_sample[:always])) == self._ranks else None


def _dealt(sizes: Ints, steps: int) -> Ints:
    """Return the positions in the drawn order, step by step; see :class:`BudgetSteps`."""
    # among equal sizes, neighbours in the drawn order go to distant runs, so that each run covers the whole order
    spread = np.argsort(np.arange(len(sizes)) * _GOLDEN % 2**32)
    by_size = spread[dearest_first(sizes[spread])]
    whole = len(sizes) // steps * steps
    step_of = np.empty(len(sizes), dtype=np.int64)
    step_of[np.sort(by_size[:whole].reshape(-1, steps), axis=1)] = np.arange(steps)
    step_of[np.sort(by_size[whole:])] = np.flatnonzero(np.diff(_counts_of_rest(len(sizes), steps)))
    return np.argsort(step_of, kind="stable")


def _counts_of_rest(samples: int, steps: int) -> Ints:
    """Return how many of the samples left over by equal counts the first 0, 1, ... steps have; they are evenly spread."""
    return np.arange(steps + 1) * (samples % steps) // steps
