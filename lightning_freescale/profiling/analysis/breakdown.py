"""Split the wall time of every rank's step by what it went to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.intervals import COMPUTE, Interval, hidden_seconds, intervals_of, times_beside
from lightning_freescale.profiling.recording.records import ResolvedStep


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of one rank's step. All but ``wall`` and ``hidden`` add up to ``wall``; ``unexplained`` is what is left over.

    ``wait`` is exposed communication that could not be divided into straggler wait and transfer; ``hidden`` is the time of
    compute behind which an exchange was under way, those left out of which no more than a bound is known.
    """

    wall: float
    data_wait: float
    forward: float
    backward: float
    optimizer: float
    straggler_wait: float
    transfer: float
    wait: float
    host_overhead: float
    unexplained: float
    hidden: float

    @property
    def compute(self) -> float:
        """Seconds of forward, backward and optimizer."""
        return self.forward + self.backward + self.optimizer


PART_NAMES = tuple(f.name for f in fields(StepBreakdown))
ADDENDS = PART_NAMES[1:-1]
"""The parts that add up to the wall time."""
_PART_OF_KIND = {"data": "data_wait", "host": "host_overhead"}


def attribute(step: ResolvedStep, last: Sequence[float] | None, intervals: Sequence[Interval] | None = None) -> StepBreakdown:
    """Return the breakdown of one rank's step.

    Args:
        step: of one rank.
        last: when the last rank arrived at each of the step's collectives. While a rank waits for a collective, the time until
            then is straggler wait, the rest transfer; None leaves waits undivided.
        intervals: of the step, if they are known already.
    """
    cut = intervals_of(step, last) if intervals is None else intervals
    seconds: dict[str, float] = defaultdict(float)
    for interval in cut:
        seconds[_PART_OF_KIND.get(interval.kind, interval.kind)] += interval.end - interval.start
    wall = step.end - step.start - seconds["pause"]
    known = {name: seconds[name] for name in ADDENDS if name != "unexplained"}
    rest = wall - sum(known.values())  # not the unexplained intervals' sum, so that the parts add up to the last digit
    beside = [one for one in (*step.collectives, *step.hidden) if not one.at_most]
    hidden = hidden_seconds(times_beside(beside), cut)
    return StepBreakdown(wall, **known, unexplained=rest, hidden=hidden)


def bubble(breakdown: NDArray[np.float64]) -> float:
    """Return 1 - compute / wall over all ranks and steps; ``breakdown`` has shape ``[..., len(PART_NAMES)]``."""
    total = StepBreakdown(*breakdown.reshape(-1, len(PART_NAMES)).sum(axis=0))
    return float(1 - total.compute / total.wall) if total.wall else 0.0


def as_array(steps: Sequence[StepBreakdown]) -> NDArray[np.float64]:
    """Return breakdowns as an array of shape ``[steps, len(PART_NAMES)]``."""
    return np.array([list(vars(step).values()) for step in steps]).reshape(-1, len(PART_NAMES))


def column(breakdown: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Return one part of such an array, or the sum ``"compute"``; its last axis is gone."""
    if name == "compute":
        first = PART_NAMES.index(COMPUTE[0])
        return breakdown[..., first : first + len(COMPUTE)].sum(axis=-1)
    return breakdown[..., PART_NAMES.index(name)]
