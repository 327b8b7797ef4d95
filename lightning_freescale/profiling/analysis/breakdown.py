"""Cut a step into intervals without overlap, each of one kind, and divide its wall time into parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, combinations_with_replacement, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep

COMPUTE = ("forward", "backward", "optimizer")
WAITS = ("straggler_wait", "transfer", "wait")
_AT_ONCE = 20e-6
_SECTIONS = {
    ("", "data"): "loop, before the batch",
    ("data", "data"): "loop, before the batch",
    ("data", "forward"): "hooks before forward",
    ("forward", "backward"): "between forward and backward",
    ("backward", "optimizer"): "between backward and optimizer",
    ("forward", "optimizer"): "between backward and optimizer",
    **dict.fromkeys(combinations_with_replacement(reversed(COMPUTE), 2), "between optimizers"),
    **dict.fromkeys(product(COMPUTE, ("", "data")), "hooks after the step"),
}
"""The section of the loop or its hooks between two stages. Other gaps, as in a loop that skips a stage, are unexplained. If
they counted as overhead, a missing span would never show."""


class Arrival(NamedTuple):
    """The last rank that arrived at an exchange, and its time."""

    seconds: float
    rank: int


def arrivals_of(step: ResolvedStep) -> dict[str, float]:
    """Return the arrival of a rank at each collective of its step, by key."""
    return {collective.key: collective.arrive for collective in step.collectives}


def last_arrivals(ranks: Iterable[Mapping[str, float]]) -> dict[str, Arrival]:
    """Return the last arrival at each collective of one step, by key, from the arrivals of every rank."""
    last: dict[str, Arrival] = {}
    for rank, arrivals in enumerate(ranks):
        for key, seconds in arrivals.items():
            if key not in last or seconds > last[key].seconds:
                last[key] = Arrival(seconds, rank)
    return last


def intervals_of(step: ResolvedStep, last: Sequence[float] | None) -> list[Interval]:
    """Return the step as intervals from its start to its end. Among overlapping spans and waits, a pause or the latest counts.

    ``last`` has the last arrival at each collective: a wait is straggler wait until then and transfer afterwards. With None,
    waits are not divided.
    """
    stages = [span for span in step.spans if span.end > span.start]
    # named by the index, because collectives of the same name have separate waits
    waits = [Interval("wait", str(k), c.start, c.end) for k, c in enumerate(step.collectives) if c.end > c.start]
    return _explain_gaps([part for cut in _cut([*stages, *waits], step.start, step.end) for part in _divide(cut, step, last)])


def wall_of(step: ResolvedStep) -> float:
    """Return the seconds of a step without pauses. Pauses may be nested, because validation may save a checkpoint."""
    pauses = merged((max(span.start, step.start), min(span.end, step.end)) for span in step.spans if span.kind == "pause")
    return step.end - step.start - sum(end - start for start, end in pauses)


def hidden_seconds(exchanges: Iterable[tuple[float, float]], intervals: Iterable[Interval]) -> float:
    """Return the time of compute during which at least one of the exchanges (start, end) ran."""
    union = merged(exchanges)
    busy = [interval for interval in intervals if interval.kind in COMPUTE] if union else ()
    return sum(max(0.0, min(end, i.end) - max(start, i.start)) for start, end in union for i in busy)


def times_beside(exchanges: Iterable[ResolvedCollective]) -> list[tuple[float, float]]:
    """Return start and end of the exchanges that ran beside other work, without those that the rank waited for at once."""
    return [(one.arrive, one.done) for one in exchanges if one.end == one.start or one.start - one.arrive > _AT_ONCE]


def merged(periods: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    union: list[tuple[float, float]] = []
    for start, end in sorted(periods):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


def _divide(interval: Interval, step: ResolvedStep, last: Sequence[float] | None) -> list[Interval]:
    if interval.kind != "wait":
        return [interval]
    index, start, end = int(interval.name), interval.start, interval.end
    name = step.collectives[index].name
    if last is None:
        return [Interval("wait", name, start, end)]
    turn = min(max(last[index], start), end)
    divided = Interval("straggler_wait", name, start, turn), Interval("transfer", name, turn, end)
    return [part for part in divided if part.end > part.start]


def _cut(intervals: list[Interval], start: float, end: float) -> list[Interval]:
    edges = sorted({start, end, *(t for i in intervals for t in (i.start, i.end) if start < t < end)})
    waiting = sorted(intervals, key=lambda i: i.start)
    open_: list[Interval] = []
    found: list[Interval] = []
    at = 0
    for left, right in zip(edges, edges[1:]):
        while at < len(waiting) and waiting[at].start <= left:
            open_.append(waiting[at])
            at += 1
        open_ = [i for i in open_ if i.end > left]
        kind, name = next((i[:2] for i in open_ if i.kind == "pause"), open_[-1][:2] if open_ else ("gap", ""))
        if found and found[-1][:2] == (kind, name):
            found[-1] = Interval(kind, name, found[-1].start, right)
        else:
            found.append(Interval(kind, name, left, right))
    return found


def _explain_gaps(intervals: list[Interval]) -> list[Interval]:
    """Name every gap by the section of the host between the stages around it; waits and pauses are no stages."""
    stages = [interval.kind if interval.kind == "data" or interval.kind in COMPUTE else "" for interval in intervals]

    def newest(stages: Iterable[str]) -> list[str]:
        return list(accumulate(stages, lambda before, stage: stage or before, initial=""))[:-1]

    explained = []
    for interval, before, after in zip(intervals, newest(stages), reversed(newest(reversed(stages)))):
        if interval.kind == "gap":
            name = _SECTIONS.get((before, after), "unexplained")
            kind = "unexplained" if name == "unexplained" else "host"
            interval = Interval(kind, name, interval.start, interval.end)
        explained.append(interval)
    return explained


@dataclass(frozen=True)
class StepBreakdown:
    """The parts of one rank's step in seconds. All except ``wall`` and ``hidden`` add up to ``wall``.

    ``wait`` is exposed communication that could not be divided into straggler wait and transfer, and ``unexplained`` is the
    remainder. ``hidden`` is the time of compute during which an exchange ran, without exchanges that only have a bound.
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
        return self.forward + self.backward + self.optimizer


PART_NAMES = tuple(f.name for f in fields(StepBreakdown))
ADDENDS = PART_NAMES[1:-1]
"""The parts that add up to the wall time."""
_PART_OF_KIND = {"data": "data_wait", "host": "host_overhead"}


def attribute(step: ResolvedStep, last: Sequence[float] | None, intervals: Sequence[Interval] | None = None) -> StepBreakdown:
    """Return the breakdown of one rank's step.

    Args:
        step: step of one rank.
        last: last arrival at each of the step's collectives. A wait is straggler wait until then and transfer afterwards. With
            None, waits are not divided.
        intervals: intervals of the step, if they are already known.
    """
    cut = intervals_of(step, last) if intervals is None else intervals
    seconds: dict[str, float] = defaultdict(float)
    for interval in cut:
        seconds[_PART_OF_KIND.get(interval.kind, interval.kind)] += interval.end - interval.start
    wall = step.end - step.start - seconds["pause"]
    known = {name: seconds[name] for name in ADDENDS if name != "unexplained"}
    rest = wall - sum(known.values())  # not the sum of intervals, so that the parts add up exactly
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
    """Return one part of such an array, or the sum ``"compute"``, without the last axis."""
    if name == "compute":
        first = PART_NAMES.index(COMPUTE[0])
        return breakdown[..., first : first + len(COMPUTE)].sum(axis=-1)
    return breakdown[..., PART_NAMES.index(name)]
