"""Summaries of one rank's steps, for the comparison with the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.breakdown import (
    COMPUTE,
    WAITS,
    as_array,
    attribute,
    hidden_seconds,
    intervals_of,
    times_beside,
)
from lightning_freescale.profiling.recording.memory import MemoryReading
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep

COLUMNS = ("compute", "data", "other", "pause", "ahead", "transfer")
Floats = NDArray[np.float64]
_KINDS = {**dict.fromkeys(COMPUTE, 0), "data": 1, "pause": 3}
_TOGETHER = 1e-3
"""Largest time between two waits of a loop over messages, on a busy machine, in seconds."""


@dataclass
class ExchangeSums:
    """Sums over all exchanges of one name on one rank: seconds, bytes, and ``last``, how often this rank arrived last.

    ``unknown`` counts the exchanges whose bytes are unknown.
    """

    count: int = 0
    straggler_wait: float = 0.0
    transfer: float = 0.0
    wait: float = 0.0
    hidden: float = 0.0
    moved: int = 0
    unknown: int = 0
    last: int = 0

    def include(self, other: ExchangeSums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class RankWindow:
    """Consecutive steps of one rank.

    ``breakdown`` has shape ``[steps, len(PART_NAMES)]``. ``steps`` (their numbers), ``samples``, ``features`` and ``predicted``
    (see :class:`StepRecord`) and ``segments`` have one entry per step. ``host`` has the seconds of host overhead by section,
    ``memory`` the memory at the time of the exchange, None if unknown.
    """

    steps: list[int]
    breakdown: NDArray[np.float64]
    samples: list[int]
    features: list[Any]
    predicted: list[float | None]
    segments: list[RankSegments]
    exchanges: dict[str, ExchangeSums] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    memory: MemoryReading | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankWindow:
        """Return the window from its fields, in which JSON has made lists and dicts of the values."""
        segments = [
            RankSegments(one["start"], one["end"], tuple(one["keys"]), np.array(one["seconds"])) for one in values["segments"]
        ]
        exchanges = {name: ExchangeSums(**sums) for name, sums in values["exchanges"].items()}
        memory = None if values["memory"] is None else MemoryReading(*values["memory"])
        rest = {"segments": segments, "exchanges": exchanges, "memory": memory}
        return cls(**{**values, "breakdown": np.array(values["breakdown"]), **rest})


def window_of(
    steps: Sequence[ResolvedStep],
    last: Sequence[Sequence[float]],
    memory: MemoryReading | None = None,
    *,
    alone: bool = False,
    divided: bool = True,
) -> RankWindow:
    """Return the window of one rank's steps.

    ``last`` has the last arrival at each collective. ``divided`` is True if the arrivals are certain enough to divide waits and
    to name the last rank. ``alone`` is True if nothing is known about the other ranks.
    """
    cut = [intervals_of(step, moments if divided else None) for step, moments in zip(steps, last)]
    window = RankWindow(
        steps=[step.index for step in steps],
        breakdown=as_array([attribute(step, None, intervals) for step, intervals in zip(steps, cut)]),
        samples=[step.samples for step in steps],
        features=[step.features for step in steps],
        predicted=[step.predicted for step in steps],
        segments=[segments_of(step, moments, intervals) for step, moments, intervals in zip(steps, last, cut)],
        memory=memory,
    )
    counts_last = divided and not alone
    for step, moments, intervals in zip(steps, last, cut):
        _add_intervals(window, intervals)
        pauses = [interval for interval in intervals if interval.kind == "pause"]
        for collective, moment in zip(step.collectives, moments):
            if not any(pause.start <= collective.start and collective.end <= pause.end for pause in pauses):
                came_last = int(counts_last and collective.arrive >= moment)
                _add_exchange(window, collective.name, collective, intervals, ExchangeSums(count=1, last=came_last))
        for collective in step.hidden:
            begun_here = ExchangeSums(count=int(step.start <= collective.arrive < step.end))
            aside = "behind backward, at most" if collective.at_most else "background"
            _add_exchange(window, f"{collective.name} ({aside})", collective, intervals, begun_here)
    return window


def _add_exchange(
    window: RankWindow, name: str, one: ResolvedCollective, intervals: Sequence[Interval], sums: ExchangeSums
) -> None:
    sums.hidden = hidden_seconds(times_beside([one]), intervals)
    sums.moved, sums.unknown = sums.count * (one.moved or 0), int(one.moved is None)
    window.exchanges.setdefault(name, ExchangeSums()).include(sums)


def _add_intervals(window: RankWindow, intervals: Sequence[Interval]) -> None:
    for kind, name, start, end in intervals:
        if kind in WAITS:
            sums = window.exchanges.setdefault(name, ExchangeSums())
            setattr(sums, kind, getattr(sums, kind) + end - start)
        elif kind == "host":
            window.host[name] = window.host.get(name, 0.0) + end - start


@dataclass(frozen=True)
class RankSegments:
    """One rank's step, divided at the collectives that the rank waited for.

    Attributes:
        start: start of the step on rank 0's clock, pauses included.
        end: end of the step.
        keys: keys of the collectives, in the order of the waits.
        seconds: shape ``[collectives + 1, len(COLUMNS)]``. A row has the ``compute``, ``data`` (wait for data), ``other`` and
            ``pause`` seconds between the collective before and this one. The rank arrived ``ahead`` seconds before the end of
            this time. The exchange ended ``transfer`` seconds after the last arrival, negative if the clocks disagree. The last
            row follows the last collective.
    """

    start: float
    end: float
    keys: tuple[str, ...]
    seconds: Floats


def segments_of(step: ResolvedStep, last: Sequence[float], intervals: Sequence[Interval]) -> RankSegments:
    """Return one rank's step as segments; ``last`` has the last arrival at each collective.

    Work during a wait counts as if the wait had begun after it. The time between the end of an exchange and the continuation of
    the rank is ``other`` of the next segment.
    """
    order = _in_order(step.collectives)
    collectives = [step.collectives[k] for k in order]
    goes_on = np.minimum(np.maximum.accumulate([step.start, *(c.end for c in collectives)]), step.end)
    seconds = np.zeros((len(order) + 1, len(COLUMNS)))
    seconds[:, :4] = _work(intervals, np.append(goes_on, step.end))
    ready = goes_on + seconds[:, :4].sum(axis=1)
    for row, (k, collective) in enumerate(zip(order, collectives)):
        over = min(collective.done, collective.end, step.end)
        seconds[row, 4] = max(0.0, ready[row] - collective.arrive)
        seconds[row, 5] = over - last[k]
        seconds[row + 1, 2] += max(0.0, goes_on[row + 1] - max(ready[row], over))
    return RankSegments(step.start, step.end, tuple(c.key for c in collectives), seconds)


def _in_order(collectives: Sequence[ResolvedCollective]) -> list[int]:
    """Return the order of the waits, with messages that are waited for together in the order of their keys.

    These messages were pending before the first wait. One rank may wait for the sent message first and the other rank for the
    received one, so only the order of the keys is the same on both.
    """
    order: list[int] = []
    together: list[int] = []
    for k in sorted(range(len(collectives)), key=lambda k: collectives[k].start):
        one, first = collectives[k], collectives[together[0]] if together else None
        if first is None or not (
            one.is_message and one.arrive <= first.start and one.start - collectives[together[-1]].end <= _TOGETHER
        ):
            order += sorted(together, key=lambda k: collectives[k].place)
            together = []
        if one.is_message:
            together.append(k)
        else:
            order.append(k)
    return order + sorted(together, key=lambda k: collectives[k].place)


def _work(intervals: Sequence[Interval], bounds: Floats) -> Floats:
    """Return the seconds of each kind of work between consecutive bounds, shape ``[len(bounds) - 1, 4]``."""
    work = [interval for interval in intervals if interval.kind not in WAITS]
    starts = np.array([interval.start for interval in work])
    ends = np.array([interval.end for interval in work])
    shared = np.minimum(bounds[1:, None], ends) - np.maximum(bounds[:-1, None], starts)
    return np.clip(shared, 0, None) @ np.eye(4)[[_KINDS.get(interval.kind, 2) for interval in work]]
