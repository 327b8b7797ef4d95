"""From stamps to seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_freescale.profiling.recording.clocks import Clock
from lightning_freescale.profiling.recording.records import (
    Collective,
    ResolvedCollective,
    ResolvedSpan,
    ResolvedStep,
    StepRecord,
)


def resolve(
    record: StepRecord,
    clock: Clock,
    to_rank_zero: Callable[[float], float] = float,
    background: Iterable[Collective] = (),
) -> ResolvedStep:
    """Turn the stamps of a step into seconds on rank 0's clock; those it does not end with are left out.

    Args:
        record: the step, which has ended.
        clock: that took its stamps.
        to_rank_zero: from this host's clock to rank 0's.
        background: exchanges of other threads; those that were under way in the step are its own.
    """

    def at(stamp: Any) -> float:
        return to_rank_zero(clock.seconds(stamp))

    def seconds_of(c: Collective) -> ResolvedCollective:
        end = at(c.end)
        return ResolvedCollective(c.name, c.key, at(c.arrive), at(c.start), end, end if c.done is None else at(c.done), c.moved)

    start, end = at(record.start), at(record.end)
    elsewhere = (ResolvedCollective(c.name, c.key, a := at(c.arrive), a, d := at(c.done), d, c.moved) for c in background)
    return ResolvedStep(
        start,
        end,
        record.index,
        record.samples,
        tuple(ResolvedSpan(s.kind, s.name, at(s.start), at(s.end)) for s in record.spans if s.end is not None),
        tuple(seconds_of(c) for c in record.collectives if c.end is not None),
        tuple(c for c in elsewhere if c.start < end and c.done > start),
    )


def stamps_of(record: StepRecord) -> Iterator[Any]:
    """The stamps of a step that nobody needs once it is resolved, its start last; its end is the start of the next."""
    for span in record.spans:
        yield from (stamp for stamp in (span.start, span.end) if stamp is not None)
    for collective in record.collectives:
        yield from (stamp for stamp in (collective.arrive, collective.start, collective.end) if stamp is not None)
    yield record.start
