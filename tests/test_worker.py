"""One job after the other, in the order given: a caller's own at once where nothing is before it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import pytest
import torch

from lightning_freescale._worker import WorkerThread, start_daemon
from tests.helpers.comm_groups import lane_threads


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    worker = WorkerThread("freescale worker unit")
    yield worker
    assert worker.stop(10)
    assert not lane_threads()


def _thread(into: list[str]) -> Callable[[], None]:
    return lambda: into.append(threading.current_thread().name)


def test_a_job_to_be_waited_for_runs_on_the_callers_thread_and_starts_none(worker: WorkerThread) -> None:
    names: list[str] = []
    assert worker.run(_thread(names)).done()
    assert worker.run(_thread(names)).done()
    assert names == [threading.current_thread().name] * 2
    assert not lane_threads()


def test_a_job_in_the_background_runs_on_the_workers_thread(worker: WorkerThread) -> None:
    names: list[str] = []
    for future in [worker.submit(_thread(names)) for _ in range(3)]:
        future.result(10)
    assert names == ["freescale worker unit"] * 3
    assert lane_threads() == {"freescale worker unit"}


def test_jobs_keep_their_order_however_they_are_given(worker: WorkerThread) -> None:
    gate, began, order = threading.Event(), threading.Event(), list[int]()
    worker.submit(lambda: (began.set(), gate.wait(10))[2:])
    began.wait(10)
    worker.submit(lambda: order.append(1))
    caller = threading.Thread(target=lambda: worker.run(lambda: order.append(2)))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    assert order == []
    gate.set()
    caller.join(10)
    assert order == [1, 2]
    worker.submit(lambda: order.append(3))
    worker.run(lambda: order.append(4))
    assert order == [1, 2, 3, 4]


def test_a_background_job_waits_for_one_on_a_callers_thread(worker: WorkerThread) -> None:
    order: list[str] = []

    def first() -> None:
        future = worker.submit(lambda: order.append("background"))
        wait([future], timeout=0.2)
        order.append("caller" if not future.done() else "caller, too late")

    worker.run(first).result()
    worker.run(lambda: None)
    assert order == ["caller", "background"]


def test_no_two_jobs_run_at_once(worker: WorkerThread) -> None:
    inside, overlaps, done = [0], [0], [0]

    def job() -> None:
        inside[0] += 1
        overlaps[0] += inside[0] > 1
        threading.Event().wait(0.001)
        done[0] += 1
        inside[0] -= 1

    def caller(number: int) -> None:
        for turn in range(10):
            (worker.run if (number + turn) % 2 else worker.submit)(job)

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(30)
    worker.run(job).result()
    assert (overlaps[0], done[0]) == (0, 41)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_is_the_futures_and_the_worker_goes_on(worker: WorkerThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    for future in (worker.run(fail), worker.submit(fail)):
        assert future.exception(10) is error
    assert worker.submit(lambda: None).exception(10) is None
    assert worker.run(lambda: None).exception() is None


def test_stopping_finishes_what_was_given_and_says_if_it_could_not(worker: WorkerThread) -> None:
    gate, order = threading.Event(), list[int]()
    worker.submit(lambda: gate.wait(10))
    worker.submit(lambda: order.append(1))
    assert not worker.stop(0.1)
    gate.set()
    assert worker.stop(10)
    assert order == [1]


def test_a_done_jobs_tensors_are_let_go(worker: WorkerThread) -> None:
    class Tensors:
        pass

    held = Tensors()
    alive = weakref.ref(held)
    worker.submit(lambda kept=held: None).result(10)
    del held
    end = time.monotonic() + 20
    while alive() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert alive() is None


def _burn() -> None:
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass


def test_it_counts_the_processors_time_of_background_jobs_not_their_waiting(worker: WorkerThread) -> None:
    worker.submit(time.sleep, 0.6)
    burnt = [worker.submit(_burn) for _ in range(4)]
    wait(burnt, timeout=30)
    assert 0.2 <= worker.cpu_seconds < 0.5


@pytest.mark.parametrize("initialized", [True, False])
def test_a_thread_works_on_its_callers_device(monkeypatch: pytest.MonkeyPatch, initialized: bool) -> None:
    """With stand-ins for the device: work that a thread issues must not go to the first GPU, which is another rank's."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((threading.current_thread().name, device)))
    start_daemon(lambda: None, "mine").join(10)
    assert seen == ([("mine", 3)] if initialized else [])
