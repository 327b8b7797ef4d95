"""What is stamped becomes the record of the step in progress; without a step nothing does."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_freescale.profiling.recording.records import StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline


class Counting:
    """A clock whose stamps count up."""

    def __init__(self) -> None:
        self.now = -1

    def stamp(self) -> int:
        self.now += 1
        return self.now


@pytest.fixture
def timeline() -> Timeline:
    made = Timeline()
    made.enable(torch.device("cpu"))
    made.clock = Counting()
    return made


def _closed(timeline: Timeline) -> StepRecord:
    step = timeline.close_step()
    assert step is not None
    return step


def _inside_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_nothing_is_recorded_without_a_step(timeline: Timeline) -> None:
    with timeline.span("forward", "forward"), timeline.collective("a"), timeline.background_collective("b"):
        pass
    assert not timeline.recording
    assert timeline.arrive("a") is None
    assert timeline.close_step() is None
    assert timeline.stamps == 0
    assert not timeline.background


def test_nobody_wants_the_records_of_one_that_is_not_enabled() -> None:
    timeline = Timeline()
    timeline.open_step()
    assert (timeline.enabled, timeline.recording, timeline.on_host, timeline.stamp()) == (False, False, False, None)


def test_spans_in_the_order_they_began(timeline: Timeline) -> None:
    timeline.open_step()
    with timeline.span("forward", "outer"), timeline.span("backward", "inner"):
        pass
    with pytest.raises(KeyError), timeline.span("host", "fails"):
        raise KeyError
    step = timeline.close_step(7, "features")
    assert [(span.kind, span.name, span.start, span.end) for span in step.spans] == [
        ("forward", "outer", 1, 4), ("backward", "inner", 2, 3), ("host", "fails", 5, 6),
    ]  # fmt: skip
    assert (step.start, step.end, step.samples, step.features) == (0, 7, 7, "features")
    assert timeline.stamps == 8


def test_a_step_may_begin_where_the_one_before_ended_and_they_are_counted(timeline: Timeline) -> None:
    told: list[StepRecord] = []
    timeline.on_step = told.append
    timeline.open_step()
    first = _closed(timeline)
    timeline.open_step(first.end)
    second = _closed(timeline)
    assert second.start == first.end
    assert [first.index, second.index] == [0, 1]
    assert told == [first, second]


def test_a_step_that_begins_anew_keeps_its_number_and_no_key_comes_twice(timeline: Timeline) -> None:
    timeline.open_step()
    abandoned = timeline.arrive("a")
    timeline.open_step()
    again = timeline.arrive("a")
    assert _closed(timeline).index == 0
    assert abandoned.key != again.key
    timeline.open_step()
    assert _closed(timeline).index == 1


def test_keys_tell_groups_steps_and_turns_apart(timeline: Timeline) -> None:
    keys = []
    for _ in range(2):
        timeline.open_step()
        keys += [timeline.arrive(name, group).key for name, group in (("a", ""), ("b", "g"), ("c", "g"), ("a", ""), ("b", ""))]
        timeline.close_step()
    assert keys[:5] == ["a:0.0", "g:0.0", "g:0.1", "a:0.1", "b:0.0"]
    assert keys[5:] == ["a:1.0", "g:1.0", "g:1.1", "a:1.1", "b:1.0"], "every step counts anew"


def test_a_second_wait_is_no_second_collective(timeline: Timeline) -> None:
    timeline.open_step()
    collective = timeline.arrive("a")
    for _ in range(2):
        with timeline.waiting(collective):
            pass
    assert _closed(timeline).collectives == [collective]
    assert (collective.start, collective.end) == (2, 3)


def test_a_collective_inside_another_is_a_part_of_it(timeline: Timeline) -> None:
    timeline.open_step()
    with timeline.collective("outer", moved=5):
        assert timeline.in_collective
        with timeline.collective("inner"):
            pass
    assert not timeline.in_collective
    with timeline.collective("after"):
        pass
    seen = [(c.name, c.arrive, c.start, c.end, c.moved) for c in _closed(timeline).collectives]
    assert seen == [("outer", 1, 2, 3, 5), ("after", 4, 5, 6, None)]


def test_what_is_awaited_has_arrived_before(timeline: Timeline) -> None:
    timeline.open_step()
    earlier = timeline.stamp()
    with timeline.awaited("rows", earlier):
        pass
    with timeline.awaited("rows", None):
        pass
    first, second = _closed(timeline).collectives
    assert (first.arrive, first.start > first.arrive) == (1, True)
    assert second.arrive == first.end + 1
    assert first.key != second.key


def test_exchanges_of_other_threads_are_in_the_background(timeline: Timeline) -> None:
    seen = []

    def work() -> None:
        seen.append(timeline.is_training_thread)
        with pytest.raises(KeyError), timeline.background_collective("all_reduce", 12):
            raise KeyError

    timeline.open_step()
    _inside_a_thread(work)
    assert (seen, timeline.is_training_thread) == ([False], True)
    (one,) = timeline.pop_background()
    assert (one.name, one.arrive, one.done, one.moved, one.start) == ("all_reduce", 1, 2, 12, None)
    assert timeline.pop_background() == []
    assert not _closed(timeline).collectives


def test_autograd_threads_work_for_the_one_that_trains(timeline: Timeline) -> None:
    """On CUDA backward runs in threads that are not Python's."""
    seen = []

    def work() -> None:
        seen.append(timeline.is_training_thread)

    import _thread

    done = _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(lambda: (work(), done.release()), ())
    assert done.acquire(timeout=30)
    assert seen == [True]


def test_disabled_it_forgets(timeline: Timeline) -> None:
    timeline.driven = True
    timeline.open_step()
    with timeline.background_collective("a"):
        pass
    with timeline.background_collective("still under way"):
        timeline.disable()
    assert (timeline.enabled, timeline.recording, timeline.driven) == (False, False, False)
    assert not timeline.background, "not even what ends afterwards"
    timeline.enable(torch.device("cpu"))
    assert timeline.on_host
    timeline.open_step()
    assert _closed(timeline).index == 0


def test_enabled_twice_it_keeps_its_clock(timeline: Timeline) -> None:
    clock = timeline.clock
    timeline.enable(torch.device("cpu"))
    assert timeline.clock is clock
