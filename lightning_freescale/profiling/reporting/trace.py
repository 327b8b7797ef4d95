"""Write the steps of all ranks as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from lightning_freescale.profiling.analysis.breakdown import (
    COMPUTE,
    WAITS,
    Arrival,
    Interval,
    StepBreakdown,
    arrivals_of,
    as_array,
    attribute,
    bubble,
    intervals_of,
    last_arrivals,
)
from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedStep
from lightning_freescale.profiling.reporting.document import write_atomically

_ORDER = {"X": 0, "C": 1, "i": 1, "s": 2, "f": 3}
"""Order of events at the same time: a slice precedes an arrow that binds to it, and an arrow starts before it ends."""
_EVENTS_PER_LINE = 100
NOTICEABLE = 50e-6
"""Seconds of straggler wait above which an arrow is drawn."""
_STAGES = ("data", *COMPUTE, "pause")
_BACKGROUND = "exchanges in the background"
TICKS_PER_SECOND = 8_000_000
"""A tick is an eighth of a microsecond: a whole number of nanoseconds and exact in binary, so all readers see equal edges."""
Event = dict[str, Any]


def write_trace(
    path: str | Path,
    steps: Sequence[Sequence[ResolvedStep]],
    kineto: Sequence[Sequence[Mapping[str, Any]]] = (),
    *,
    aligned: bool = True,
) -> Path:
    """Write one process per rank, all on rank 0's clock, in microseconds from the first step.

    The threads of a rank are its steps, its stages without waits, its waits divided at the last arrival, and background
    exchanges: those of other threads, or those that began well before the rank waited. An arrow leads from the work of the late
    rank to each wait for it of more than 50 microseconds.

    Args:
        path: path of the file, which is written atomically. Its folder is created.
        steps: the steps of all ranks, by step and rank.
        kineto: the events of :meth:`~lightning_freescale.profiling.reporting.kineto.KinetoWindow.events` of every rank on rank
            0's clock, which become further threads; empty without a window.
        aligned: False if the ranks' clocks cannot be compared. Then each rank starts at zero. In this case, and with one rank,
            waits are not divided and there are no arrows.
    """
    ranks = len(steps[0]) if steps else len(kineto)
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
    events.sort(key=lambda event: (event["ts"], _ORDER[event["ph"]]))  # stable, so outer slices stay before inner ones
    metadata = [event for process in (all_ranks, *tracks) for event in process.metadata()]
    return write_atomically(path, _chunks([*metadata, *events], {"arrows_left_out": left_out} if left_out else {}))


def _add_step(track: RankTracks, step: ResolvedStep, arrivals: Mapping[str, Arrival] | None) -> StepBreakdown:
    last = None if arrivals is None else [arrivals[c.key].seconds for c in step.collectives]
    intervals = intervals_of(step, last)
    track.add_step(step, intervals, arrivals)
    return attribute(step, last, intervals)


def _origins(
    steps: Sequence[Sequence[ResolvedStep]], kineto: Sequence[Sequence[Mapping[str, Any]]], ranks: int, aligned: bool
) -> list[float]:
    """Return the zero of each rank's ticks, which is its first event, because readers drop events before zero."""
    times = [[event["ts"] for event in events] for events in kineto] or [[] for _ in range(ranks)]
    for row in steps:
        for mine, step in zip(times, row):
            mine += [step.start, *(c.arrive for c in (*step.collectives, *step.hidden))]
    firsts = [min(mine, default=0.0) for mine in times]
    return [min(firsts)] * ranks if aligned and ranks else firsts


