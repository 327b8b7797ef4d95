"""Stamps of a device that runs behind the host, in seconds of the host's clock, without making the host wait."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lightning_freescale.profiling.collection.step_buffer import StepBuffer
from lightning_freescale.profiling.recording.clocks import CudaClock, HostClock, clock_for
from lightning_freescale.profiling.recording.records import StepRecord, resolve
from lightning_freescale.profiling.recording.timeline import Timeline
from tests.helpers.fake_cuda_events import Device

CUDA = torch.device("cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device().install(monkeypatch)


def test_a_stamp_is_when_the_device_gets_there_not_when_the_host_does(device: Device) -> None:
    clock = CudaClock(CUDA)
    device.work(2.0)
    stamp = clock.stamp()
    assert device.now == 1000.0, "the host does not wait for it"
    assert clock.seconds(stamp) == pytest.approx(1002.0, abs=1e-6)
    assert device.now == 1002.0, "it does when it asks"


def test_the_device_is_synchronized_when_the_clocks_are_tied_and_never_else(device: Device) -> None:
    device.work(3.0)
    clock = CudaClock(CUDA)
    assert (device.synchronized, device.now) == (1, 1003.0)
    stamps = []
    for _ in range(5):
        device.work(0.1)
        stamps.append(clock.stamp())
    assert [clock.seconds(stamp) for stamp in stamps] == pytest.approx([1003.1, 1003.2, 1003.3, 1003.4, 1003.5])
    clock.release(stamps)
    assert device.synchronized == 1
    device.work(1.0)
    clock.tie()
    assert (device.synchronized, device.now) == (2, pytest.approx(1004.5))
    assert clock.seconds(clock.stamp()) == pytest.approx(1004.5)


def test_events_are_used_again(device: Device) -> None:
    clock = CudaClock(CUDA)
    for _ in range(50):
        stamps = [clock.stamp() for _ in range(10)]
        device.host(0.1)
        clock.release(iter(stamps))
    assert device.events == 11, "ten at a time, and the one that times are counted from"
    clock.release([])
    assert clock.seconds(clock.stamp()) == pytest.approx(1005.0)


def test_an_event_that_times_are_counted_from_is_not_used_for_others(device: Device) -> None:
    clock = CudaClock(CUDA)
    clock.release([clock.stamp(), clock.stamp()])
    device.host(7.0)
    stamps = [clock.stamp() for _ in range(5)]
    device.host(1.0)
    assert [clock.seconds(stamp) for stamp in stamps] == pytest.approx([1007.0] * 5)


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
    lengths = [[step.end - step.start for step in these] for these in (seen, steps)]
    assert lengths == [pytest.approx([0.5, 0.5]), pytest.approx([0.25, 0.25, 1.0])]
    assert [step.spans[0].end - step.spans[0].start for step in steps] == pytest.approx([0.25, 0.25, 1.0])


@pytest.mark.parametrize("named", ["cuda:3", "cuda"])
def test_a_thread_that_has_chosen_no_device_stamps_on_that_of_the_timeline(device: Device, named: str) -> None:
    """The user's threads, and those of the data loader: their own device would be the first, which is another rank's."""
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
        device.host(1.0)
        record = timeline.close_step()
        assert record is not None
        background = timeline.pop_background()
        (step,) = resolve([record], timeline.clock, background=background)
        assert [one.done - one.arrive for one in step.hidden] == pytest.approx([0.25] * 2)
        timeline.clock.release([stamp for one in background for stamp in (one.arrive, one.done)])
        timeline.open_step(record.end)


def test_the_clock_fits_the_device(device: Device) -> None:
    assert isinstance(clock_for(CUDA), CudaClock)
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


def test_on_the_host_a_stamp_is_the_time() -> None:
    clock = HostClock()
    before, stamp, after = time.perf_counter(), clock.stamp(), time.perf_counter()
    assert before <= clock.seconds(stamp) <= after
    clock.tie()
    clock.release([stamp])
