"""Micro-batches: a rank's samples of a step, cut into parts of about equal cost that are computed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.solver import Ints, padded_loads
from lightning_freescale.balance.validation import Floats

Candidate = TypeVar("Candidate")

MOST_TRIED = 8
"""More micro-batches are not tried: each costs host work, and few exchanges are left to hide."""


class MicroBatches(NamedTuple):
    """The batch of a step, cut.

    Attributes:
        batches: the micro-batches, in the order in which they are computed.
        shares: of each in the weight of the rank's batch: they sum to 1.
        loss_is_sum: the batch's loss is the sum of those of its parts, not their mean by share.
    """

    batches: tuple[Any, ...]
    shares: tuple[float, ...]
    loss_is_sum: bool = False

    def map(self, fn: Callable[[Any], Any]) -> MicroBatches:
        """Return the same with a function applied to every micro-batch; this very batch if none becomes another."""
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
    """Return a rank's samples of a step as micro-batches of nearly equal cost, the most expensive first.

    Every rank begins with its most expensive one, so that micro-batches that are computed at the same time cost about the
    same. Each has a sample that weighs something: the mean loss over samples without targets is not a number.

    Args:
        samples: anything that numpy can index, such as a list.
        parts: how many micro-batches, at most :func:`most_parts`.
        costs: shape ``[samples]``.
        weights: of each sample in the loss, shape ``[samples]``; where all are 0, each counts the same.
        loss_is_sum: the loss is a sum over samples, not a mean.
        padded: each micro-batch is padded to its longest sample. Samples of about the same cost then come together, so that
            all micro-batches together cost least.

    Raises:
        ValueError: there are fewer samples that weigh something than ``parts``.
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
    """Return into how many micro-batches these samples can be cut: as many as samples that weigh something in the loss.

    Args:
        weights: of each sample, shape ``[samples]``; where all are 0, each counts the same.
    """
    return int(np.count_nonzero(_weighed(weights)))


def _weighed(weights: Floats) -> Floats:
    return weights if weights.any() else np.ones(len(weights))


def _parts(costs: Floats, parts: int, padded: bool) -> Ints:
    """Return the part of every sample, whatever it weighs."""
    if padded:
        return cast(Ints, assign(costs, 1, assignment_mode="free", padded=True, parts=parts).part_of_sample)
    return assign(costs, parts, assignment_mode="free").rank_of_sample


def _weighing_first(costs: Floats, parts: int, weighs: NDArray[np.bool_], padded: bool) -> Ints:
    """Return the part of every sample: those that weigh something by themselves, then the others, each to the cheapest part."""
    part_of_sample = np.empty(len(costs), dtype=np.int64)
    part_of_sample[weighs] = _parts(costs[weighs], parts, padded)
    loads = np.bincount(part_of_sample[weighs], costs[weighs], parts)
    others = np.flatnonzero(~weighs)
    for each in others[np.argsort(-costs[others], kind="stable")]:
        part_of_sample[each] = loads.argmin()
        loads[part_of_sample[each]] += costs[each]
    return part_of_sample


TRIAL_BLOCK = 6
"""Steps in a row with the same candidate."""


