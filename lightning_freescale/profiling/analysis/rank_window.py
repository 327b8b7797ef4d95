"""What one rank finds out about its own steps, to be put beside that of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.breakdown import StepBreakdown, as_array, attribute
from lightning_freescale.profiling.analysis.intervals import Interval, flight_of, hidden_seconds, intervals_of, told
from lightning_freescale.profiling.analysis.segments import RankSegments, laps_of
from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedStep


@dataclass
class ExchangeSums:
    """Of all exchanges of one name on one rank: seconds, bytes, and how often this rank came last.

    ``unknown`` counts those whose bytes nobody knows.
    """

    count: int = 0
    straggler_wait: float = 0.0
    transfer: float = 0.0
    hidden: float = 0.0
    moved: int = 0
    unknown: int = 0
    last: int = 0

    def add(self, other: ExchangeSums) -> None:
        """Of further exchanges."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class RankWindow:
    """Some consecutive steps of one rank.

    Attributes:
        steps: their numbers.
        parts: shape ``[steps, len(PART_NAMES)]``.
        samples: shape ``[steps]``.
        features: what the steps worked on, one entry a step, see :class:`StepRecord`.
        laps: for replays.
        exchanges: sums by name.
        host: seconds of host overhead by section.
    """

    steps: list[int]
    parts: NDArray[np.float64]
    samples: list[int]
    features: list[Any]
    laps: list[RankSegments]
    exchanges: dict[str, ExchangeSums] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)


def window_of(
    steps: Sequence[ResolvedStep], last: Sequence[Sequence[float]], features: Sequence[Any], alone: bool = False
) -> RankWindow:
    """The steps of one rank.

    Args:
        steps: what it did.
        last: when the last rank arrived at each of their collectives.
        features: what each step worked on.
        alone: nothing is known of the other ranks.
    """
    cut = [intervals_of(step, arrived) for step, arrived in zip(steps, last)]
    parts: list[StepBreakdown] = [attribute(step, arrived, pieces) for step, arrived, pieces in zip(steps, last, cut)]
    laps = [laps_of(step, arrived, pieces) for step, arrived, pieces in zip(steps, last, cut)]
    window = RankWindow([s.index for s in steps], as_array(parts), [s.samples for s in steps], list(features), laps)
    for step, arrived, pieces in zip(steps, last, cut):
        _add_waits(window, pieces)
        pauses = [piece for piece in pieces if piece.kind == "pause"]
        for collective, moment in zip(step.collectives, arrived):
            if not any(pause.start <= collective.start and collective.end <= pause.end for pause in pauses):
                _add(window, collective, pieces, ExchangeSums(count=1, last=int(not alone and collective.arrive >= moment)))
        for collective in step.hidden:
            begun_here = ExchangeSums(count=int(step.start <= collective.arrive < step.end))
            _add(window, collective, pieces, begun_here, " (background)")
        _add_host(window, pieces)
    return window


def _add(window: RankWindow, one: ResolvedCollective, pieces: Sequence[Interval], sums: ExchangeSums, kind: str = "") -> None:
    flight = flight_of(one)
    sums.hidden = 0.0 if flight is None else hidden_seconds([flight], pieces)
    sums.moved, sums.unknown = sums.count * (one.moved or 0), int(one.moved is None)
    _of(window, one.name + kind).add(sums)


def _add_waits(window: RankWindow, pieces: Sequence[Interval]) -> None:
    for piece in pieces:
        if piece.kind == "straggler_wait":
            _of(window, piece.name).straggler_wait += piece.end - piece.start
        elif piece.kind == "transfer":
            _of(window, piece.name).transfer += piece.end - piece.start


def _of(window: RankWindow, name: str) -> ExchangeSums:
    return window.exchanges.setdefault(name, ExchangeSums())


def _add_host(window: RankWindow, pieces: Sequence[Interval]) -> None:
    for piece in pieces:
        kind, section = told(piece)
        if kind == "host":
            window.host[section] = window.host.get(section, 0.0) + piece.end - piece.start
