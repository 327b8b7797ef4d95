"""Steps cut by how many tokens (or how much cost) a rank may hold, instead of by a number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.solver import Ints, dearest_first
from lightning_freescale.balance.validation import is_non_negative, is_number, non_negative, whole_tokens

_GOLDEN = 2654435769
"""The golden ratio in 32 bits: its multiples lie evenly, however many there are."""


@dataclass(frozen=True, eq=False)
class Budget:
    """What a rank may hold in a step at most, given to :class:`BalancedSampler` in the place of a number of samples.

    Args:
        per_rank: tokens, or whatever ``sizes`` count, of a rank and step at most.
        sizes: tokens of every sample, shape ``[samples]``.

    Raises:
        ValueError: an argument does not fit, or a sample alone is above ``per_rank``.

    Examples:
        >>> from lightning_freescale.balance import BalancedSampler
        >>> sampler = BalancedSampler([9, 1, 4, 2, 8, 3], Budget(10, [9, 1, 4, 2, 8, 3]), num_replicas=2, rank=0)
        >>> len(sampler), [samples.tolist() for samples in sampler.plan(epoch=0, step=0)]
        (2, [[4], [3, 5]])
    """

    per_rank: float
    sizes: ArrayLike

    def __post_init__(self) -> None:
        if not (is_number(self.per_rank) and is_non_negative(self.per_rank) and self.per_rank):
            raise ValueError(f"Budget(per_rank={self.per_rank!r}): pass a finite number > 0")
        sizes = non_negative("Budget(sizes=...)", self.sizes)
        if sizes.max(initial=0.0) > self.per_rank:
            raise ValueError(
                f"Budget(per_rank={self.per_rank:g}): sample {int(sizes.argmax())} alone has {sizes.max():g}. Pass at least as "
                "many, or cut histories off"
            )

    @cached_property
    def in_whole_numbers(self) -> tuple[Ints, int]:
        """The sizes, rounded up, and ``per_rank``, rounded down; multiplied by a power of two if they are no whole numbers."""
        return whole_tokens(np.asarray(self.sizes, dtype=np.float64), self.per_rank, "Budget(sizes=...)")


class Cut(NamedTuple):
    """From where on an epoch has so many steps.

    Attributes:
        batches: steps before it.
        samples: samples of those.
        steps: how many have the rest.
    """

    batches: int
    samples: int
    steps: int


class BudgetSteps:
    """Deals the samples of an epoch out to as few steps as the budget allows, the same number in every epoch.

    Sorted by size, every run of as many samples as there are steps gives one to each step: the one that comes next in the
    drawn order. So the largest of each run make the largest step that there can be, and where its samples fit, those of any
    other step do, each on the rank of the one of its run: whatever is drawn, in every epoch. Steps have equally many samples,
    to one, and about equally many tokens. A sample is as likely to be in any step as in any other, but two of the same run
    never meet.

    Attributes:
        full_epoch: where the steps of an epoch that is not resumed begin and end, ``steps + 1`` positions.

    Raises:
        ValueError: there are fewer samples than ranks, or too few to cut.
    """

    def __init__(self, budget: Budget, ranks: int) -> None:
        self._budget = budget
        self._sizes, self._limit = budget.in_whole_numbers
        self._ranks = ranks
        steps, self._ranks_of_largest = self._fewest_steps(self._sizes, "BalancedSampler")
        self._whole = Cut(0, 0, steps)
        self.full_epoch = self._edges(self._whole)
        self._resumed = (0, [self._whole], 0, self._ranks_of_largest)

    @property
    def fill(self) -> float:
        """The share of the budget that an epoch uses."""
        return float(self._sizes.sum()) / (self._whole.steps * self._ranks * self._limit)

    def cuts(self, epoch: int) -> list[Cut]:
        """Return how an epoch is cut: more than once where it was resumed with another budget or on other ranks."""
        return self._resumed[1] if epoch == self._resumed[0] else [self._whole]

    def for_epoch(self, epoch: int) -> list[int]:
        """Return ``steps + 1`` positions; those before a new cut all stand where it was made."""
        return self._edges(self.cuts(epoch)[-1])

    def first_step(self, epoch: int) -> int:
        """Return the step that an epoch starts with."""
        return self._resumed[2] if epoch == self._resumed[0] else 0

    def ranks_within_budget(self, epoch: int, samples: Ints) -> Ints:
        """Return a rank for every sample of a step so that none is above the budget, shape ``[samples]``."""
        known = self._resumed[3] if epoch == self._resumed[0] else self._ranks_of_largest
        rank_of_sample = np.empty(len(samples), dtype=np.int64)
        rank_of_sample[dearest_first(self._sizes[samples])] = known[: len(samples)]
        return rank_of_sample

    def resume(self, epoch: int, batches: int, drawn: Ints, cuts: Sequence[Sequence[int]] | None = None) -> None:
        """Go on in ``epoch`` after ``batches`` steps, cut as the run before did, anew where this one needs another number.

        Args:
            epoch: the epoch in which the run stopped.
            batches: steps that it had done.
            drawn: the samples of the epoch in drawn order, shape ``[samples]``.
            cuts: those of the run before; this one's if not given.

        Raises:
            ValueError: what is left cannot be cut.
        """
        made = [Cut(*cut) for cut in cuts or [self._whole]] if batches else [self._whole]
        samples, ranks_of_largest = self._edges(made[-1])[batches], self._ranks_of_largest
        if 0 < samples < len(self._sizes):
            order = self.deal(drawn, made)
            steps, ranks_of_largest = self._fewest_steps(self._sizes[order[made[-1].samples :]], f"epoch {epoch}")
            if steps != made[-1].steps:
                left = self._sizes[order[samples:]]
                steps, ranks_of_largest = self._fewest_steps(left, f"what is left of epoch {epoch}")
                made.append(Cut(batches, samples, steps))
        self._resumed = (epoch, made, batches, ranks_of_largest)

    def deal(self, drawn: Ints, cuts: list[Cut]) -> Ints:
        """Return the samples of an epoch, step by step, shape ``[samples]``; those of a step in drawn order."""
        order = drawn
        for cut in cuts:
            rest = order[cut.samples :]
            order = np.concatenate([order[: cut.samples], rest[_dealt(self._sizes[rest], cut.steps)]])
        return order

    def _edges(self, cut: Cut) -> list[int]:
        counts = _counts(len(self._sizes) - cut.samples, cut.steps)
        return [cut.samples] * cut.batches + (cut.samples + np.append(0, counts.cumsum())).tolist()

    def _fewest_steps(self, sizes: Ints, what: str) -> tuple[int, Ints]:
        """Return a number of steps of which every one fits, whatever is drawn, and the ranks of its largest samples.

        It is the least that is found: one less does not fit.
        """
        ordered, most = np.sort(sizes)[::-1], len(sizes) // self._ranks
        too_few = max(1, -(-int(sizes.sum()) // (self._ranks * self._limit))) - 1  # of empty samples, too
        steps, found = too_few + 1, None
        while steps <= most and (found := self._packed(ordered, steps)) is None:
            too_few, steps = steps, min(steps + max(1, 2 * (steps - too_few)), most) if steps < most else most + 1
        if found is None:
            raise ValueError(
                f"{what}: {len(sizes)} samples for {self._ranks} ranks, with Budget(per_rank={self._budget.per_rank:g}), do "
                "not make steps in which every rank has a sample: use fewer ranks or a larger budget, or resume from the end "
                "of an epoch"
            )
        while steps - too_few > 1:
            between = (steps + too_few) // 2
            fits = self._packed(ordered, between)
            too_few, steps, found = (between, steps, found) if fits is None else (too_few, between, fits)
        return steps, found

    def _packed(self, ordered: Ints, steps: int) -> Ints | None:
        """Return the ranks of the samples of the largest step that there can be, None if they were not found to fit."""
        sizes = ordered[::steps]
        rank_of_sample = assign(sizes, self._ranks, assignment_mode="free").rank_of_sample
        fits = np.bincount(rank_of_sample, sizes).max() <= self._limit
        always = len(ordered) // steps  # the last of them is in some steps alone
        return rank_of_sample if fits and len(np.unique(rank_of_sample[:always])) == self._ranks else None


def _dealt(sizes: Ints, steps: int) -> Ints:
    """Return the places of samples, given in drawn order, step by step; see :class:`BudgetSteps`."""
    # of equal sizes, neighbours in the drawn order come into runs far apart, so that every run is from all over the order
    spread = np.argsort(np.arange(len(sizes)) * _GOLDEN % 2**32)
    by_size = spread[dearest_first(sizes[spread])]
    whole = len(sizes) // steps * steps
    step_of = np.empty(len(sizes), dtype=np.int64)
    step_of[np.sort(by_size[:whole].reshape(-1, steps), axis=1)] = np.arange(steps)
    step_of[np.sort(by_size[whole:])] = np.flatnonzero(np.diff(_counts_of_rest(len(sizes), steps)))
    return np.argsort(step_of, kind="stable")


def _counts(samples: int, steps: int) -> Ints:
    """Return how many samples each step has, shape ``[steps]``."""
    return samples // steps + np.diff(_counts_of_rest(samples, steps))


def _counts_of_rest(samples: int, steps: int) -> Ints:
    """Return how many of the samples that are left over the first 0, 1, ... steps have: they are evenly spread."""
    return np.arange(steps + 1) * (samples % steps) // steps
