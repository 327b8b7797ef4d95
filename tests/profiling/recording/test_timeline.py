"""Stamps of a rank, their clocks, and the resolved steps in seconds on rank 0's clock."""

from __future__ import annotations

import _thread
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_freescale.profiling.collection.rank_exchange import StepBuffer
from lightning_freescale.profiling.recording import memory as module
from lightning_freescale.profiling.recording.memory import MemoryReading, memory_reader
from lightning_freescale.profiling.recording.records import (
    Collective,
    CudaClock,
    HostClock,
    Interval,
    ResolvedCollective,
    Span,
    StepRecord,
    clock_for,
    resolve,
    stamps_of,
)
from lightning_freescale.profiling.recording.timeline import Timeline
from tests.helpers.fake_cuda_events import Device


class Counting:
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


def test_nothing_is_recorded_without_a_step_or_a_clock(timeline: Timeline) -> None:
    with timeline.span("forward", "forward"), timeline.collective("a"), timeline.background_collective("b"):
        pass
    assert not timeline.recording
    assert timeline.arrive("a") is timeline.close_step() is None
    assert timeline.stamps == 0 and not timeline.background
    off = Timeline()
    off.open_step()
    assert (off.enabled, off.recording, off.on_host, off.stamp()) == (False, False, False, None)


def test_spans_in_the_order_they_began(timeline: Timeline) -> None:
    timeline.open_step()
    with timeline.span("forward", "outer"), timeline.span("backward", "inner"):
        pass
    with pytest.raises(KeyError), timeline.span("host", "fails"):
        raise KeyError
    step = timeline.close_step(7, "features", 1.5, "plan")
    assert [(span.kind, span.name, span.start, span.end) for span in step.spans] == [
        ("forward", "outer", 1, 4), ("backward", "inner", 2, 3), ("host", "fails", 5, 6),
    ]  # fmt: skip
    assert (step.start, step.end, step.samples, step.features, step.predicted, step.plan) == (0, 7, 7, "features", 1.5, "plan")
    assert timeline.stamps == 8


def test_steps_are_counted(timeline: Timeline) -> None:
    """Also one that begins where the step before ended, and one that begins anew, which keeps its number."""
    shown_text: list[StepRecord] = []
    timeline.on_step = shown_text.append
    timeline.open_step()
    first = _closed(timeline)
    timeline.open_step(first.end)
    abandoned = timeline.arrive("a")
    timeline.open_step(first.end)
    again = timeline.arrive("a")
    second = _closed(timeline)
    assert second.start == first.end and abandoned.key != again.key
    assert [first.index, second.index] == [0, 1] == [number for number, _ in timeline.ended]
    assert shown_text == [first, second]


def test_keys_tell_groups_steps_and_turns_apart(timeline: Timeline) -> None:
    keys = []
    for _ in range(2):
        timeline.open_step()
        keys += [timeline.arrive(name, group).key for name, group in (("a", ""), ("b", "g"), ("c", "g"), ("a", ""), ("b", ""))]
        assert timeline.position()[1] == {"a": 2, "g": 2, "b": 1}
        timeline.close_step()
    assert keys[:5] == ["a:0.0", "g:0.0", "g:0.1", "a:0.1", "b:0.0"]
    assert keys[5:] == ["a:1.0", "g:1.0", "g:1.1", "a:1.1", "b:1.0"], "every step counts anew"


def test_collectives_that_are_waited_for(timeline: Timeline) -> None:
    """Check that a second wait is no second collective, and that a nested collective is a part of the outer one."""
    timeline.open_step()
    twice = timeline.arrive("twice")
    for _ in range(2):
        with timeline.waiting(twice):
            pass
    with timeline.collective("outer", moved=5):
        assert timeline.in_collective
        with timeline.collective("inner"):
            pass
    assert not timeline.in_collective
    with timeline.awaited("earlier", 1):
        pass
    with timeline.awaited("now", None):
        pass
    seen = [(c.name, c.arrive, c.start, c.end, c.moved) for c in _closed(timeline).collectives]
    assert seen == [
        ("twice", 1, 2, 3, None), ("outer", 4, 5, 6, 5), ("earlier", 1, 8, 9, None), ("now", 10, 11, 12, None),
    ]  # fmt: skip


def test_exchanges_of_other_threads_are_in_the_background_but_for_autograds(timeline: Timeline) -> None:
    seen = []

    def work() -> None:
        seen.append(timeline.is_training_thread)
        with pytest.raises(KeyError), timeline.background_collective("all_reduce", 12):
            raise KeyError

    timeline.open_step()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen, timeline.is_training_thread) == ([False], True)
    (one,) = timeline.pop_background()
    assert (one.name, one.arrive, one.done, one.moved, one.start) == ("all_reduce", 1, 2, 12, None)
    assert timeline.pop_background() == [] == _closed(timeline).collectives
    # on CUDA backward runs in threads that are not Python's
    seen, done = [], _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(lambda: (seen.append(timeline.is_training_thread), done.release()), ())
    assert done.acquire(timeout=30)
    assert seen == [True]


