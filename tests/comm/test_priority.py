"""A lane lets a higher one go first, but not for ever, and not one that only waits for its peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from lightning_freescale.comm import LaneOptions
from lightning_freescale.comm import priority as module
from lightning_freescale.comm.priority import Activity, PriorityGate

MAX_PAUSE = 1.0


class Clock:
    """Time that passes only while somebody waits, one moment at a time; also the condition that is waited for."""

    def __init__(self) -> None:
        self.now, self.moments = 1000.0, 0
        self.meanwhile: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float) -> None:
        assert 0 < timeout <= MAX_PAUSE + 1e-9
        self.now += min(timeout, 0.1) + 1e-9
        self.moments += 1
        self.meanwhile()

    def notify_all(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Lanes:
    """Collectives under way."""

    def __init__(self, clock: Clock) -> None:
        self.gate, self._clock, self._stack = PriorityGate(), clock, ExitStack()
        self.gate._changed = clock

    def begin(self, priority: int, total: int = 100, idle: float = 0.0, **options: Any) -> Activity:
        activity = self._stack.enter_context(self.gate.track(LaneOptions(priority=priority, **options), total))
        activity.last_progress = self._clock.now - idle
        return activity

    def pause(self, activity: Activity) -> float:
        """Seconds that a lane pauses."""
        start = self._clock.now
        self.gate.yield_to_higher(activity, MAX_PAUSE)
        assert activity.last_progress == self._clock.now
        return self._clock.now - start

    def end_all(self) -> None:
        self._stack.close()


@pytest.fixture
def lanes(clock: Clock) -> Iterator[Lanes]:
    lanes = Lanes(clock)
    yield lanes
    lanes.end_all()
    assert not lanes.gate._activities


def test_alone_it_does_not_pause(lanes: Lanes) -> None:
    assert lanes.pause(lanes.begin(0)) == 0


@pytest.mark.parametrize(("own", "other", "pauses"), [(0, 1, True), (-2, -1, True), (0, 0, False), (1, 0, False)])
def test_it_pauses_for_a_higher_lane_only(lanes: Lanes, own: int, other: int, pauses: bool) -> None:
    activity = lanes.begin(own)
    lanes.begin(other)
    assert lanes.pause(activity) == (pytest.approx(MAX_PAUSE) if pauses else 0)


def test_it_pauses_no_longer_than_its_limit_for_a_lane_that_is_always_busy(lanes: Lanes, clock: Clock) -> None:
    activity, busy = lanes.begin(0), lanes.begin(1)
    clock.meanwhile = lambda: setattr(busy, "last_progress", clock.now)
    for _ in range(3):
        assert lanes.pause(activity) == pytest.approx(MAX_PAUSE)


@pytest.mark.parametrize(("idle", "pauses"), [(0.0, 1.0), (0.3, 0.7), (0.95, 0.05), (1.0, 0.0), (50.0, 0.0)])
def test_a_higher_lane_without_progress_is_waited_for_until_the_limit(lanes: Lanes, idle: float, pauses: float) -> None:
    activity = lanes.begin(0)
    lanes.begin(1, idle=idle)
    assert lanes.pause(activity) == pytest.approx(pauses, abs=1e-6)
    assert lanes.pause(activity) == 0  # still without progress


def test_of_several_higher_lanes_the_one_that_moves_counts(lanes: Lanes) -> None:
    activity = lanes.begin(0)
    for priority, idle in ((1, 50.0), (3, 0.4), (2, 20.0)):
        lanes.begin(priority, idle=idle)
    assert lanes.pause(activity) == pytest.approx(0.6)


def test_it_goes_on_once_the_higher_lane_is_done(lanes: Lanes, clock: Clock) -> None:
    activity, high = lanes.begin(0), lanes.begin(1)
    clock.meanwhile = lambda: lanes.gate._activities.remove(high) if clock.moments == 3 else None
    assert lanes.pause(activity) == pytest.approx(0.3)
    lanes.gate._activities.append(high)


@pytest.mark.parametrize(("total", "limit", "pauses"), [(99, 100, True), (100, 100, False), (10**9, None, True), (0, 0, False)])
def test_only_for_small_collectives_where_the_higher_lane_says_so(
    lanes: Lanes, total: int, limit: int | None, pauses: bool
) -> None:
    activity = lanes.begin(0, total=5, preempt_below_bytes=0)
    lanes.begin(1, total=total, preempt_below_bytes=limit)
    assert lanes.pause(activity) == (pytest.approx(MAX_PAUSE) if pauses else 0)


def test_a_collective_that_fails_is_no_longer_tracked() -> None:
    gate = PriorityGate()

    @contextmanager
    def tracked() -> Iterator[None]:
        with gate.track(LaneOptions(), 1):
            yield

    with pytest.raises(KeyError), tracked():
        raise KeyError
    assert not gate._activities


def test_a_paused_thread_wakes_up_when_the_higher_lane_ends() -> None:
    gate, passed = PriorityGate(), threading.Event()

    def low() -> None:
        with gate.track(LaneOptions(), 1) as activity:
            gate.yield_to_higher(activity, 60.0)
        passed.set()

    with gate.track(LaneOptions(priority=1), 1):
        thread = threading.Thread(target=low, daemon=True)
        thread.start()
        assert not passed.wait(0.2)
    assert passed.wait(10)


def test_many_lanes_at_once_all_come_to_their_end() -> None:
    gate, done = PriorityGate(), []

    def work(priority: int) -> None:
        for _ in range(5):
            with gate.track(LaneOptions(priority=priority), 1) as activity:
                for _ in range(5):
                    gate.yield_to_higher(activity, 0.002)
                    time.sleep(0.0005)
        done.append(priority)

    threads = [threading.Thread(target=work, args=(number % 4,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == sorted(number % 4 for number in range(8))
    assert not gate._activities
