"""A lane pauses for a higher one for a limited time. Calls keep their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.transports import priority as module
from lightning_freescale.comm.transports.priority import PRIORITY_GATE, Activity, PriorityGate
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import TIMEOUT, everyone_sends, lane_threads, make_group

MAX_PAUSE = 1.0


class Clock:
    """A clock that advances only during a wait, and the condition that a lane waits for."""

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


class Collectives:
    def __init__(self, clock: Clock) -> None:
        self.gate, self.clock, self.stack = PriorityGate(), clock, ExitStack()
        self.gate._changed = clock

    def begin(self, priority: int, idle: float = 0.0) -> Activity:
        activity = self.stack.enter_context(self.gate.track(priority))
        activity.last_progress = self.clock.now - idle
        return activity

    def pause(self, activity: Activity) -> float:
        start = self.clock.now
        self.gate.yield_to_higher(activity)
        assert activity.last_progress == self.clock.now
        return self.clock.now - start


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collectives]:
    lanes = Collectives(Clock())
    monkeypatch.setattr(module, "time", lanes.clock)
    monkeypatch.setattr(module, "MAX_PAUSE_SECONDS", MAX_PAUSE)
    yield lanes
    lanes.stack.close()
    assert not lanes.gate._activities


@pytest.mark.parametrize(
    ("own", "others", "seconds"),
    [
        (0, [], 0),
        (0, [(1, 0.0)], MAX_PAUSE),
        (-2, [(-1, 0.0)], MAX_PAUSE),
        (0, [(0, 0.0)], 0),
        (1, [(0, 0.0)], 0),
        # a higher lane without progress holds a lower one up until the limit
        *((0, [(1, idle)], seconds) for idle, seconds in [(0.3, 0.7), (0.95, 0.05), (1.0, 0.0), (50.0, 0.0)]),
        (0, [(1, 50.0), (3, 0.4), (2, 20.0)], 0.6),  # the moving one of several counts
    ],
)
def test_a_lane_pauses_for_higher_ones_that_make_progress(
    lanes: Collectives, own: int, others: list[tuple[int, float]], seconds: float
) -> None:
    activity = lanes.begin(own)
    for priority, idle in others:
        lanes.begin(priority, idle=idle)
    assert lanes.pause(activity) == pytest.approx(seconds, abs=1e-6)
    assert lanes.pause(activity) == 0  # still without progress


def test_it_pauses_no_longer_than_its_limit_for_a_lane_that_is_always_busy(lanes: Collectives) -> None:
    activity, busy = lanes.begin(0), lanes.begin(1)
    lanes.clock.meanwhile = lambda: setattr(busy, "last_progress", lanes.clock.now)
    for _ in range(3):
        assert lanes.pause(activity) == pytest.approx(MAX_PAUSE)


def test_lanes_are_counted_by_priority_and_a_collective_that_fails_is_no_longer_tracked() -> None:
    gate = PriorityGate()
    gate.lanes.update({1: 1, 2: 0})
    assert gate.has_higher_lane(0) and not gate.has_higher_lane(1)
    with pytest.raises(KeyError), gate.track(0):
        raise KeyError
    assert not gate._activities


def test_a_paused_thread_wakes_up_when_the_higher_lane_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAUSE_SECONDS", 60.0)
    gate, passed = PriorityGate(), threading.Event()

    def low() -> None:
        with gate.track(0) as activity:
            gate.yield_to_higher(activity)
        passed.set()

    with gate.track(1):
        thread = threading.Thread(target=low, daemon=True)
        thread.start()
        assert not passed.wait(0.2)
    assert passed.wait(10)


LENGTH = 5_000_000


def _all_to_all(group: Any, out: torch.Tensor, given: torch.Tensor) -> None:
    dist.all_to_all_single(out, given, group=group)


def _exchange(group: Any, out: torch.Tensor, given: torch.Tensor) -> None:
    group.exchange(out, given, [len(out) // 2] * 2, [len(given) // 2] * 2)


def _paused(move: Callable[..., None], options: dict[str, Any], max_pause: float) -> tuple[bool, bool]:
    """Return whether a long transfer ends beside a collective of a higher lane, and whether all its bytes are correct."""
    module.MAX_PAUSE_SECONDS = max_pause
    group = make_group(chunk_bytes=4096, **options)
    out, given = torch.empty(2 * LENGTH, dtype=torch.uint8), torch.ones(2 * LENGTH, dtype=torch.uint8)
    thread = threading.Thread(target=move, args=(group, out, given))
    with PRIORITY_GATE.track(1) as activity:
        thread.start()
        end = time.monotonic() + (0.5 if max_pause and "priority" not in options else TIMEOUT)
        while time.monotonic() < end and thread.is_alive():
            activity.last_progress = time.monotonic()
            time.sleep(0.01)
        beside = not thread.is_alive()
        dist.barrier()
    thread.join(TIMEOUT)
    return beside, bool(out.all())


@pytest.mark.parametrize(
    ("move", "options", "max_pause", "beside"),
    [
        (_all_to_all, {}, 30.0, False),
        (_exchange, {}, 30.0, False),
        (_all_to_all, {"priority": 1}, 30.0, True),
        (_all_to_all, {}, 0.0, True),
        (_exchange, {"transport": "native"}, 30.0, False),
    ],
)
def test_a_long_transfer_pauses_for_a_higher_lane_that_is_at_work(
    move: Any, options: dict[str, Any], max_pause: float, beside: bool
) -> None:
    assert run_distributed(_paused, 2, move, options, max_pause, timeout=60) == [(beside, True)] * 2


def _tracked() -> tuple[list[int], list[int]]:
    """Return the priorities that other lanes see of a lane, and the number of lanes during and after its life."""
    seen, track = [], PRIORITY_GATE.track
    PRIORITY_GATE.track = lambda priority: seen.append(priority) or track(priority)
    group = make_group(priority=3)
    assert everyone_sends(group, rows=100)
    group.exchange(torch.empty(LENGTH), torch.ones(LENGTH), *([0, LENGTH] if group.rank() == 0 else [LENGTH, 0] for _ in "ab"))
    lanes = [PRIORITY_GATE.lanes[3]]
    dist.destroy_process_group(group)
    return seen, [*lanes, PRIORITY_GATE.lanes[3]]


def test_other_lanes_see_what_a_lane_runs() -> None:
    assert run_distributed(_tracked, 2) == [([3, 3], [1, 0])] * 2


def _order() -> tuple[list[int], list[str], bool]:
    group = make_group()
    moved: list[tuple[int, str]] = []
    handshake = group._executor._handshake
    exchange_headers = handshake.exchange_headers

    def noted(transfer: Any, *rest: Any) -> None:
        moved.append((transfer.sequence_number, threading.current_thread().name))
        exchange_headers(transfer, *rest)

    handshake.exchange_headers = noted
    sound = [everyone_sends(group, rows=1000)]
    threads = lane_threads()
    issued = []
    for rows in (50_000, 1, 3000):
        given = torch.arange(2.0).repeat_interleave(rows) + 10 * dist.get_rank()
        out = torch.empty_like(given)
        issued.append((dist.all_to_all_single(out, given, group=group, async_op=True), out, rows))
    sound += [everyone_sends(group, rows=7), everyone_sends(group, rows=500)]
    for work, out, rows in reversed(issued):
        assert work.is_completed()  # they were issued before the others
        sound.append(torch.equal(out, torch.tensor([0.0, 10.0]).repeat_interleave(rows) + dist.get_rank()))
    assert not threads
    after = issued[0][0].get_future().then(lambda _: sound.append(everyone_sends(group)))  # a callback may use the lane
    after.wait()
    numbers, names = zip(*moved)
    return list(numbers), list(names), all(sound) and len(sound) == 7


def test_a_lane_keeps_the_order_of_calls_and_a_caller_that_waits_does_the_work() -> None:
    for numbers, names, sound in run_distributed(_order, 2):
        assert numbers == [0, 1, 2, 3, 4, 5, 6]
        assert names[0] == "MainThread"
        assert names[1:4] == ["freescale lane rows"] * 3
        assert sound
