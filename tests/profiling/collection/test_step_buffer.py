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


def _window(recorded: StepBuffer, records: list[StepRecord], leave: int = 0) -> list[ResolvedStep]:
    for record in records:
        recorded.add(record)
    return recorded.resolve(recorded.take(leave), _same)


def test_the_newest_wait(timeline: Timeline) -> None:
    recorded = StepBuffer(timeline, 3)
    assert _indices(_window(recorded, _steps(0, 6), leave=2)) == [0, 1, 2, 3]
    assert _indices(recorded.waiting) == [4, 5]
    assert _indices(list(recorded.recent)) == [1, 2, 3]
    assert _indices(_window(recorded, _steps(6, 8))) == [4, 5, 6, 7]
    assert (recorded.waiting, recorded.count) == ([], 8)
    assert _indices(list(recorded.recent)) == [5, 6, 7]


def test_times_are_rank_0s(timeline: Timeline) -> None:
    recorded = StepBuffer(timeline, 3)
    for record in _steps(0, 2):
        recorded.add(record)
    _background(timeline, "late", 0.5, 1.5)
    first, second = recorded.resolve(recorded.take(0), lambda seconds: seconds + 100)
    assert (first.start, second.end) == (100, 102)
    assert [one.arrive for step in (first, second) for one in step.hidden] == [100.5, 100.5]


def test_an_exchange_that_spans_two_windows_is_hidden_in_both(timeline: Timeline) -> None:
    recorded = StepBuffer(timeline, 10)
    _background(timeline, "inside", 0.5, 0.75)
    _background(timeline, "across", 1.5, 2.5)  # other threads are ahead of the steps that wait
    _background(timeline, "later", 2.25, 3.5)
    first = _window(recorded, _steps(0, 3), leave=1)
    second = _window(recorded, _steps(3, 4))
    hidden = [[one.name for one in step.hidden] for step in (*first, *second)]
    assert hidden == [["inside"], ["across"], ["across", "later"], ["later"]]


def test_exchanges_do_not_pile_up(timeline: Timeline) -> None:
    recorded, seen = StepBuffer(timeline, 10), []
    for first in range(0, 400, 4):
        for index in range(first, first + 4):
            _background(timeline, f"at {index}", index + 0.5, index + 1.5)
        seen += [one.name for step in _window(recorded, _steps(first, first + 4)) for one in step.hidden]
        assert len(recorded._elsewhere) <= 1
        assert not timeline.background
    counts = Counter(seen)
    assert counts.pop("at 399") == 1, "its second step has not come"
    assert counts == dict.fromkeys((f"at {index}" for index in range(399)), 2)


def test_steps_in_between_leave_what_others_need(timeline: Timeline) -> None:
    recorded = StepBuffer(timeline, 10)
    recorded.add(_steps(0, 1)[0])
    recorded.add(_steps(3, 4)[0])
    _background(timeline, "across", 0.5, 3.5)
    watched = recorded.resolve_only(_steps(1, 3), _same)
    steps = recorded.resolve(recorded.take(0), _same)
    assert [[one.name for one in step.hidden] for step in (*watched, *steps)] == [["across"]] * 4
    assert _indices(list(recorded.recent)) == [0, 3], "watched steps are kept elsewhere"


def test_the_rest_when_those_taken_were_resolved(timeline: Timeline) -> None:
    recorded = StepBuffer(timeline, 10)
    _window(recorded, _steps(0, 4), leave=2)
    records, steps = recorded.resolve_rest(_same)
    assert _indices(records) == _indices(steps) == [0, 1, 2, 3]
    assert _indices(list(recorded.recent)) == [0, 1, 2, 3], "none twice"


def test_the_rest_when_those_taken_were_not_resolved(timeline: Timeline) -> None:
    recorded = StepBuffer(timeline, 10)
    _window(recorded, _steps(0, 2))
    for record in _steps(2, 6):
        recorded.add(record)
    recorded.take(2)
    records, steps = recorded.resolve_rest(_same)
    assert _indices(records) == _indices(steps) == [2, 3, 4, 5]
    assert _indices(list(recorded.recent)) == [0, 1, 2, 3, 4, 5]


def test_the_rest_before_anything_was_taken_and_when_nothing_waits(timeline: Timeline) -> None:
    recorded = StepBuffer(timeline, 10)
    recorded.add(_steps(0, 1)[0])
    assert [_indices(each) for each in recorded.resolve_rest(_same)] == [[0], [0]]
    recorded = StepBuffer(timeline, 10)
    _window(recorded, _steps(0, 2))
    assert [_indices(each) for each in recorded.resolve_rest(_same)] == [[0, 1], [0, 1]]
