"""Arrows from the rank that came late to the ranks that waited for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.trace.chrome import PER_SECOND, Event, Thread

if TYPE_CHECKING:
    from lightning_freescale.profiling.reporting.trace.rank_tracks import RankTracks

NOTICEABLE = 50e-6
"""Seconds of straggler wait from which on there is an arrow."""


@dataclass(frozen=True)
class Arrival:
    """Which rank arrived last at an exchange, and when."""

    seconds: float
    rank: int


Arrivals = Mapping[str, Arrival]
"""By the exchange's key."""


@dataclass(frozen=True)
class Wait:
    """``rank`` waited for ``late`` until after ``tick``."""

    rank: int
    late: int
    name: str
    tick: int


def last_arrivals(row: Sequence[ResolvedStep]) -> Arrivals:
    """The last arrival at every exchange of one step; ``row`` holds the records of all ranks."""
    last: dict[str, Arrival] = {}
    for rank, step in enumerate(row):
        for c in step.collectives:
            if c.key not in last or c.arrive > last[c.key].seconds:
                last[c.key] = Arrival(c.arrive, rank)
    return last


def noticeable_waits(row: Sequence[ResolvedStep], arrivals: Arrivals, tick: Callable[[float], int]) -> Iterator[Wait]:
    """Straggler waits of one step that are worth an arrow; the tick is the last one of the wait."""
    for rank, step in enumerate(row):
        for c in step.collectives:
            last = arrivals[c.key]
            turn = min(last.seconds, c.end)
            if turn - c.start > NOTICEABLE:
                yield Wait(rank, last.rank, c.name, tick(turn) - 1)


def arrows(waits: Iterable[Wait], tracks: Sequence[RankTracks]) -> tuple[list[Event], int]:
    """Flow events between slices of the settled tracks, and how many had no slice to begin or to end in.

    They begin in what the late rank did just before it arrived: the stage, or the step where no stage ran.
    """
    events: list[Event] = []
    left_out = 0
    for number, wait in enumerate(waits, 1):
        end, begin = tracks[wait.rank].waits, _begin(tracks[wait.late], wait.tick)
        found = end.at(wait.tick)
        if begin is None or found is None or found.cat != "straggler_wait" or found.end <= wait.tick:
            left_out += 1
        else:
            events += [_flow("s", number, wait, *begin), {**_flow("f", number, wait, end, wait.tick), "bp": "e"}]
    return events, left_out


def _begin(late: RankTracks, tick: int) -> tuple[Thread, int] | None:
    """A slice and a tick within it; a stage that ended noticeably before is not what the rank was late for."""
    for thread, since in ((late.stages, NOTICEABLE * PER_SECOND), (late.steps, 0)):
        found = thread.at(tick)
        if found and found.end > tick - since:
            return thread, min(tick, found.end - 1)
    return None


def _flow(phase: str, number: int, wait: Wait, thread: Thread, tick: int) -> Event:
    name = f"rank {wait.late} late for {wait.name}"
    return {"ph": phase, "id": number, **thread.place, "cat": "late", "name": name, "ts": tick / 8}
