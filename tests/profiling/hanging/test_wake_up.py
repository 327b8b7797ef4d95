"""A signal wakes who waits, whatever the main thread does, and takes nothing away from others."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_freescale._worker import start_daemon
from lightning_freescale.profiling.hanging.wake_up import WakeUp


@pytest.fixture
def wakes() -> Iterator[WakeUp]:
    """One that listens to SIGUSR2."""
    one = WakeUp("SIGUSR2")
    assert one.problem is None
    yield one
    one.release()
    one.close()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_the_signal_wakes(wakes: WakeUp) -> None:
    assert not wakes.wait(0.0)
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert wakes.wait(30.0)
    assert not wakes.wait(0.0), "it is forgotten"


def test_another_signal_and_who_closes_wake_as_well_but_ask_nothing(wakes: WakeUp) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not wakes.wait(30.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    wakes.wake()
    assert not wakes.wait(30.0)


def test_a_handler_that_python_does_not_see_stays() -> None:
    faulthandler.register(signal.SIGUSR2)
    wakes = WakeUp("SIGUSR2")
    try:
        assert wakes.problem is not None and "has a handler already" in wakes.problem
    finally:
        wakes.release()
        wakes.close()
        assert faulthandler.unregister(signal.SIGUSR2)


def test_a_descriptor_above_1024(wakes: WakeUp) -> None:
    """As ranks have that hold a connection to each of many others."""
    high = fcntl.fcntl(wakes._reads, fcntl.F_DUPFD, 1024)
    low, wakes._reads = wakes._reads, high
    try:
        wakes.wake()
        assert not wakes.wait(30.0)
    finally:
        wakes._reads = low
        os.close(high)


def test_while_the_main_thread_stands_in_code_that_is_not_pythons(wakes: WakeUp) -> None:
    """A handler of Python's would run only behind it."""
    lock, woken = threading.Lock(), []
    lock.acquire()

    def watch() -> None:
        woken.append(wakes.wait(30.0))
        lock.release()

    def kill() -> None:
        time.sleep(0.1)  # whatever comes first, the main thread is in the lock or about to
        os.kill(os.getpid(), signal.SIGUSR2)

    threads = [start_daemon(watch, "test watch"), start_daemon(kill, "test kill")]
    assert lock.acquire(timeout=30.0)
    assert woken == [True]
    for thread in threads:
        thread.join()


def test_a_handler_of_somebody_elses_stays() -> None:
    def theirs(*_: Any) -> None:
        """Do nothing."""

    before = signal.signal(signal.SIGUSR2, theirs)
    try:
        wakes = WakeUp("SIGUSR2")
        assert wakes.problem == "it has a handler already, which stays"
        wakes.release()
        wakes.close()
        assert signal.getsignal(signal.SIGUSR2) is theirs
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_wake_up_descriptor_of_somebody_elses_stays() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    try:
        wakes = WakeUp("SIGUSR2")
        assert wakes.problem is not None and "asyncio" in wakes.problem
        wakes.release()
        wakes.close()
    finally:
        assert signal.set_wakeup_fd(-1) == writes
        os.close(reads)
        os.close(writes)


def test_what_others_took_over_meanwhile_is_left_to_them(wakes: WakeUp) -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    ours = signal.set_wakeup_fd(writes)
    wakes.release()
    assert signal.set_wakeup_fd(-1) == writes != ours
    os.close(reads)
    os.close(writes)


def test_on_another_thread_nothing_is_taken() -> None:
    problems = []

    def create() -> None:
        wakes = WakeUp("SIGUSR2")
        problems.append(wakes.problem)
        wakes.release()
        wakes.close()

    start_daemon(create, "test").join()
    assert "main thread" in problems[0]
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_signal_that_cannot_be_handled_leaves_no_descriptor_behind() -> None:
    wakes = WakeUp("SIGKILL")
    assert wakes.problem is not None and "cannot be handled" in wakes.problem
    assert signal.set_wakeup_fd(-1) == -1
    wakes.release()
    wakes.close()


def test_without_a_signal_it_only_waits() -> None:
    wakes = WakeUp(None)
    assert wakes.problem is None and not wakes.wait(0.0)
    wakes.wake()
    assert not wakes.wait(30.0)
    wakes.close()
