"""Write the steps of all ranks as one Chrome trace; https://ui.perfetto.dev opens it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from lightning_freescale.profiling.analysis.breakdown import StepBreakdown, as_array, attribute, bubble
from lightning_freescale.profiling.analysis.intervals import Arrival, arrivals_of, intervals_of, last_arrivals
from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.atomic_write import write_atomically
from lightning_freescale.profiling.reporting.trace.chrome import TICKS_PER_SECOND, Event, Process, Thread
from lightning_freescale.profiling.reporting.trace.rank_tracks import NOTICEABLE, RankTracks

_ORDER = {"X": 0, "C": 1, "i": 1, "s": 2, "f": 3}
"""Of events at one time: a slice is there before an arrow binds to it, and an arrow begins before it ends."""
_EVENTS_PER_LINE = 100


def write_trace(
    path: str | Path,
    steps: Sequence[Sequence[ResolvedStep]],
    kineto: Sequence[Sequence[Mapping[str, Any]]] = (),
    *,
    aligned: bool = True,
) -> Path:
    """Write one process per rank, all on rank 0's clock, in microseconds from the first step.

    A rank's threads hold its steps, its stages without the waits inside them, its waits divided where the last rank arrived,
    and exchanges in the background: of other threads, or under way well before anybody waited for them. An arrow leads
    from what the late rank did before it arrived to each wait for it of more than 50 microseconds.

    Args:
        path: the file; a reader finds the old one or the whole new one. Makes the folder if there is none.
        steps: for every step the records of all ranks.
        kineto: for every rank what :meth:`~lightning_freescale.profiling.reporting.kineto.KinetoWindow.events` gave on rank 0's
            clock; empty if there was no window. They become further threads of the rank.
        aligned: whether the ranks' clocks are comparable. If not, or if there is one rank only, nobody knows who was late:
            waits are not divided and there are no arrows. Ranks that are not aligned begin at zero each.

    Raises:
        ValueError: a step, or ``kineto``, has another number of ranks than the first step.
    """
    ranks = _rank_count(steps, kineto)
    tids = count(1)
    all_ranks = Process(ranks, "all ranks", tids, order=0)
    tracks = [RankTracks(rank, origin, tids) for rank, origin in enumerate(_origins(steps, kineto, ranks, aligned))]
    waits: list[_Wait] = []
    events: list[Event] = []
    for row in steps:
        arrivals = last_arrivals(map(arrivals_of, row)) if aligned and ranks > 1 else None
        breakdowns = [_add_step(track, step, arrivals) for track, step in zip(tracks, row)]
        counter = {"ph": "C", **all_ranks.thread("bubble").place, "name": "bubble", "ts": tracks[0].tick(row[0].start) / 8}
        events.append({**counter, "args": {"share": bubble(as_array(breakdowns))}})
        waits += () if arrivals is None else _noticeable_waits(row, arrivals, tracks[0].tick)
    for track, seen in zip(tracks, kineto):
        track.add_kineto_events(seen)
    for track in tracks:
        track.nest_slices()
        events += track.events()
    arrows, left_out = _arrows(waits, tracks)
    events += arrows
    events.sort(key=lambda event: (event["ts"], _ORDER[event["ph"]]))  # stable: outer slices stay before inner ones
    metadata = [event for process in (all_ranks, *(track.process for track in tracks)) for event in process.metadata()]
    return write_atomically(path, _chunks([*metadata, *events], {"arrows_left_out": left_out} if left_out else {}))


def _add_step(track: RankTracks, step: ResolvedStep, arrivals: Mapping[str, Arrival] | None) -> StepBreakdown:
    last = None if arrivals is None else [arrivals[c.key].seconds for c in step.collectives]
    intervals = intervals_of(step, last)
    track.add_step(step, intervals, arrivals)
    return attribute(step, last, intervals)


def _rank_count(steps: Sequence[Sequence[ResolvedStep]], kineto: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    ranks = len(steps[0]) if steps else len(kineto)
    found = {len(row) for row in steps} | ({len(kineto)} if kineto else set())
    if found - {ranks}:
        raise ValueError(
            f"steps and kineto are of {sorted(found)} ranks: give the records of the same ranks, {ranks}, everywhere"
        )
    return ranks


def _origins(
    steps: Sequence[Sequence[ResolvedStep]], kineto: Sequence[Sequence[Mapping[str, Any]]], ranks: int, aligned: bool
) -> list[float]:
    """Where each rank's ticks begin. Readers drop what is before zero, so it is the first of all that is shown."""
    times = [[event["ts"] for event in events] for events in kineto] or [[] for _ in range(ranks)]
    for row in steps:
        for mine, step in zip(times, row):
            mine += [step.start, *(c.arrive for c in (*step.collectives, *step.hidden))]
    firsts = [min(mine, default=0.0) for mine in times]
    return [min(firsts)] * ranks if aligned and ranks else firsts


def _chunks(events: Sequence[Event], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield the JSON, some events a line: one call for each would take longer than the encoding."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # some readers know no \u
    separator = '{"displayTimeUnit":"ms","traceEvents":[\n'
    for first in range(0, len(events), _EVENTS_PER_LINE):
        yield separator + encode(events[first : first + _EVENTS_PER_LINE])[1:-1]
        separator = ",\n"
    yield f'{separator if separator[0] == "{" else ""}\n],"otherData":{encode(other)}}}\n'


# -- arrows from the rank that came late to the ranks that waited for it


@dataclass(frozen=True)
class _Wait:
    """``rank`` waited for ``late`` until after ``tick``."""

    rank: int
    late: int
    name: str
    tick: int


def _noticeable_waits(
    row: Sequence[ResolvedStep], arrivals: Mapping[str, Arrival], tick: Callable[[float], int]
) -> Iterator[_Wait]:
    """Straggler waits of one step that are worth an arrow; the tick is the last one of the wait."""
    for rank, step in enumerate(row):
        for c in step.collectives:
            last = arrivals[c.key]
            turn = min(last.seconds, c.end)
            if turn - c.start > NOTICEABLE:
                yield _Wait(rank, last.rank, c.name, tick(turn) - 1)


def _arrows(waits: Iterable[_Wait], tracks: Sequence[RankTracks]) -> tuple[list[Event], int]:
    """Flow events between nested slices, and how many had no slice to begin or to end in.

    They begin in what the late rank did just before it arrived: the stage, or the step where no stage ran.
    """
    events: list[Event] = []
    left_out = 0
    for number, wait in enumerate(waits, 1):
        end, begin = tracks[wait.rank].waits, _begin(tracks[wait.late], wait.tick)
        slice_ = end.at(wait.tick)
        if begin is None or slice_ is None or slice_.cat != "straggler_wait" or slice_.end <= wait.tick:
            left_out += 1
        else:
            events += [_flow("s", number, wait, *begin), {**_flow("f", number, wait, end, wait.tick), "bp": "e"}]
    return events, left_out


def _begin(late: RankTracks, tick: int) -> tuple[Thread, int] | None:
    """A slice and a tick within it; a stage that ended noticeably before is not what the rank was late for."""
    for thread, since in ((late.stages, NOTICEABLE * TICKS_PER_SECOND), (late.steps, 0)):
        slice_ = thread.at(tick)
        if slice_ and slice_.end > tick - since:
            return thread, min(tick, slice_.end - 1)
    return None


def _flow(phase: str, number: int, wait: _Wait, thread: Thread, tick: int) -> Event:
    name = f"rank {wait.late} late for {wait.name}"
    return {"ph": phase, "id": number, **thread.place, "cat": "late", "name": name, "ts": tick / 8}
