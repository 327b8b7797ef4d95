"""Jobs run one after the other on a thread that keeps nobody from ending."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_freescale.profiling.aside import Aside


def test_jobs_run_in_order_on_another_thread() -> None:
    aside, seen = Aside(), []
    futures = [aside.submit(lambda x: (seen.append(x), threading.current_thread().name)[1], x) for x in range(20)]
    names = {future.result(timeout=5) for future in futures}
    assert seen == list(range(20))
    assert names == {"freescale-profiler"}
    assert aside.close(5)


def test_it_is_a_daemon_that_ends_when_closed_after_the_jobs_it_has() -> None:
    aside = Aside()
    assert aside._thread.daemon
    done = aside.submit(time.sleep, 0.1)
    assert aside.close(5)
    assert done.done()
    assert not aside._thread.is_alive()


def test_a_job_that_waits_for_ever_is_left_behind() -> None:
    aside, gone = Aside(), threading.Event()
    stuck = aside.submit(gone.wait, 30)
    began = time.monotonic()
    assert not aside.close(0.1)
    assert time.monotonic() - began < 5
    assert not stuck.done()
    gone.set()
    assert aside.close(5)


@pytest.mark.parametrize("error", [RuntimeError("the rank is gone"), SystemExit(3)])
def test_what_a_job_raises_is_for_who_waits_and_the_next_one_runs(error: BaseException) -> None:
    aside = Aside()

    def fails() -> None:
        raise error

    failed, fine = aside.submit(fails), aside.submit(lambda: 7)
    with pytest.raises(type(error)) as raised:
        failed.result(timeout=5)
    assert raised.value is error
    assert fine.result(timeout=5) == 7
    aside.close(5)


def _burn() -> None:
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass


def test_it_counts_the_processors_time_not_the_waiting() -> None:
    aside = Aside()
    aside.submit(time.sleep, 0.3)
    for _ in range(4):
        burnt = aside.submit(_burn)
    burnt.result(timeout=5)
    assert 0.2 <= aside.seconds < 0.35
    aside.close(5)
