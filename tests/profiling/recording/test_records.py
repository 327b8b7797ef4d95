"""Stamps become seconds on rank 0's clock; what never ended is left out, what other threads did is put beside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lightning_freescale.profiling.recording.records import (
    Collective,
    Interval,
    ResolvedCollective,
    Span,
    StepRecord,
    resolve,
    stamps_of,
)


class Halves:
    """Stamps are half seconds."""

    def seconds(self, stamp: Any) -> float:
        return stamp / 2

    def release(self, stamps: Iterable[Any]) -> None:
        raise AssertionError("that is for others to decide")


def _step(start: float = 0, end: float = 20, **lists: Any) -> StepRecord:
    return StepRecord(start, end, index=3, samples=4, features="unused", **lists)


def test_every_stamp_finds_its_place() -> None:
    spans = [Span("forward", "f", 2, 4), Span("backward", "never ends", 5), Span("optimizer", "o", 14, 16)]
    collectives = [
        Collective("seen apart", "a", 4, 6, 8, done=7, moved=10),
        Collective("never waited for", "b", 4, None, None, done=9),
        Collective("plain", "c", 9, 10, 12),
    ]
    step, second = resolve([_step(spans=spans, collectives=collectives), _step(20, 22)], Halves())
    assert (step.start, step.end, step.index, step.samples) == (0, 10, 3, 4)
    assert step.spans == (Interval("forward", "f", 1, 2), Interval("optimizer", "o", 7, 8))
    assert step.collectives == (
        ResolvedCollective("seen apart", "a", 2, 3, 4, 3.5, 10),
        ResolvedCollective("plain", "c", 4.5, 5, 6, 6),
    )
    assert (second.start, second.end, second.spans, second.collectives) == (10, 11, (), ())


def test_all_times_are_rank_0s() -> None:
    step = _step(spans=[Span("data", "d", 2, 4)], collectives=[Collective("c", "c", 4, 6, 8)])
    background = [Collective("b", "", 6, done=8)]

    def to_rank_zero(seconds: np.ndarray) -> np.ndarray:
        return 100 + 2 * seconds

    (moved,) = resolve([step], Halves(), to_rank_zero, background)
    (span,), (collective,), (hidden,) = moved.spans, moved.collectives, moved.hidden
    assert (moved.start, moved.end) == (100, 120)
    assert (span.start, span.end) == (102, 104)
    assert collective[2:6] == (104, 106, 108, 108)
    assert hidden[2:6] == (106, 106, 106, 108)
    assert type(moved.start) is float


def test_an_exchange_in_the_background_belongs_to_every_step_it_was_under_way_in() -> None:
    steps = [_step(0, 10), _step(10, 20), _step(20, 30)]
    times = {"first": (2, 4), "across": (8, 12), "all": (-2, 40), "up to the edge": (4, 10), "from the edge": (20, 22)}
    background = [Collective(name, "", arrive, done=done, moved=7) for name, (arrive, done) in times.items()]
    hidden = [[one.name for one in step.hidden] for step in resolve(steps, Halves(), background=background)]
    assert hidden == [["first", "across", "all", "up to the edge"], ["across", "all"], ["all", "from the edge"]]


def test_the_stamps_of_a_step_that_nobody_needs_afterwards() -> None:
    """Its end is the start of the next one; its start is the last of them."""
    spans = [Span("forward", "f", "s1", "s2"), Span("host", "open", "s3"), Span("host", "not begun", None)]
    collectives = [Collective("a", "a", "c1", "c2", "c3"), Collective("b", "b", "c4")]
    stamps = list(stamps_of(StepRecord("start", "end", spans=spans, collectives=collectives)))
    assert stamps[-1] == "start"
    assert sorted(stamps[:-1]) == ["c1", "c2", "c3", "c4", "s1", "s2", "s3"]
