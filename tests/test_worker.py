"""One job after the other, in the order given: a caller's own at once where nothing is before it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import pytest

from lightning_freescale._worker import WorkerThread
from tests.helpers.comm_groups import lane_threads


@pytest.fixture
def lane() -> Iterator[WorkerThread]:
    lane = WorkerThread("freescale lane unit")
    yield lane
    assert lane.stop(10)
    assert not lane_threads()


def _thread(into: list[str]) -> Callable[[], None]:
    return lambda: into.append(threading.current_thread().name)


def test_a_job_to_be_waited_for_runs_on_the_callers_thread_and_starts_none(lane: WorkerThread) -> None:
    names: list[str] = []
    assert lane.run(_thread(names)).done()
    assert lane.run(_thread(names)).done()
    assert names == [threading.current_thread().name] * 2
    assert not lane_threads()


def test_a_job_in_the_background_runs_on_the_lanes_thread(lane: WorkerThread) -> None:
    names: list[str] = []
    for future in [lane.submit(_thread(names)) for _ in range(3)]:
        future.result(10)
    assert names == ["freescale lane unit"] * 3
    assert lane_threads() == {"freescale lane unit"}


def test_jobs_keep_their_order_however_they_are_given(lane: WorkerThread) -> None:
    gate, began, order = threading.Event(), threading.Event(), list[int]()
    lane.submit(lambda: (began.set(), gate.wait(10))[2:])
    began.wait(10)
    lane.submit(lambda: order.append(1))
    caller = threading.Thread(target=lambda: lane.run(lambda: order.append(2)))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    assert order == []
    gate.set()
    caller.join(10)
    assert order == [1, 2]
    lane.submit(lambda: order.append(3))
    lane.run(lambda: order.append(4))
    assert order == [1, 2, 3, 4]


def test_a_background_job_waits_for_one_on_a_callers_thread(lane: WorkerThread) -> None:
    order: list[str] = []

    def first() -> None:
        future = lane.submit(lambda: order.append("background"))
        wait([future], timeout=0.2)
        order.append("caller" if not future.done() else "caller, too late")

    lane.run(first).result()
    lane.run(lambda: None)
    assert order == ["caller", "background"]


def test_no_two_jobs_run_at_once(lane: WorkerThread) -> None:
    inside, overlaps, done = [0], [0], [0]

    def job() -> None:
        inside[0] += 1
        overlaps[0] += inside[0] > 1
        threading.Event().wait(0.001)
        done[0] += 1
        inside[0] -= 1

    def caller(number: int) -> None:
        for turn in range(10):
            (lane.run if (number + turn) % 2 else lane.submit)(job)

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(30)
    lane.run(job).result()
    assert (overlaps[0], done[0]) == (0, 41)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_is_the_futures_and_the_lane_goes_on(lane: WorkerThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    for future in (lane.run(fail), lane.submit(fail)):
        assert future.exception(10) is error
    assert lane.submit(lambda: None).exception(10) is None
    assert lane.run(lambda: None).exception() is None


def test_closing_finishes_what_was_given_and_says_if_it_could_not(lane: WorkerThread) -> None:
    gate, order = threading.Event(), list[int]()
    lane.submit(lambda: gate.wait(10))
    lane.submit(lambda: order.append(1))
    assert not lane.stop(0.1)
    gate.set()
    assert lane.stop(10)
    assert order == [1]


def test_a_done_jobs_tensors_are_let_go(lane: WorkerThread) -> None:
    class Tensors:
        pass

    held = Tensors()
    alive = weakref.ref(held)
    lane.submit(lambda kept=held: None).result(10)
    del held
    end = time.monotonic() + 5
    while alive() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert alive() is None