def test_disabled_it_forgets_and_enabled_twice_it_keeps_its_clock(timeline: Timeline) -> None:
    timeline.driven = True
    timeline.open_step()
    with timeline.background_collective("a"):
        pass
    with timeline.background_collective("still under way"):
        timeline.disable()
    assert (timeline.enabled, timeline.recording, timeline.driven) == (False, False, False)
    assert not timeline.background, "not even what ends afterwards"
    timeline.enable(torch.device("cpu"))
    clock = timeline.clock
    timeline.enable(torch.device("cpu"))
    assert timeline.clock is clock and timeline.on_host
    timeline.open_step()
    assert _closed(timeline).index == 0


HALVES: Any = SimpleNamespace(seconds=lambda stamp: stamp / 2)
"""A clock whose stamps are half seconds."""


def _record(start: float = 0, end: float = 20, **lists: Any) -> StepRecord:
    return StepRecord(start, end, index=3, samples=4, features="unused", **lists)


def test_every_stamp_finds_its_place_on_rank_0s_clock() -> None:
    spans = [Span("forward", "f", 2, 4), Span("backward", "never ends", 5), Span("optimizer", "o", 14, 16)]
    collectives = [
        Collective("seen apart", "a", 4, 6, 8, done=7, moved=10),
        Collective("never waited for", "b", 4, None, None, done=9),
        Collective("plain", "c", 9, 10, 12),
    ]
    background = [Collective("b", "", 6, done=8, moved=7, at_most=True)]
    records = [_record(spans=spans, collectives=collectives), _record(20, 22)]
    step, second = resolve(records, HALVES, lambda seconds: 100 + 2 * np.asarray(seconds), background)
    assert (step.start, step.end, step.index, step.samples) == (100, 120, 3, 4)
    assert step.spans == (Interval("forward", "f", 102, 104), Interval("optimizer", "o", 114, 116))
    assert step.collectives == (
        ResolvedCollective("seen apart", "a", 104, 106, 108, 107, 10),
        ResolvedCollective("plain", "c", 109, 110, 112, 112),
    )
    assert step.hidden == (ResolvedCollective("b", "", 106, 106, 106, 108, 7, True),)
    assert (second.start, second.end, second.spans, second.collectives, second.hidden) == (120, 122, (), (), ())
    assert type(step.start) is float
    (same,) = resolve(records[:1], HALVES)
    assert (same.start, same.end) == (0, 10)


def test_what_belongs_to_a_step() -> None:
    steps = [_record(0, 10), _record(10, 20), _record(20, 30)]
    times = {"first": (2, 4), "across": (8, 12), "all": (-2, 40), "up to the edge": (4, 10), "from the edge": (20, 22)}
    background = [Collective(name, "", arrive, done=done, moved=7) for name, (arrive, done) in times.items()]
    hidden = [[one.name for one in step.hidden] for step in resolve(steps, HALVES, background=background)]
    assert hidden == [["first", "across", "all", "up to the edge"], ["across", "all"], ["all", "from the edge"]]
    # its end is the start of the next one; its start is the last of them
    spans = [Span("forward", "f", "s1", "s2"), Span("host", "open", "s3"), Span("host", "not begun", None)]
    collectives = [Collective("a", "a", "c1", "c2", "c3"), Collective("b", "b", "c4")]
    *stamps, last = stamps_of(StepRecord("start", "end", spans=spans, collectives=collectives))
    assert (sorted(stamps), last) == (["c1", "c2", "c3", "c4", "s1", "s2", "s3"], "start")


MB = 10**6


def test_what_a_process_takes_and_gives_back_is_seen() -> None:
    read = memory_reader(torch.device("cpu"))
    assert read is not None
    before = read()
    held = torch.ones(100 * MB, dtype=torch.uint8)
    with_it = read()
    assert with_it.current - before.current == pytest.approx(100 * MB, abs=5 * MB)
    assert with_it.peak >= with_it.current
    del held
    after = read()
    assert after.current - before.current == pytest.approx(0, abs=5 * MB)
    assert after.peak >= with_it.current - 5 * MB
    assert after.reserved is None


def test_where_the_kernel_does_not_say_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STATUS", tmp_path / "none")
    assert memory_reader(torch.device("cpu")) is None
    (tmp_path / "none").write_text("Name:\tpython\nVmHWM:\t  100 kB\n")
    assert memory_reader(torch.device("cpu")) is None
    assert memory_reader(torch.device("meta")) is None


def test_on_cuda_the_allocator_of_the_own_device_is_asked_if_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda", 3), []
    for figure, name in enumerate(("memory_allocated", "max_memory_allocated", "memory_reserved"), 1):
        monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: asked.append(device) or figure)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("a reading waits for nothing"))
    read = memory_reader(device)
    assert read is not None
    assert read() == MemoryReading(current=1, peak=2, reserved=3)
    assert asked == 2 * [device] * 3, "once to see whether it counts"

    def refuse(device: torch.device) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_allocated", refuse)
    assert memory_reader(torch.device("cuda", 0)) is None


