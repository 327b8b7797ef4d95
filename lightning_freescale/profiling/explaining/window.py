"""What one rank finds out about its own steps, to be put beside that of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.explaining.laps import RankLaps, laps_of
from lightning_freescale.profiling.explaining.parts import Parts, as_array, attribute
from lightning_freescale.profiling.explaining.pieces import Piece, flight_of, hidden_seconds, pieces_of, told
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

    def __iadd__(self, other: ExchangeSums) -> ExchangeSums:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass
class Window:
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
    laps: list[RankLaps]
    exchanges: dict[str, ExchangeSums] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)


def window_of(
    steps: Sequence[ResolvedStep], last: Sequence[Sequence[float]], features: Sequence[Any], alone: bool = False
) -> Window:
    """The steps of one rank.

    Args:
        steps: what it did.
        last: when the last rank arrived at each of their collectives.
        features: what each step worked on.
        alone: nothing is known of the other ranks.
    """
    cut = [pieces_of(step, arrived) for step, arrived in zip(steps, last)]
    parts: list[Parts] = [attribute(step, arrived, pieces) for step, arrived, pieces in zip(steps, last, cut)]
    laps = [laps_of(step, arrived, pieces) for step, arrived, pieces in zip(steps, last, cut)]
    window = Window([s.index for s in steps], as_array(parts), [s.samples for s in steps], list(features), laps)
    for step, arrived, pieces in zip(steps, last, cut):
        for collective, moment in zip(step.collectives, arrived):
            _add(window, step, collective, moment, pieces, alone)
        for collective in step.hidden:
            _add(window, step, collective, None, pieces, alone)
        _add_host(window, pieces)
    return window


def _add(
    window: Window, step: ResolvedStep, one: ResolvedCollective, last: float | None, pieces: Sequence[Piece], alone: bool
) -> None:
    name = one.name if last is not None else f"{one.name} (background)"
    turn = one.start if last is None else min(max(last, one.start), one.end)
    flight = flight_of(one)
    count = 1 if last is not None or step.start <= one.arrive < step.end else 0
    window.exchanges.setdefault(name, ExchangeSums())
    window.exchanges[name] += ExchangeSums(
        count=count,
        straggler_wait=0.0 if last is None else turn - one.start,
        transfer=0.0 if last is None else one.end - turn,
        hidden=0.0 if flight is None else hidden_seconds([flight], pieces),
        moved=count * (one.moved or 0),
        unknown=int(one.moved is None),
        last=int(last is not None and not alone and one.arrive >= last),
    )


def _add_host(window: Window, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        kind, section = told(piece)
        if kind == "host":
            window.host[section] = window.host.get(section, 0.0) + piece.end - piece.start
