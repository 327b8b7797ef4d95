"""Cut a step into pieces without overlap, each of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedStep

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
    ("optimizer", "optimizer"): "between optimizers",
    ("optimizer", "forward"): "between optimizers",
    ("backward", "forward"): "between optimizers",
    ("forward", "forward"): "between optimizers",
    ("optimizer", "backward"): "between optimizers",
    ("backward", "backward"): "between optimizers",
    ("forward", ""): "hooks after the step",
    ("backward", ""): "hooks after the step",
    ("optimizer", ""): "hooks after the step",
    ("forward", "data"): "hooks after the step",
    ("backward", "data"): "hooks after the step",
    ("optimizer", "data"): "hooks after the step",
}
"""Where a loop and its hooks run between two stages. Time elsewhere, as in a loop that skips a stage, is unexplained."""


class Interval(NamedTuple):
    """``kind`` is that of a span, a wait, or ``"gap"``, whose ``name`` then holds the stages before and after it."""

    kind: str
    name: str
    start: float
    end: float


class Arrival(NamedTuple):
    """Which rank arrived last at an exchange, and when."""

    seconds: float
    rank: int


def arrivals_of(step: ResolvedStep) -> dict[str, float]:
    """Return when a rank arrived at each collective of its step, by key."""
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
    """The step from start to end. Of intervals that overlap, the one that began last counts; a pause goes before all."""
    intervals: list[tuple[str, str, float, float]] = [(span.kind, span.name, span.start, span.end) for span in step.spans]
    intervals += [("wait", str(k), collective.start, collective.end) for k, collective in enumerate(step.collectives)]
    whole = _cut([i for i in intervals if i[3] > i[2]], step.start, step.end)
    return _with_neighbours([part for piece in whole for part in _split(piece, step, last)])


def host_section(gap: Interval) -> str | None:
    """What the host did in a gap; None if nobody knows."""
    before, _, after = gap.name.partition("|")
    return _SECTIONS.get((before, after))


def wall_of(step: ResolvedStep) -> float:
    """Seconds without pauses."""
    return step.end - step.start - sum(span.end - span.start for span in step.spans if span.kind == "pause")


def told(piece: Interval) -> tuple[str, str]:
    """Kind and name for a reader: a gap is the host's, or unexplained."""
    if piece.kind != "gap":
        return piece.kind, piece.name
    section = host_section(piece)
    return ("unexplained", "unexplained") if section is None else ("host", section)


def hidden_seconds(flights: Iterable[tuple[float, float]], pieces: Iterable[Interval]) -> float:
    """Time of compute while at least one of the exchanges, each from start to end, was under way."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(flights):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    busy = [piece for piece in pieces if piece.kind in COMPUTE] if merged else ()
    return sum(max(0.0, min(end, p.end) - max(start, p.start)) for start, end in merged for p in busy)


def flight_of(one: ResolvedCollective) -> tuple[float, float] | None:
    """When an exchange was under way beside other things; None for one that the rank waited for at once."""
    beside = one.end == one.start or one.start - one.arrive > _AT_ONCE
    return (one.arrive, one.done) if beside and one.done > one.arrive else None


def flights_of(step: ResolvedStep) -> list[tuple[float, float]]:
    """Of all exchanges of a step."""
    return [flight for one in (*step.collectives, *step.hidden) if (flight := flight_of(one)) is not None]


def _split(piece: Interval, step: ResolvedStep, last: Sequence[float] | None) -> list[Interval]:
    """A wait at the moment the last rank arrived."""
    if piece.kind != "wait":
        return [piece]
    name = step.collectives[int(piece.name)].name
    if last is None:
        return [Interval("wait", name, piece.start, piece.end)]
    turn = min(max(last[int(piece.name)], piece.start), piece.end)
    parts = Interval("straggler_wait", name, piece.start, turn), Interval("transfer", name, turn, piece.end)
    return [part for part in parts if part.end > part.start]


def _cut(intervals: list[tuple[str, str, float, float]], start: float, end: float) -> list[Interval]:
    edges = sorted({start, end, *(t for i in intervals for t in i[2:] if start < t < end)})
    waiting = sorted(intervals, key=lambda i: i[2])
    open_: list[tuple[str, str, float, float]] = []
    pieces: list[Interval] = []
    at = 0
    for left, right in zip(edges, edges[1:]):
        while at < len(waiting) and waiting[at][2] <= left:
            open_.append(waiting[at])
            at += 1
        open_ = [i for i in open_ if i[3] > left]
        kind, name = next((i[:2] for i in open_ if i[0] == "pause"), open_[-1][:2] if open_ else ("gap", ""))
        if pieces and (pieces[-1].kind, pieces[-1].name) == (kind, name):
            pieces[-1] = Interval(kind, name, pieces[-1].start, right)
        else:
            pieces.append(Interval(kind, name, left, right))
    return pieces


def _with_neighbours(pieces: list[Interval]) -> list[Interval]:
    """Gaps learn between which stages they lie; waits and pauses are no stages."""
    stages = [piece.kind if piece.kind == "data" or piece.kind in COMPUTE else "" for piece in pieces]
    before = after = ""
    befores, afters = [], []
    for stage in stages:
        befores.append(before)
        before = stage or before
    for stage in reversed(stages):
        afters.append(after)
        after = stage or after
    names = (f"{b}|{a}" for b, a in zip(befores, reversed(afters)))
    return [Interval(p.kind, name, p.start, p.end) if p.kind == "gap" else p for p, name in zip(pieces, names)]
