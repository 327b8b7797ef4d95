"""Micro-batches: parts of a rank's samples with about equal cost, which are computed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.solver.bounds import Ints
from lightning_freescale.balance.solver.padded import padded_loads
from lightning_freescale.balance.validation import Floats

Candidate = TypeVar("Candidate")

MOST_TRIED = 8
"""Maximum number of micro-batches to try, because each costs host work and hides less than the one before."""


class MicroBatches(NamedTuple):
    """The micro-batches of a batch.

    Attributes:
        batches: The micro-batches in the order of computation.
        shares: Shares of the micro-batches in the weight of the batch, which sum to 1.
        loss_is_sum: True if the loss of the batch is the sum of the micro-batches' losses, False if it is their mean by share.
    """

    batches: tuple[Any, ...]
    shares: tuple[float, ...]
    loss_is_sum: bool = False

    def map(self, fn: Callable[[Any], Any]) -> MicroBatches:
        """Return the results of a function for all micro-batches, or this object if no micro-batch changes."""
        batches = tuple(fn(batch) for batch in self.batches)
        return self if all(map(is_, batches, self.batches)) else MicroBatches(batches, *self[1:])


def cut(
    samples: Any,
    parts: int,
    costs: Floats,
    weights: Floats,
    *,
    loss_is_sum: bool = False,
    padded: bool = False,
) -> MicroBatches:
    """Return a rank's samples of a step as micro-batches of nearly equal cost, the most expensive micro-batch first.

    Micro-batches that the ranks compute at the same time then cost about the same. Each has a sample with a weight, because
    the mean loss over samples without targets is not a number. With ``padded``, each micro-batch is padded to its longest
    sample, and samples of similar cost form a micro-batch. ``parts`` is at most :func:`most_parts`. If all ``weights`` in the
    loss are 0, all samples count alike. For ``loss_is_sum``, see :class:`MicroBatches`.
    """
    weighed = _weighed(weights)
    part_of_sample = _parts(costs, parts, padded)
    if len(np.unique(part_of_sample[weighed > 0])) < parts:
        part_of_sample = _weighing_first(costs, parts, weighed > 0, padded)
    loads = padded_loads(costs, part_of_sample, None, parts) if padded else np.bincount(part_of_sample, costs, parts)
    by_load = np.argsort(-loads, kind="stable")
    places = [np.flatnonzero(part_of_sample == part) for part in by_load]
    shares = np.array([weighed[each].sum() for each in places]) / weighed.sum()
    return MicroBatches(tuple([samples[place] for place in each] for each in places), tuple(shares.tolist()), loss_is_sum)


def most_parts(weights: Floats) -> int:
    """Return the maximum number of micro-batches: the number of samples with a weight, or all samples if all weights are 0."""
    return int(np.count_nonzero(_weighed(weights)))


def _weighed(weights: Floats) -> Floats:
    return weights if weights.any() else np.ones(len(weights))


def _parts(costs: Floats, parts: int, padded: bool) -> Ints:
    if padded:
        return cast(Ints, assign(costs, 1, assignment_mode="free", padded=True, parts=parts).part_of_sample)
    return assign(costs, parts, assignment_mode="free").rank_of_sample


def _weighing_first(costs: Floats, parts: int, weighs: NDArray[np.bool_], padded: bool) -> Ints:
    """Return the part of each sample: samples with a weight are assigned first, then each other one to the cheapest part."""
    part_of_sample = np.empty(len(costs), dtype=np.int64)
    part_of_sample[weighs] = _parts(costs[weighs], parts, padded)
    loads = np.bincount(part_of_sample[weighs], costs[weighs], parts)
    others = np.flatnonzero(~weighs)
    for each in others[np.argsort(-costs[others], kind="stable")]:
        part_of_sample[each] = loads.argmin()
        loads[part_of_sample[each]] += costs[each]
    return part_of_sample


TRIAL_BLOCK = 6
"""Number of consecutive steps with the same candidate."""


class Turns(Generic[Candidate]):
    """The candidate of each step. Candidates take turns of :data:`TRIAL_BLOCK` steps.

    The candidate is a pure function of (epoch, step) between changes.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._phases = [((0, 0), tuple(candidates))]

    def change(self, candidates: Sequence[Candidate], epoch: int, step: int) -> None:
        """Use other candidates from a later step on. Call this with the same arguments on each rank."""
        self._phases.append(((epoch, step), tuple(candidates)))

    def candidate(self, epoch: int, step: int) -> Candidate:
        """Return the candidate of a step."""
        phases = (candidates for start, candidates in reversed(self._phases) if start <= (epoch, step))
        candidates = next(phases, self._phases[0][1])
        return candidates[_turn(epoch, step, len(candidates))]

    def measured(self, epoch: int, step: int) -> int | None:
        """Return the index of the candidate that a step measures.

        The result is None if there is only one candidate, for the first step of a turn, and before the last change.
        """
        begin, candidates = self._phases[-1]
        if len(candidates) == 1 or step % TRIAL_BLOCK == 0 or (epoch, step) <= begin:
            return None
        return _turn(epoch, step, len(candidates))

    @property
    def last(self) -> tuple[Candidate, ...]:
        """The candidates since the last change."""
        return self._phases[-1][1]