class Turns(Generic[Candidate]):
    """Which candidate each step has: a pure function of (epoch, step) between changes.

    Args:
        candidates: take turns from the first step on, :data:`TRIAL_BLOCK` steps each; one is had by all steps.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._phases = [((0, 0), tuple(candidates))]

    def change(self, candidates: Sequence[Candidate], epoch: int, step: int) -> None:
        """Let others take turns from a later step on; call it with the same arguments on every rank."""
        self._phases.append(((epoch, step), tuple(candidates)))

    def candidate(self, epoch: int, step: int) -> Candidate:
        """Return the candidate of a step."""
        _, candidates = self._phase(epoch, step)
        return candidates[_turn(epoch, step, len(candidates))]

    def measured(self, epoch: int, step: int) -> int | None:
        """Return the place of the candidate that a step is a measurement of.

        None if it is alone, if the step may follow upon another one, and before the last change.
        """
        begin, candidates = self._phases[-1]
        if len(candidates) == 1 or step % TRIAL_BLOCK == 0 or (epoch, step) <= begin:
            return None
        return _turn(epoch, step, len(candidates))

    @property
    def last(self) -> tuple[Candidate, ...]:
        """Those that take turns from the last change on."""
        return self._phases[-1][1]

    def _phase(self, epoch: int, step: int) -> tuple[tuple[int, int], tuple[Candidate, ...]]:
        return next((phase for phase in reversed(self._phases) if phase[0] <= (epoch, step)), self._phases[0])


def _turn(epoch: int, step: int, candidates: int) -> int:
    # the epoch, because short ones would not come to the last candidates
    return (step // TRIAL_BLOCK + epoch) % candidates


class MicroBatchSchedule:
    """How many micro-batches each step has: the same on every rank, a pure function of (epoch, step) between decisions.

    Args:
        micro_batches: a number, or ``"auto"``: candidates take turns until :meth:`decide`.
        batch_size: samples per rank and step; its divisors are the candidates.

    Attributes:
        auto: whether they were to be chosen by measurement.
        candidates: the numbers that may be chosen.
        handed_out: the last (epoch, step) whose number was used.
        measured: the number that measurements have found best, in this run or the one that it resumes; None if none have.
    """

    def __init__(self, micro_batches: int | Literal["auto"], batch_size: int) -> None:
        self.auto = micro_batches == "auto"
        self.candidates = [n for n in range(1, MOST_TRIED + 1) if batch_size % n == 0] if self.auto else [int(micro_batches)]
        self.handed_out = (0, -1)
        self.measured: int | None = None
        self._turns = Turns(self.candidates)

    def count(self, epoch: int, step: int) -> int:
        """Return the micro-batches of a step."""
        self.handed_out = max(self.handed_out, (epoch, step))
        return self._turns.candidate(epoch, step)

    def peek(self, epoch: int, step: int) -> int:
        """Return the same without handing the step out: it may still be decided otherwise."""
        return self._turns.candidate(epoch, step)

    @property
    def decided(self) -> bool:
        """Whether the number is known for all steps to come."""
        return len(self._turns.last) == 1

    @property
    def chosen(self) -> int | None:
        """The number that was decided for; None before."""
        return self._turns.last[0] if self.decided else None

    def decide(self, micro_batches: int, epoch: int, step: int, *, measured: bool = True) -> None:
        """Choose for all steps from one on; call it with the same arguments on every rank.

        Args:
            micro_batches: the number.
            epoch: of the first step that has it.
            step: that step.
            measured: whether measurements have found it best; else the run that resumes this one measures anew.

        Raises:
            RuntimeError: that step was handed out already, so that the ranks might differ in it.
        """
        self.take_turns([micro_batches], epoch, step)
        self.measured = micro_batches if measured else None

    def take_turns(self, candidates: Sequence[int], epoch: int, step: int) -> None:
        """Let others take turns from a step on; call it with the same arguments on every rank.

        Raises:
            RuntimeError: that step was handed out already, so that the ranks might differ in it.
        """
        if self.handed_out >= (epoch, step):
            raise RuntimeError(
                f"micro_batches={', '.join(map(str, candidates))} from step {step} of epoch {epoch} on: the loader has already "
                f"read up to step {self.handed_out[1]} of epoch {self.handed_out[0]}. Give FreeScaleDataModule a number of "
                "micro_batches, or less to prefetch"
            )
        self._turns.change(candidates, epoch, step)

    def settle(self, micro_batches: int) -> None:
        """Choose for all steps, while no loader has been read, or it will be made anew: nothing counts as handed out."""
        self.handed_out, self._turns = (0, -1), Turns([micro_batches])
