"""From stamps to seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.recording.clocks import Clock
from lightning_freescale.profiling.recording.records import (
    Collective,
    ResolvedCollective,
    ResolvedSpan,
    ResolvedStep,
    StepRecord,
)

Floats = NDArray[np.float64]


def resolve(
    records: Sequence[StepRecord],
    clock: Clock,
    to_rank_zero: Callable[[Floats], Floats] = np.asarray,
    background: Sequence[Collective] = (),
) -> list[ResolvedStep]:
    """Turn the stamps of steps into seconds on rank 0's clock; what has no end is left out.

    Args:
        records: steps that have ended.
        clock: that took their stamps.
        to_rank_zero: from this host's clock to rank 0's.
        background: exchanges of other threads; those that were under way in a step are its own.
    """
    stamps = [stamp for record in records for stamp in _stamps(record)]
    stamps += [stamp for collective in background for stamp in (collective.arrive, collective.done)]
    seconds = iter(to_rank_zero(np.array([clock.seconds(stamp) for stamp in stamps])).tolist())  # all at once: it is quicker
    times = [_times(record, seconds) for record in records]
    elsewhere = [_elsewhere(collective, seconds) for collective in background]
    return [_step(*one, elsewhere) for one in times]


def stamps_of(record: StepRecord) -> Iterator[Any]:
    """The stamps of a step that nobody needs once it is resolved, its start last; its end is the start of the next."""
    for span in record.spans:
        yield from (stamp for stamp in (span.start, span.end) if stamp is not None)
    for collective in record.collectives:
        yield from (stamp for stamp in (collective.arrive, collective.start, collective.end) if stamp is not None)
    yield record.start


def _stamps(record: StepRecord) -> Iterator[Any]:
    yield from (record.start, record.end)
    for span in record.spans:
        if span.end is not None:
            yield from (span.start, span.end)
    for one in record.collectives:
        if one.end is not None:
            yield from (one.arrive, one.start, one.end, one.end if one.done is None else one.done)


def _times(
    record: StepRecord, seconds: Iterator[float]
) -> tuple[StepRecord, float, float, tuple[ResolvedSpan, ...], tuple[ResolvedCollective, ...]]:
    """Takes the seconds in the order of :func:`_stamps`."""
    start, end = next(seconds), next(seconds)
    spans = tuple(ResolvedSpan(s.kind, s.name, next(seconds), next(seconds)) for s in record.spans if s.end is not None)
    collectives = tuple(
        ResolvedCollective(c.name, c.key, next(seconds), next(seconds), next(seconds), next(seconds), c.moved)
        for c in record.collectives
        if c.end is not None
    )
    return record, start, end, spans, collectives


def _elsewhere(one: Collective, seconds: Iterator[float]) -> ResolvedCollective:
    arrive, done = next(seconds), next(seconds)
    return ResolvedCollective(one.name, one.key, arrive, arrive, arrive, done, one.moved)


def _step(
    record: StepRecord,
    start: float,
    end: float,
    spans: tuple[ResolvedSpan, ...],
    collectives: tuple[ResolvedCollective, ...],
    elsewhere: Sequence[ResolvedCollective],
) -> ResolvedStep:
    hidden = tuple(one for one in elsewhere if one.arrive < end and one.done > start)
    return ResolvedStep(start, end, record.index, record.samples, spans, collectives, hidden)