def _turn(epoch: int, step: int, candidates: int) -> int:
    # plus the epoch, because a short epoch would never reach the last candidates
    return (step // TRIAL_BLOCK + epoch) % candidates


class MicroBatchSchedule:
    """The number of micro-batches of each step, the same on each rank.

    It is a pure function of (epoch, step) between decisions.

    Args:
        micro_batches: A number, or ``"auto"`` for candidates that take turns until :meth:`decide`.
        batch_size: Number of samples per rank and step. The candidates are its divisors up to 8.

    Attributes:
        auto: True if the number is chosen by measurement.
        candidates: The possible numbers.
        handed_out: The last (epoch, step) whose number was used.
        measured: The best number by measurements of this run or of the run that it resumes; None if unknown.
    """

    def __init__(self, micro_batches: int | Literal["auto"], batch_size: int) -> None:
        self.auto = micro_batches == "auto"
        self.candidates = [n for n in range(1, MOST_TRIED + 1) if batch_size % n == 0] if self.auto else [int(micro_batches)]
        self.handed_out = (0, -1)
        self.measured: int | None = None
        self._turns = Turns(self.candidates)

    def count(self, epoch: int, step: int) -> int:
        """Return the number of micro-batches of a step, and record that it was used."""
        self.handed_out = max(self.handed_out, (epoch, step))
        return self._turns.candidate(epoch, step)

    def peek(self, epoch: int, step: int) -> int:
        """Return the number of micro-batches of a step, which a decision may still change."""
        return self._turns.candidate(epoch, step)

    @property
    def decided(self) -> bool:
        """True if the number is known for all future steps."""
        return len(self._turns.last) == 1

    @property
    def chosen(self) -> int | None:
        """The decided number; None before the decision."""
        return self._turns.last[0] if self.decided else None

    def decide(self, micro_batches: int, epoch: int, step: int, *, measured: bool = True) -> None:
        """Use a number from a step on. Call this with the same arguments on each rank.

        If the number is not the best one by measurement (``measured``), a run that resumes this one measures again.

        Raises:
            RuntimeError: The loader has read the step, so that the plans of the ranks could differ.
        """
        self.take_turns([micro_batches], epoch, step)
        self.measured = micro_batches if measured else None

    def take_turns(self, candidates: Sequence[int], epoch: int, step: int) -> None:
        """Use other candidates from a step on, see :meth:`decide`."""
        if self.handed_out >= (epoch, step):
            raise RuntimeError(
                f"micro_batches={', '.join(map(str, candidates))} from step {step} of epoch {epoch} on: the loader has already "
                f"read up to step {self.handed_out[1]} of epoch {self.handed_out[0]}. Pass a number of micro_batches to "
                "FreeScaleDataModule, or prefetch less."
            )
        self._turns.change(candidates, epoch, step)

    def settle(self, micro_batches: int) -> None:
        """Use a number for all steps, before a loader is read or while it is replaced by a new one."""
        self.handed_out, self._turns = (0, -1), Turns([micro_batches])
