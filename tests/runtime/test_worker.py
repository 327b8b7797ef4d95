"""A worker runs one job at a time in order. A caller's own job runs at once if no other is queued."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import wait

import pytest
import torch

from lightning_freescale._runtime.worker import WorkerThread, start_daemon
from tests.helpers.comm_groups import lane_threads


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    worker = WorkerThread("freescale worker unit")
    yield worker
    assert worker.stop(10)
    assert not lane_threads()


def test_a_callers_job_starts_no_thread_and_one_in_the_background_does(worker: WorkerThread) -> None:
    names: list[str] = []
    for _ in range(2):
        assert worker.run(lambda: names.append(threading.current_thread().name)).done()
    assert names == [threading.current_thread().name] * 2 and not lane_threads()
    for future in [worker.submit(lambda: names.append(threading.current_thread().name)) for _ in range(3)]:
        future.result(10)
    assert names[2:] == ["freescale worker unit"] * 3 and lane_threads() == {"freescale worker unit"}


def test_jobs_keep_their_order_however_they_are_given(worker: WorkerThread) -> None:
    gate, began, order = threading.Event(), threading.Event(), list[int]()
    worker.submit(lambda: (began.set(), gate.wait(10))[2:])
    began.wait(10)
    worker.submit(order.append, 1)
    caller = threading.Thread(target=lambda: worker.run(lambda: order.append(2)))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive() and order == []
    gate.set()
    caller.join(10)
    worker.submit(order.append, 3)
    worker.run(lambda: order.append(4))
    assert order == [1, 2, 3, 4]

    def on_the_callers_thread() -> None:  # a background job waits for it
        worker.submit(order.append, 6)
        time.sleep(0.2)
        order.append(5)

    worker.run(on_the_callers_thread)
    worker.run(lambda: None)
    assert order == [1, 2, 3, 4, 5, 6]


def test_no_two_jobs_run_at_once(worker: WorkerThread) -> None:
    inside, overlaps, done = [0], [0], [0]

    def job() -> None:
        inside[0] += 1
        overlaps[0] += inside[0] > 1
        time.sleep(0.001)
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
        assert future.exception(10) is error and "in fail" in str(error.__cause__), "where it was raised"
    assert worker.submit(lambda: None).exception(10) is worker.run(lambda: None).exception() is None


def test_stopping_finishes_what_was_given_and_returns_whether_it_could(worker: WorkerThread) -> None:
    gate, order = threading.Event(), list[int]()
    worker.submit(gate.wait, 10)
    worker.submit(order.append, 1)
    assert not worker.stop(0.1)
    gate.set()
    assert worker.stop(10) and order == [1]


def test_a_job_that_comes_while_the_thread_ends_is_done(worker: WorkerThread) -> None:
    begun, go = threading.Event(), threading.Event()
    worker.submit(lambda: (begun.set(), go.wait(10)))
    assert begun.wait(10)
    stopping = threading.Thread(target=worker.stop, args=(10,))
    stopping.start()
    while worker._jobs.empty():  # wait until the end is queued
        pass
    late = worker.submit(lambda: None)
    go.set()
    assert late.result(10) is None and worker.run(lambda: None).done()
    stopping.join()


def test_a_done_jobs_tensors_are_let_go(worker: WorkerThread) -> None:
    held = torch.ones(1)
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
    wait([worker.submit(_burn) for _ in range(4)], timeout=30)
    assert 0.2 <= worker.cpu_seconds < 0.5


@pytest.mark.parametrize("initialized", [True, False])
def test_a_thread_works_on_its_callers_device(monkeypatch: pytest.MonkeyPatch, initialized: bool) -> None:
    """Check with stand-ins that a thread does not use the first GPU, which belongs to another rank."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((threading.current_thread().name, device)))
    start_daemon(lambda: None, "mine").join(10)
    assert seen == ([("mine", 3)] if initialized else [])


# -- garbage: a collection beside PyTorch's C++ code in another thread can take live objects for garbage


class _Circle:
    def __init__(self) -> None:
        self.me = self


def _litter(count: int = 300) -> None:
    for _ in range(count):
        _Circle()


@pytest.fixture
def collected_in() -> Iterator[list[str]]:
    """Return the threads in which Python collects garbage, with thresholds that each job here exceeds."""
    threads, before = list[str](), gc.get_threshold()
    gc.callbacks.append(note := lambda phase, info: threads.append(threading.current_thread().name))
    gc.set_threshold(50, 2, 2)
    yield threads
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def test_garbage_is_collected_by_the_thread_that_submits(worker: WorkerThread, collected_in: list[str]) -> None:
    gate = threading.Event()
    last = [worker.submit(_litter) for _ in range(20)][-1]
    worker.submit(gate.wait, 10)
    last.result(10)
    collected_in.clear()
    worker.submit(_litter)
    assert set(collected_in) == {threading.current_thread().name}, "though the worker always has a job"
    _litter()
    assert len(collected_in) == 2, "one collection, and none between two jobs that are submitted"
    gate.set()
    worker.submit(_litter).result(10)
    assert worker.stop(10) and gc.get_threshold() == (50, 2, 2)
    _litter()
    ours = threading.current_thread().name
    traced = set() if sys.gettrace() is None else {worker.name}  # coverage allocates on the worker's thread after its last job
    assert len(collected_in) > 2 and {ours} <= set(collected_in) <= {ours} | traced


def test_what_the_user_chooses_about_garbage_stays(worker: WorkerThread, collected_in: list[str]) -> None:
    gate = threading.Event()
    worker.submit(gate.wait, 10)
    gc.disable()
    collected_in.clear()
    try:
        worker.submit(_litter)
        gate.set()
        assert worker.stop(10) and not gc.isenabled() and not collected_in
    finally:
        gc.enable()
    gate.clear()
    worker.submit(gate.wait, 10)
    gc.set_threshold(60, 3, 3)
    gate.set()
    assert worker.stop(10) and gc.get_threshold() == (60, 3, 3)


def test_a_forked_process_collects_garbage(worker: WorkerThread, collected_in: list[str]) -> None:
    gate = threading.Event()
    worker.submit(gate.wait, 10)
    if (child := os.fork()) == 0:
        os._exit(0 if gc.get_threshold() == (50, 2, 2) else 1)
    gate.set()
    assert os.waitpid(child, 0)[1] == 0
