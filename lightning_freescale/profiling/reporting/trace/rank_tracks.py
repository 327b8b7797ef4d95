"""One rank's threads in the trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_freescale.profiling.analysis.intervals import COMPUTE, WAITS, Arrival, Interval
from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedStep
from lightning_freescale.profiling.reporting.trace.chrome import TICKS_PER_SECOND, Event, Process, Slice, rows_without_overlap

NOTICEABLE = 50e-6
"""Seconds of straggler wait from which on there is an arrow."""
_STAGES = ("data", *COMPUTE, "pause")
_BACKGROUND = "exchanges in the background"


class RankTracks:
    """Steps, stages, waits, exchanges in the background and what Kineto saw of one rank; ``origin`` is where ticks begin."""

    def __init__(self, rank: int, origin: float, tids: Iterator[int]) -> None:
        self.process = Process(rank, f"rank {rank}", tids, order=rank + 1)
        self.steps, self.stages, self.waits = (self.process.thread(name) for name in ("step", "stages", "waits"))
        self.notes: list[Event] = []
        self._origin = origin
        self._background: list[Slice] = []

    def tick(self, seconds: float) -> int:
        """Return the ticks from the beginning of the trace to a time on the rank's clock."""
        return round((seconds - self._origin) * TICKS_PER_SECOND)

    def add_step(self, step: ResolvedStep, intervals: Iterable[Interval], arrivals: Mapping[str, Arrival] | None) -> None:
        """Add a step; ``arrivals`` are the last ones at its exchanges, None if they are not known."""
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
        """Add slices and notes whose ``tid`` names the thread and whose times are seconds."""
        for event in events:
            thread, start = self.process.thread(event["tid"]), self.tick(event["ts"])
            if event["ph"] == "X":
                end = self.tick(event["ts"] + event["dur"])
                thread.slices.append(Slice(start, end, event["name"], event["cat"]))
            else:
                self.notes.append({**event, **thread.place, "ts": start / 8})

    def nest_slices(self) -> None:
        """Prepare the slices to be looked up and written, when all were added."""
        for number, row in enumerate(rows_without_overlap(self._background), 1):
            self.process.thread(_BACKGROUND if number == 1 else f"{_BACKGROUND}, {number}").slices = row
        for thread in self.process.threads.values():
            thread.nest_slices()

    def events(self) -> Iterator[Event]:
        """Yield all events but the metadata."""
        yield from self.notes
        for thread in self.process.threads.values():
            yield from thread.events()

    def _slice(self, start: float, end: float, name: str, cat: str, args: dict[str, Any] | None = None) -> Slice:
        return Slice(self.tick(start), self.tick(end), name, cat, args)


def _waited_for(wait: Interval, collectives: Sequence[ResolvedCollective]) -> ResolvedCollective:
    """Of those waited for at that time the one that began last: so steps are cut into intervals."""
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
