"""Candidates for the settings of a run, compared by the time that steps take while they take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any, TypeAlias

from lightning_freescale.profiling.recording.records import Clock

MEASURED = 15
"""Steps of each candidate."""
LONGEST = 100
"""Steps of a trial for each candidate, those that cannot be timed included; then it ends without a result."""
WORTH_IT = 0.01
"""Share of a step that a candidate must save."""
AGREEING = 0.7
"""Share of the pairs of steps in which it must be the quicker one: chance alone makes some candidate quickest."""


Measured: TypeAlias = tuple[float, float]
"""A step of one rank: its wall time in seconds, and its predicted cost (0 if unknown)."""
Measurements: TypeAlias = tuple[list[list[Measured]], list[float]]
"""The steps of each candidate that one rank has measured, in their order, and the compute times of those of the first candidate
in seconds. There are no compute times if nothing asks for the time that is lost."""


@dataclass(frozen=True)
class SettingComparison:
    """What the candidates are worth against the first of them, in seconds, as means over ranks.

    Attributes:
        seconds: of a step with each candidate; the median, at the mean cost.
        saved: what each saves; the median over pairs of steps.
        agreeing: share of the pairs in which each is quicker.
        compute: of a step with the first; the median.
    """

    seconds: list[float]
    saved: list[float]
    agreeing: list[float]
    compute: float

    @property
    def best(self) -> int:
        """The candidate that saves most; the first, if none saves enough."""
        worth_it = [
            index
            for index, saved in enumerate(self.saved)
            if saved > WORTH_IT * self.seconds[0] and self.agreeing[index] >= AGREEING
        ]
        return max(worth_it, key=lambda index: self.saved[index], default=0)

    def lost(self, index: int = 0) -> float:
        """Return the seconds of a step with a candidate that are not the compute it takes with the first one.

        What a candidate adds to compute is lost as well: else the bubble would fall where the step takes longer.
        """
        return max(0.0, self.seconds[0] - self.saved[index] - self.compute)

    def remaining(self, index: int) -> float:
        """Return the share of the time lost with the first candidate that is lost with another; 0 if nothing was."""
        return self.lost(index) / self.lost() if self.lost() else 0.0

    def bubble(self, index: int = 0) -> float:
        """Return the bubble with a candidate."""
        seconds = self.seconds[0] - self.saved[index]
        return self.lost(index) / seconds if seconds > 0 else 0.0


@dataclass
class _Step:
    """A step that has begun: its place, the candidate that it measures, if any, and when it began."""

    epoch: int
    step: int
    candidate: int | None
    cost: float
    number: int
    start: Any

    def is_followed_by(self, other: _Step) -> bool:
        """Whether the time between the two is that of one step."""
        return (other.epoch, other.step) == (self.epoch, self.step + 1)


class SettingTrial:
    """Times this rank's steps until each candidate has been measured often enough.

    Args:
        candidates: how many.
        clock: of the rank's device.
        compute: returns, of a step that has just ended, by its number, what will tell its compute time in seconds; None if
            the time that is lost does not matter.
    """

    def __init__(self, candidates: int, clock: Clock, compute: Callable[[int], Callable[[], float]] | None = None) -> None:
        self._clock, self._compute_of = clock, compute
        self._under_way: _Step | None = None
        self._compute: list[Callable[[], float]] = []  # asked at the end, so that it takes no time of steps
        # stamps, as the clock tells their seconds only when they are long past
        self._measured: list[list[tuple[_Step, Any]]] = [[] for _ in range(candidates)]
        self.steps = 0
        """Steps so far, measured or not."""

    def start_step(self, epoch: int, step: int, candidate: int | None, cost: float = 0.0, number: int = 0) -> bool:
        """Note that a step begins.

        Args:
            epoch: of the step.
            step: of the epoch.
            candidate: that it is a measurement of; None if of none.
            cost: predicted, of the rank that has most to compute.
            number: of the step, for its compute time.

        Returns:
            Whether the trial goes on; the same on every rank.
        """
        before, now = self._under_way, _Step(epoch, step, candidate, cost, number, self._clock.stamp())
        if before is not None and before.candidate is not None and before.is_followed_by(now):
            measured = self._measured[before.candidate]
            if len(measured) < MEASURED:
                measured.append((before, now.start))
                if self._compute_of is not None and before.candidate == 0:
                    self._compute.append(self._compute_of(before.number))
        self._under_way = now
        self.steps += 1
        return not self.is_complete and self.steps < LONGEST * len(self._measured)

    def pause(self) -> None:
        """Leave the step that is under way out: something else runs in it."""
        if self._under_way is not None:
            self._under_way.candidate = None

    @property
    def is_complete(self) -> bool:
        """Whether every candidate has been measured often enough."""
        return all(len(measured) == MEASURED for measured in self._measured)

    def measurements(self) -> Measurements:
        """Return what this rank has measured. Waits for the device."""
        seconds = self._clock.seconds
        steps = [
            [(float(seconds(end) - seconds(step.start)), float(step.cost)) for step, end in each] for each in self._measured
        ]
        return steps, [float(compute()) for compute in self._compute]


def compare(ranks: Sequence[Measurements]) -> SettingComparison:
    """Compare candidates by what all ranks have measured. Sums run in the same order everywhere, so all ranks find the same.

    Batches differ more than settings do. So each step's time is brought to the mean cost, by the cost's share in it that the
    times themselves show (the median slope between steps of the same candidate: it is 0 where the plan explains nothing), and
    the steps of two candidates are compared in pairs, the first with the first and so on, so that a drift is in both.
    """
    steps = [[_mean_of_ranks(of_ranks) for of_ranks in zip(*each)] for each in zip(*(steps for steps, _ in ranks))]
    slope = _seconds_per_cost(steps)
    usual = fmean(cost for each in steps for _, cost in each)
    seconds = [[seconds - slope * (cost - usual) for seconds, cost in each] for each in steps]
    compute = [fmean(of_ranks) for of_ranks in zip(*(compute for _, compute in ranks))]
    saved = [[first - other for first, other in zip(seconds[0], each)] for each in seconds]
    return SettingComparison(
        seconds=[median(each) for each in seconds],
        saved=[median(each) for each in saved],
        agreeing=[fmean(float(one > 0) for one in each) for each in saved],
        compute=median(compute) if compute else 0.0,
    )


def _mean_of_ranks(ranks: Sequence[Measured]) -> Measured:
    return fmean(seconds for seconds, _ in ranks), ranks[0][1]


def _seconds_per_cost(steps: list[list[Measured]]) -> float:
    slopes = [
        (one[0] - other[0]) / (one[1] - other[1])
        for each in steps
        for one, other in combinations(each, 2)
        if one[1] != other[1]
    ]
    return max(0.0, median(slopes)) if slopes else 0.0
