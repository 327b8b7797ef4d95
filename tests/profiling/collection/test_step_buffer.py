"""The steps of a rank on their way to the others: none is lost, none comes twice, and nothing piles up."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lightning_freescale.profiling.collection.step_buffer import StepBuffer
from lightning_freescale.profiling.recording.records import Collective, ResolvedStep, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline


def _same(seconds: float) -> float:
    return seconds


@pytest.fixture
def timeline() -> Timeline:
    made = Timeline()
    made.enable(torch.device("cpu"))
    return made


def _steps(first: int, until: int) -> list[StepRecord]:
    """Of a second each."""
    return [StepRecord(float(index), index + 1.0, index) for index in range(first, until)]


def _background(timeline: Timeline, name: str, arrive: float, done: float) -> None:
    timeline.background.append(Collective(name, "", arrive, done=done))


def _indices(steps: list[StepRecord] | list[ResolvedStep]) -> list[int]:
    return [step.index for step in steps]


def _window(buffer: StepBuffer, records: list[StepRecord], leave: int = 0) -> list[ResolvedStep]:
    for record in records:
        buffer.add_step(record)
    return buffer.resolve_taken(buffer.take_steps(leave), _same)


def test_the_newest_wait(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 3)
    assert _indices(_window(buffer, _steps(0, 6), leave=2)) == [0, 1, 2, 3]
    assert _indices(buffer.waiting) == [4, 5]
    assert _indices(list(buffer.recent)) == [1, 2, 3]
    assert _indices(_window(buffer, _steps(6, 8))) == [4, 5, 6, 7]
    assert (buffer.waiting, buffer.count) == ([], 8)
    assert _indices(list(buffer.recent)) == [5, 6, 7]


def test_times_are_rank_0s(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 3)
    for record in _steps(0, 2):
        buffer.add_step(record)
    _background(timeline, "late", 0.5, 1.5)
    first, second = buffer.resolve_taken(buffer.take_steps(0), lambda seconds: seconds + 100)
    assert (first.start, second.end) == (100, 102)
    assert [one.arrive for step in (first, second) for one in step.hidden] == [100.5, 100.5]


def test_an_exchange_that_spans_two_windows_is_hidden_in_both(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 10)
    _background(timeline, "inside", 0.5, 0.75)
    _background(timeline, "across", 1.5, 2.5)  # other threads are ahead of the steps that wait
    _background(timeline, "later", 2.25, 3.5)
    first = _window(buffer, _steps(0, 3), leave=1)
    second = _window(buffer, _steps(3, 4))
    hidden = [[one.name for one in step.hidden] for step in (*first, *second)]
    assert hidden == [["inside"], ["across"], ["across", "later"], ["later"]]


def test_exchanges_do_not_pile_up(timeline: Timeline) -> None:
    buffer, seen = StepBuffer(timeline, 10), []
    for first in range(0, 400, 4):
        for index in range(first, first + 4):
            _background(timeline, f"at {index}", index + 0.5, index + 1.5)
        seen += [one.name for step in _window(buffer, _steps(first, first + 4)) for one in step.hidden]
        assert len(buffer._background) <= 1
        assert not timeline.background
    counts = Counter(seen)
    assert counts.pop("at 399") == 1, "its second step has not come"
    assert counts == dict.fromkeys((f"at {index}" for index in range(399)), 2)


def test_steps_in_between_leave_what_others_need(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 10)
    buffer.add_step(_steps(0, 1)[0])
    buffer.add_step(_steps(3, 4)[0])
    _background(timeline, "across", 0.5, 3.5)
    watched = buffer.resolve_only(_steps(1, 3), _same)
    steps = buffer.resolve_taken(buffer.take_steps(0), _same)
    assert [[one.name for one in step.hidden] for step in (*watched, *steps)] == [["across"]] * 4
    assert _indices(list(buffer.recent)) == [0, 3], "watched steps are kept elsewhere"


def test_the_rest_when_those_taken_were_resolved(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 10)
    _window(buffer, _steps(0, 4), leave=2)
    records, steps = buffer.resolve_rest(_same)
    assert _indices(records) == _indices(steps) == [0, 1, 2, 3]
    assert _indices(list(buffer.recent)) == [0, 1, 2, 3], "none twice"


def test_the_rest_when_those_taken_were_not_resolved(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 10)
    _window(buffer, _steps(0, 2))
    for record in _steps(2, 6):
        buffer.add_step(record)
    buffer.take_steps(2)
    records, steps = buffer.resolve_rest(_same)
    assert _indices(records) == _indices(steps) == [2, 3, 4, 5]
    assert _indices(list(buffer.recent)) == [0, 1, 2, 3, 4, 5]


def test_the_rest_before_anything_was_taken_and_when_nothing_waits(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 10)
    buffer.add_step(_steps(0, 1)[0])
    assert [_indices(each) for each in buffer.resolve_rest(_same)] == [[0], [0]]
    buffer = StepBuffer(timeline, 10)
    _window(buffer, _steps(0, 2))
    assert [_indices(each) for each in buffer.resolve_rest(_same)] == [[0, 1], [0, 1]]