CUDA = torch.device("cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device().install(monkeypatch)


def test_the_device_is_synchronized_when_the_clocks_are_tied_and_never_else(device: Device) -> None:
    device.work(3.0)
    clock = clock_for(CUDA)
    assert isinstance(clock, CudaClock) and (device.synchronized, device.now) == (1, 1003.0)
    stamps = []
    for _ in range(5):
        device.work(0.1)
        stamps.append(clock.stamp())
    assert device.now == 1003.0, "the host does not wait for a stamp"
    assert [clock.seconds(stamp) for stamp in stamps] == pytest.approx([1003.1, 1003.2, 1003.3, 1003.4, 1003.5])
    assert device.now == pytest.approx(1003.5), "it does when it asks"
    clock.release(stamps)
    assert device.synchronized == 1
    device.work(1.0)
    clock.tie()
    assert device.synchronized == 2
    assert (device.now, clock.seconds(clock.stamp())) == pytest.approx((1004.5, 1004.5))


def test_events_are_used_again_but_for_the_one_that_times_are_counted_from(device: Device) -> None:
    clock = CudaClock(CUDA)
    for turn in range(1, 51):
        stamps = [clock.stamp() for _ in range(10)]
        device.host(0.1)
        assert [clock.seconds(stamp) for stamp in stamps] == pytest.approx([1000 + 0.1 * (turn - 1)] * 10)
        clock.release(iter(stamps))
        clock.release([])
    assert device.events == 11, "ten at a time, and the one that times are counted from"


def test_times_are_right_after_an_hour(device: Device) -> None:
    """Counted from one event, milliseconds in single precision would be off by 0.1 ms by then."""
    clock, worst, steps = CudaClock(CUDA), 0.0, []
    for _ in range(36_000):
        stamps = [clock.stamp()]
        device.work(0.0371)
        stamps.append(clock.stamp())
        device.work(0.0629)
        device.host(0.1)
        steps.append(stamps)
        if len(steps) == 52:  # as the profiler does: the newest two are left alone
            worst = max(worst, *(abs(clock.seconds(stamp) - stamp.at) for stamps in steps[:50] for stamp in stamps))
            for stamps in steps[:50]:
                clock.release(reversed(stamps))
            del steps[:50]
    assert device.now > 1000 + 3599
    assert worst < 10e-6
    assert device.synchronized == 1


def _step(device: Device, timeline: Timeline, seconds: float) -> StepRecord:
    with timeline.span("forward", "forward"):
        device.work(seconds)
    device.host(seconds)
    record = timeline.close_step()
    assert record is not None
    timeline.open_step(record.end)
    return record


def test_steps_beside_watched_ones_keep_their_ends(device: Device) -> None:
    """Watched steps are resolved first, and while others still have to be the events go on being used."""
    timeline = Timeline()
    timeline.enable(CUDA)
    buffer = StepBuffer(timeline, 10)
    timeline.open_step()
    for _ in range(2):
        buffer.add_step(_step(device, timeline, 0.25))
    watched = [_step(device, timeline, 0.5) for _ in range(2)]
    buffer.add_step(_step(device, timeline, 1.0))
    _step(device, timeline, 1.0)
    seen = buffer.resolve_only(watched, lambda seconds: seconds)
    for _ in range(3):
        _step(device, timeline, 4.0)
    steps = buffer.resolve_taken(buffer.take_steps(0), lambda seconds: seconds)
    expected = pytest.approx([0.5, 0.5, 0.25, 0.25, 1.0])
    assert [step.end - step.start for step in (*seen, *steps)] == expected
    assert [step.spans[0].end - step.spans[0].start for step in (*seen, *steps)] == expected


@pytest.mark.parametrize("named", ["cuda:3", "cuda"])
def test_a_thread_that_has_chosen_no_device_stamps_on_that_of_the_timeline(device: Device, named: str) -> None:
    """Check threads of the user and of the loader, whose own device would be the first, that of another rank."""
    device.choose(3)
    timeline = Timeline()
    timeline.enable(torch.device(named))
    timeline.open_step()

    def exchange() -> None:
        for _ in range(2):  # the second time with events that were used before
            with timeline.background_collective("all_gather", 100):
                device.work(0.25)

    for _ in range(2):
        thread = threading.Thread(target=exchange)
        thread.start()
        thread.join()
        record = _step(device, timeline, 1.0)
        background = timeline.pop_background()
        (step,) = resolve([record], timeline.clock, background=background)
        assert [one.done - one.arrive for one in step.hidden] == pytest.approx([0.25] * 2)
        timeline.clock.release([stamp for one in background for stamp in (one.arrive, one.done)])


def test_on_the_host_a_stamp_is_the_time() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    before, stamp, after = time.perf_counter(), clock.stamp(), time.perf_counter()
    assert before <= clock.seconds(stamp) <= after
    clock.tie()
    clock.release([stamp])
    with pytest.raises(ValueError, match="meta"):
        clock_for(torch.device("meta"))
