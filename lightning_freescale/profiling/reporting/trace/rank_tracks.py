"""One rank's threads in the trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_freescale.profiling.analysis.intervals import COMPUTE, WAITS, Interval
from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedStep
from lightning_freescale.profiling.reporting.trace.arrows import NOTICEABLE, Arrivals
from lightning_freescale.profiling.reporting.trace.chrome import PER_SECOND, Event, Process, Slice, lanes

_STAGES = ("data", *COMPUTE, "pause")
_BACKGROUND = "exchanges in the background"


class RankTracks:
    """Steps, stages, waits, exchanges in the background and what Kineto saw of one rank; ``origin`` is where ticks begin."""

    def __init__(self, rank: int, origin: float, tids: Iterator[int]) -> None:
        self.process = Process(rank, f"rank {rank}", tids, order=rank + 1)
        self.steps, self.stages, self.waits = (self.process[name] for name in ("step", "stages", "waits"))
        self.notes: list[Event] = []
        self._origin = origin
        self._background: list[Slice] = []

    def tick(self, seconds: float) -> int:
        """Ticks since the trace begins."""
        return round((seconds - self._origin) * PER_SECOND)

    def add_step(self, step: ResolvedStep, pieces: Iterable[Interval], arrivals: Arrivals | None) -> None:
        """``arrivals`` are the last ones at the step's exchanges; None if they are not known."""
        self.steps.slices.append(self._slice(step.start, step.end, f"step {step.index}", "step", {"samples": step.samples}))
        waited = _Waited(step.collectives)
        for piece in pieces:
            if piece.kind in _STAGES:
                self.stages.slices.append(self._slice(piece.start, piece.end, piece.name or piece.kind, piece.kind))
            elif piece.kind in WAITS:
                kind, args = _described(piece, waited.at(piece), arrivals)
                name = f"{kind.replace('_', ' ')}: {piece.name}"
                self.waits.slices.append(self._slice(piece.start, piece.end, name, kind, args))
        ahead = [c for c in step.collectives if c.start - c.arrive > NOTICEABLE]
        for c in (*step.hidden, *ahead):
            self._background.append(self._slice(c.arrive, max(c.arrive, c.done), c.name, "background", _moved(c) or None))

    def add_kineto(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Slices and notes whose ``tid`` names the thread and whose times are seconds."""
        for event in events:
            thread, start = self.process[event["tid"]], self.tick(event["ts"])
            if event["ph"] == "X":
                end = self.tick(event["ts"] + event["dur"])
                thread.slices.append(Slice(start, end, event["name"], event["cat"]))
            else:
                self.notes.append({**event, **thread.place, "ts": start / 8})

    def settle(self) -> None:
        """To be called when everything was added: from now on slices nest and can be looked up."""
        for number, row in enumerate(lanes(self._background), 1):
            self.process[_BACKGROUND if number == 1 else f"{_BACKGROUND}, {number}"].slices = row
        for thread in self.process.threads.values():
            thread.settle()

    def events(self) -> Iterator[Event]:
        """All but the metadata."""
        yield from self.notes
        for thread in self.process.threads.values():
            yield from thread.events()

    def _slice(self, start: float, end: float, name: str, cat: str, args: dict[str, Any] | None = None) -> Slice:
        return Slice(self.tick(start), self.tick(end), name, cat, args)


class _Waited:
    """Finds the collective behind a piece of waiting: of those waited for then the one that began last, as pieces are cut."""

    def __init__(self, collectives: Iterable[ResolvedCollective]) -> None:
        self._collectives = sorted(collectives, key=lambda c: c.start)

    def at(self, piece: Interval) -> ResolvedCollective:
        began = bisect_right(self._collectives, piece.start, key=lambda c: c.start)
        return next(c for c in reversed(self._collectives[:began]) if c.end > piece.start)


def _described(piece: Interval, waited: ResolvedCollective, arrivals: Arrivals | None) -> tuple[str, dict[str, Any]]:
    if arrivals is None:
        return "wait", _moved(waited)
    last = arrivals[waited.key]
    wait = max(0.0, min(last.seconds, waited.end) - waited.start)
    return piece.kind, {**_moved(waited), "last_rank": last.rank, "straggler_wait_ms": round(wait * 1e3, 3)}


def _moved(collective: ResolvedCollective) -> dict[str, Any]:
    return {} if collective.moved is None else {"moved_bytes": collective.moved}
