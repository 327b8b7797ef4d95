"""Write the steps of all ranks as one Chrome trace; https://ui.perfetto.dev opens it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from lightning_freescale.profiling.analysis.breakdown import StepBreakdown, as_array, attribute, bubble
from lightning_freescale.profiling.analysis.intervals import intervals_of
from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.trace.arrows import Arrivals, Wait, arrows, last_arrivals, noticeable_waits
from lightning_freescale.profiling.reporting.trace.chrome import Event, Process
from lightning_freescale.profiling.reporting.trace.rank_tracks import RankTracks

_ORDER = {"X": 0, "C": 1, "i": 1, "s": 2, "f": 3}
"""Of events at one time: a slice is there before an arrow binds to it, and an arrow begins before it ends."""


def write_trace(
    path: str | Path,
    steps: Sequence[Sequence[ResolvedStep]],
    kineto: Sequence[Sequence[Mapping[str, Any]]] = (),
    about: Mapping[str, Any] | None = None,
    *,
    aligned: bool = True,
) -> Path:
    """Write one process per rank, all on rank 0's clock, in microseconds from the first step.

    A rank's threads hold its steps, its stages without the waits inside them, its waits split where the last rank arrived, and
    exchanges in the background: those of other threads, and those under way well before anybody waited for them. An arrow leads
    from what the late rank did before it arrived to each wait for it of more than 50 microseconds.

    Args:
        path: the file; a reader finds the old one or the whole new one. Makes the folder if there is none.
        steps: for every step the records of all ranks.
        kineto: for every rank what :meth:`~lightning_freescale.profiling.reporting.kineto.KinetoWindow.events` gave on rank 0's
            clock; empty if there was no window. They become further threads of the rank.
        about: facts about the run, kept under ``otherData``.
        aligned: whether the ranks' clocks are comparable. If not, or if there is one rank only, nobody knows who was late:
            waits are not split and there are no arrows. Ranks that are not aligned begin at zero each.

    Raises:
        ValueError: a step, or ``kineto``, has another number of ranks than the first step.
    """
    ranks = _ranks(steps, kineto)
    tids = count(1)
    everybody = Process(ranks, "all ranks", tids, order=0)
    tracks = [RankTracks(rank, origin, tids) for rank, origin in enumerate(_origins(steps, kineto, ranks, aligned))]
    split = aligned and ranks > 1
    waits: list[Wait] = []
    events: list[Event] = []
    for row in steps:
        arrivals = last_arrivals(row) if split else None
        parts = [_add(track, step, arrivals) for track, step in zip(tracks, row)]
        bubbles = {"ph": "C", **everybody["bubble"].place, "name": "bubble", "ts": tracks[0].tick(row[0].start) / 8}
        events.append({**bubbles, "args": {"share": bubble(as_array(parts))}})
        waits += noticeable_waits(row, arrivals, tracks[0].tick) if arrivals is not None else ()
    for track, found in zip(tracks, kineto):
        track.add_kineto(found)
    for track in tracks:
        track.settle()
        events += track.events()
    flows, left_out = arrows(waits, tracks)
    events += flows
    events.sort(key=lambda event: (event["ts"], _ORDER[event["ph"]]))  # stable: outer slices stay before inner ones
    processes = [everybody, *(track.process for track in tracks)]
    metadata = [event for process in processes if process.threads for event in process.metadata()]
    return _write(Path(path), [*metadata, *events], {**(about or {}), **({"arrows_left_out": left_out} if left_out else {})})


def _add(track: RankTracks, step: ResolvedStep, arrivals: Arrivals | None) -> StepBreakdown:
    last = [c.arrive if arrivals is None else arrivals[c.key].seconds for c in step.collectives]
    pieces = intervals_of(step, last)
    track.add_step(step, pieces, arrivals)
    return attribute(step, last, pieces)


def _ranks(steps: Sequence[Sequence[ResolvedStep]], kineto: Sequence[Sequence[Mapping[str, Any]]]) -> int:
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
    firsts = [min(_begins(row[rank]) for row in steps) if steps else float("inf") for rank in range(ranks)]
    for rank, events in enumerate(kineto):
        firsts[rank] = min([firsts[rank], *(event["ts"] for event in events)])
    finite = [first if first < float("inf") else 0.0 for first in firsts]
    return [min(finite)] * ranks if aligned and ranks else finite


def _begins(step: ResolvedStep) -> float:
    return min([step.start, *(c.arrive for c in (*step.collectives, *step.hidden))])


def _write(path: Path, events: Iterable[Event], about: Mapping[str, Any]) -> Path:
    """Event by event, a line each."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # some readers know no \u
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            separator = '{"displayTimeUnit":"ms","traceEvents":[\n'
            for event in events:
                file.write(separator + encode(event))
                separator = ",\n"
            file.write(f'{separator if separator[0] == "{" else ""}\n],"otherData":{encode(about)}}}\n')
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
