"""Comparison of candidate settings by the wall time of steps that alternate between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median, quantiles
from typing import Any, TypeAlias

from lightning_freescale.profiling.recording.records import Clock

MEASURED = 15  # measured steps of each candidate
LONGEST = 100  # steps of a trial per candidate, including steps that cannot be timed, after which it ends without a result
WORTH_IT = 0.01  # share of a step that a candidate must save
AGREEING = 0.7
"""Share of the pairs of steps in which a candidate must be faster. By chance alone, some candidate is always the fastest."""


Measured: TypeAlias = tuple[float, float]
"""A step of one rank: its wall time in seconds, and its predicted cost (0 if unknown)."""
Measurements: TypeAlias = tuple[list[list[Measured]], list[float]]
"""One rank's measured steps of each candidate in order, and the compute times in seconds of the first candidate's steps. The
compute times are empty if they were not requested."""


@dataclass(frozen=True)
class SettingComparison:
    """Comparison of candidates with the first one, in seconds, as means over ranks."""

    seconds: list[float]  # median step time with each candidate, at the mean cost
    saved: list[float]  # median time that each candidate saves, over pairs of steps
    agreeing: list[float]  # share of the pairs in which each candidate is faster
    compute: float  # median compute time of a step with the first candidate
    pairs: int  # number of pairs of steps of each candidate
    spread: float  # largest distance between the quartiles of a candidate's step times

    @property
    def best(self) -> int:
        """The candidate that saves most; the first one if none saves enough."""
        worth_it = [
            index
            for index, saved in enumerate(self.saved)
            if saved > WORTH_IT * self.seconds[0] and self.agreeing[index] >= AGREEING
        ]
        return max(worth_it, key=lambda index: self.saved[index], default=0)

    def explain(self, chosen: int, names: Sequence[str], checks: bool) -> str:
        """Return why the candidate with the lowest median time lost; empty if it won. With ``checks``, any saving suffices."""
        fastest = min(range(len(self.seconds)), key=self.seconds.__getitem__)
        if fastest == chosen:
            return ""
        judged = fastest or chosen
        pairs = "" if checks else f" ({math.ceil(AGREEING * self.pairs)} needed)"
        most = self.saved[chosen] if judged != chosen else 0.0
        least = "more than 0" if checks else f"{1e3 * max(WORTH_IT * self.seconds[0], most):.1f}"
        return (
            f"{names[judged]} was faster than {names[0]} in {round(self.agreeing[judged] * self.pairs)} of {self.pairs} pairs "
            f"of steps{pairs}, by {1e3 * self.saved[judged]:.1f} ms in the median ({least} needed), and the step times of one "
            f"value spread by {1e3 * self.spread:.1f} ms"
        )

    def lost(self, index: int = 0) -> float:
        """Return the seconds of a step with a candidate beyond the compute time of the first candidate.

        Additional compute of a candidate counts as lost. Otherwise the bubble would fall although the step takes longer.
        """
        return max(0.0, self.seconds[0] - self.saved[index] - self.compute)

    def remaining(self, index: int) -> float:
        """Return the time lost with a candidate as a share of the time lost with the first one; 0 if nothing was lost."""
        return self.lost(index) / self.lost() if self.lost() else 0.0

    def bubble(self, index: int = 0) -> float:
        """Return the bubble with a candidate: lost time as a share of the step."""
        seconds = self.seconds[0] - self.saved[index]
        return self.lost(index) / seconds if seconds > 0 else 0.0


@dataclass
class _Step:
    epoch: int
    step: int
    candidate: int | None  # None for a step that measures none
    cost: float
    number: int
    start: Any  # stamp of the clock


class SettingTrial:
    """Times this rank's steps until each candidate has been measured often enough.

    ``compute`` maps the number of a step that has just ended to a function that returns its compute time in seconds. It is None
    if compute times are not needed.
    """

    def __init__(self, candidates: int, clock: Clock, compute: Callable[[int], Callable[[], float]] | None = None) -> None:
        self._clock, self._compute_of = clock, compute
        self._current: _Step | None = None
        self._compute: list[Callable[[], float]] = []  # called at the end, so that they take no time of steps
        # stamps, because the clock knows their seconds only later
        self._measured: list[list[tuple[_Step, Any]]] = [[] for _ in range(candidates)]
        self.steps = 0
        """The number of steps so far, measured or not."""

    def start_step(self, epoch: int, step: int, candidate: int | None, cost: float = 0.0, number: int = 0) -> bool:
        """Record the start of a step, and return whether the trial continues; the same on every rank.

        ``candidate`` is None for a step that measures none, and ``number`` is the number of the step for its compute time.
        """
        before, now = self._current, _Step(epoch, step, candidate, cost, number, self._clock.stamp())
        # only between two consecutive steps of an epoch, the time is that of one step
        if before is not None and before.candidate is not None and (epoch, step) == (before.epoch, before.step + 1):
            measured = self._measured[before.candidate]
            if len(measured) < MEASURED:
                measured.append((before, now.start))
                if self._compute_of is not None and before.candidate == 0:
                    self._compute.append(self._compute_of(before.number))
        self._current = now
        self.steps += 1
        return not self.is_complete and self.steps < LONGEST * len(self._measured)

    def pause(self) -> None:
        """Exclude the current step."""
        if self._current is not None:
            self._current.candidate = None

    @property
    def is_complete(self) -> bool:
        """Whether every candidate has been measured often enough."""
        return all(len(measured) == MEASURED for measured in self._measured)

    def measurements(self) -> Measurements:
        """Return this rank's measurements. It waits for the device."""
        seconds = self._clock.seconds
        steps = [
            [(float(seconds(end) - seconds(step.start)), float(step.cost)) for step, end in each] for each in self._measured
        ]
        return steps, [float(compute()) for compute in self._compute]


def compare(ranks: Sequence[Measurements]) -> SettingComparison:
    """Compare candidates by the measurements of all ranks, in the same order everywhere, so that all ranks agree bitwise.

    Batches differ more than settings. So each time is scaled to the mean cost, with the seconds per unit of cost that the times
    show: the median slope between steps of the same candidate, which is 0 where costs explain nothing. Steps of two candidates
    are compared in pairs, first with first and so on, so that a drift affects both.
    """
    by_candidate = zip(*(steps for steps, _ in ranks))
    steps = [[(fmean(s for s, _ in of_ranks), of_ranks[0][1]) for of_ranks in zip(*each)] for each in by_candidate]
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
        pairs=len(seconds[0]),
        spread=max(end - start for start, _, end in map(quantiles, seconds)),
    )


def _seconds_per_cost(steps: list[list[Measured]]) -> float:
    slopes = [
        (one[0] - other[0]) / (one[1] - other[1])
        for each in steps
        for one, other in combinations(each, 2)
        if one[1] != other[1]
    ]
    return max(0.0, median(slopes)) if slopes else 0.0