def _chunks(events: Sequence[Event], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield the JSON with several events per line, because a call for each event would take longer than the encoding."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # some readers know no \u
    separator = '{"displayTimeUnit":"ms","traceEvents":[\n'
    for first in range(0, len(events), _EVENTS_PER_LINE):
        yield separator + encode(events[first : first + _EVENTS_PER_LINE])[1:-1]
        separator = ",\n"
    yield f'{separator if separator[0] == "{" else ""}\n],"otherData":{encode(other)}}}\n'


# -- arrows from the rank that came late to the ranks that waited for it


@dataclass(frozen=True)
class _Wait:
    """``rank`` waited for ``late`` until ``tick``, the last one of the wait."""

    rank: int
    late: int
    name: str
    tick: int


def _noticeable_waits(
    row: Sequence[ResolvedStep], arrivals: Mapping[str, Arrival], tick: Callable[[float], int]
) -> Iterator[_Wait]:
    for rank, step in enumerate(row):
        for c in step.collectives:
            last = arrivals[c.key]
            turn = min(last.seconds, c.end)
            if turn - c.start > NOTICEABLE:
                yield _Wait(rank, last.rank, c.name, tick(turn) - 1)


def _arrows(waits: Iterable[_Wait], tracks: Sequence[RankTracks]) -> tuple[list[Event], int]:
    """Return flow events between nested slices, and the number of waits without slices at both ends.

    An arrow starts in the stage of the late rank just before its arrival, or in its step if no stage ran.
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
    """Return the thread and tick where an arrow starts; a stage that ended noticeably earlier is no reason of the delay."""
    for thread, since in ((late.stages, NOTICEABLE * TICKS_PER_SECOND), (late.steps, 0)):
        slice_ = thread.at(tick)
        if slice_ and slice_.end > tick - since:
            return thread, min(tick, slice_.end - 1)
    return None


def _flow(phase: str, number: int, wait: _Wait, thread: Thread, tick: int) -> Event:
    name = f"rank {wait.late} late for {wait.name}"
    return {"ph": phase, "id": number, **thread.place, "cat": "late", "name": name, "ts": tick / 8}


@dataclass
class Slice:
    """A section of a thread from tick ``start`` to tick ``end``."""

    start: int
    end: int
    name: str
    cat: str
    args: dict[str, Any] | None = None


@dataclass
class Thread:
    """A thread of a process."""

    pid: int
    tid: int
    slices: list[Slice] = field(default_factory=list)

    @property
    def place(self) -> Event:
        """The fields that assign an event to this thread."""
        return {"pid": self.pid, "tid": self.tid}

    def at(self, tick: int) -> Slice | None:
        """Return the latest slice that started by ``tick``. It may have ended."""
        began = bisect_right(self.slices, tick, key=lambda s: s.start)
        return self.slices[began - 1] if began else None

    def events(self) -> Iterator[Event]:
        """Yield the slices as Chrome events."""
        for s in self.slices:
            event = {"ph": "X", **self.place, "cat": s.cat, "name": s.name, "ts": s.start / 8, "dur": (s.end - s.start) / 8}
            yield event if s.args is None else {**event, "args": s.args}


@dataclass
class Process:
    """A named process, which creates its threads on request.

    ``tids`` gives numbers that are unique in the trace, because some readers identify threads by them alone. ``order`` is the
    position of the process in the view.
    """

    pid: int
    name: str
    tids: Iterator[int]
    order: int
    threads: dict[str, Thread] = field(default_factory=dict)

    def thread(self, name: str) -> Thread:
        """Return the thread of this name, and create it the first time."""
        if name not in self.threads:
            self.threads[name] = Thread(self.pid, next(self.tids))
        return self.threads[name]

    def metadata(self) -> Iterator[Event]:
        """Yield the names and the order of the process, if it has threads, and of its threads."""
        named = [("process", self.name, self.order, thread) for thread in [*self.threads.values()][:1]]
        named += [("thread", name, thread.tid, thread) for name, thread in self.threads.items()]
        for kind, name, order, thread in named:
            yield {"ph": "M", **thread.place, "name": f"{kind}_name", "args": {"name": name}}
            yield {"ph": "M", **thread.place, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


class RankTracks(Process):
    """The threads of one rank: steps, stages, waits, background exchanges and Kineto's. ``origin`` is the zero of the ticks."""

    def __init__(self, rank: int, origin: float, tids: Iterator[int]) -> None:
        super().__init__(rank, f"rank {rank}", tids, order=rank + 1)
        self.steps, self.stages, self.waits = (self.thread(name) for name in ("step", "stages", "waits"))
        self.notes: list[Event] = []
        self._origin = origin
        self._background: list[Slice] = []

    def tick(self, seconds: float) -> int:
        """Return the tick of a time on the rank's clock."""
        return round((seconds - self._origin) * TICKS_PER_SECOND)

    def add_step(self, step: ResolvedStep, intervals: Iterable[Interval], arrivals: Mapping[str, Arrival] | None) -> None:
        """Add a step; ``arrivals`` has the last arrivals at its exchanges, None if unknown."""
        self.steps.slices.append(self._slice(step.start, step.end, f"step {step.index}", "step", {"samples": step.samples}))
        collectives = sorted(step.collectives, key=lambda c: c.start)
        for interval in intervals:
            if interval.kind in _STAGES:
                name = interval.name or interval.kind
                self.stages.slices.append(self._slice(interval.start, interval.end, name, interval.kind))
            elif interval.kind in WAITS:
                args = _arguments(_waited_for(interval, collectives), arrivals)
                name = f"{interval.kind.replace('_', ' ')}: {interval.name}"
                self.waits.slices.append(self._slice(interval.start, interval.end, name, interval.kind, args))
        ahead = [c for c in step.collectives if c.start - c.arrive > NOTICEABLE]
        for c in (*step.hidden, *ahead):
            self._background.append(self._slice(c.arrive, max(c.arrive, c.done), c.name, "background", _bytes(c) or None))

    def add_kineto_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add slices and notes, with the name of the thread as ``tid`` and times in seconds."""
        for event in events:
            thread, start = self.thread(event["tid"]), self.tick(event["ts"])
            if event["ph"] == "X":
                end = self.tick(event["ts"] + event["dur"])
                thread.slices.append(Slice(start, end, event["name"], event["cat"]))
            else:
                self.notes.append({**event, **thread.place, "ts": start / 8})

    def nest_slices(self) -> None:
        """Nest the slices after all were added, before they are looked up and written."""
        for number, row in enumerate(rows_without_overlap(self._background), 1):
            self.thread(_BACKGROUND if number == 1 else f"{_BACKGROUND}, {number}").slices = row
        for thread in self.threads.values():
            thread.slices = nested(thread.slices)  # readers drop a slice that starts inside another and ends after it

    def events(self) -> Iterator[Event]:
        """Yield all events except the metadata."""
        yield from self.notes
        for thread in self.threads.values():
            yield from thread.events()

    def _slice(self, start: float, end: float, name: str, cat: str, args: dict[str, Any] | None = None) -> Slice:
        return Slice(self.tick(start), self.tick(end), name, cat, args)


def _waited_for(wait: Interval, collectives: Sequence[ResolvedCollective]) -> ResolvedCollective:
    """Return the collective that a rank waited for; of several, the one that began last, like ``intervals_of``."""
    began = bisect_right(collectives, wait.start, key=lambda c: c.start)
    return next(c for c in reversed(collectives[:began]) if c.end > wait.start)


def _arguments(waited_for: ResolvedCollective, arrivals: Mapping[str, Arrival] | None) -> dict[str, Any]:
    if arrivals is None:
        return _bytes(waited_for)
    last = arrivals[waited_for.key]
    wait = max(0.0, min(last.seconds, waited_for.end) - waited_for.start)
    return {**_bytes(waited_for), "last_rank": last.rank, "straggler_wait_s": round(wait, 6)}


def _bytes(collective: ResolvedCollective) -> dict[str, Any]:
    return {} if collective.moved is None else {"moved_bytes": collective.moved}


def nested(slices: Iterable[Slice]) -> list[Slice]:
    """Return slices in the order of their starts, outer ones first. The earlier of two that cross is cut at the later start."""
    ordered: list[Slice] = []
    around: list[Slice] = []
    for s in sorted(slices, key=lambda s: (s.start, -s.end)):
        while around and around[-1].end < max(s.end, s.start + 1):
            outer = around.pop()
            if outer.end > s.start:
                outer.end, outer.args = s.start, {**(outer.args or {}), "uncut_s": (outer.end - outer.start) / TICKS_PER_SECOND}
        around.append(replace(s))
        ordered.append(around[-1])
    return ordered


def rows_without_overlap(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Distribute slices over as few rows as possible without overlaps."""
    rows: list[list[Slice]] = []
    for s in sorted(slices, key=lambda s: (s.start, s.end)):
        row = next((row for row in rows if row[-1].end <= s.start), [])
        if not row:
            rows.append(row)
        row.append(s)
    return rows
