"""The thread that watches for hangs: what wakes it, when it reports, and what a signal does."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale._runtime.worker import start_daemon
from lightning_freescale.profiling import HangWatch, Timeline
from lightning_freescale.profiling import hang_watch as module
from lightning_freescale.profiling.hang_watch import SignalPipe
from lightning_freescale.testing import RankFailed, run_distributed


@contextmanager
def _made(name: str) -> Iterator[SignalPipe]:
    one = SignalPipe(name)
    try:
        yield one
    finally:
        one.release()
        one.close()


@pytest.fixture
def wakes() -> Iterator[SignalPipe]:
    """Yield a pipe that handles SIGUSR2."""
    with _made("SIGUSR2") as one:
        assert one.problem is None
        yield one
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_the_signal_wakes_and_what_else_wakes_asks_nothing(wakes: SignalPipe) -> None:
    assert not wakes.wait(0.0)
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert wakes.wait(30.0)
    assert not wakes.wait(0.0), "it is forgotten"
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not wakes.wait(0.1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    wakes.wake()
    assert not wakes.wait(30.0)


def test_an_existing_handler_stays() -> None:
    def theirs(*_: Any) -> None:
        """Do nothing."""

    before = signal.signal(signal.SIGUSR2, theirs)
    try:
        with _made("SIGUSR2") as wakes:
            assert wakes.problem is not None and "handler" in wakes.problem
        assert signal.getsignal(signal.SIGUSR2) is theirs
    finally:
        signal.signal(signal.SIGUSR2, before)
    faulthandler.register(signal.SIGUSR2)  # which Python does not see
    try:
        with _made("SIGUSR2") as wakes:
            assert wakes.problem is not None and "handler" in wakes.problem
    finally:
        assert faulthandler.unregister(signal.SIGUSR2)


def test_a_handler_that_others_set_meanwhile_is_left_to_them(wakes: SignalPipe) -> None:
    def theirs(*_: Any) -> None:
        """Do nothing."""

    before = signal.signal(signal.SIGUSR2, theirs)
    try:
        wakes.release()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is theirs
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_it_handles_signals_for_other_threads() -> None:
    def on_another_thread() -> None:
        with _made("SIGUSR2") as wakes:
            problems.append(wakes.problem)

    problems: list[str | None] = []
    start_daemon(on_another_thread, "test").join()
    with _made("SIGKILL") as wakes:
        problems.append(wakes.problem)
    assert problems[0] is None and "cannot be handled" in str(problems[1])
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@pytest.fixture
def running(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    timeline.open_step()
    return timeline


def _reports(folder: Path) -> list[dict[str, Any]]:
    path = folder / "hang.json"
    return json.loads(path.read_text())["reports"] if path.exists() else []


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_reported_again_after_twice_as_long_until_a_step_ends(
    running: Timeline, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.2)
    with HangWatch(running, tmp_path) as watch:
        with running.span("forward", "forward"):
            _until(lambda: len(_reports(tmp_path)) == 3)
        running.close_step()
        running.open_step()
        _until(lambda: len(_reports(tmp_path)) == 4)
    assert watch.file == tmp_path / "hang.json"
    reports = _reports(tmp_path)
    first, second, third, last = (report["next_s"] for report in reports)
    assert second >= 2 * first and third >= 2 * second
    assert last < 2 * second and reports[3]["ranks"][0]["step"] == 1, "patience is what it was"
    (rank,) = reports[0]["ranks"]
    assert (rank["stage"], rank["step"], rank["ended_s_ago"]) == ("forward", 0, None)
    assert "test_hang_watch.py" in rank["place"]
    assert capsys.readouterr().err.count("BubbleProfiler: rank 0") == 4


def test_steps_and_batches_of_validation_are_progress(running: Timeline, tmp_path: Path) -> None:
    with HangWatch(running, tmp_path) as watch:
        for advance in (watch.note_progress, lambda: (running.close_step(), running.open_step())):
            time.sleep(0.1)
            before, idle = time.perf_counter(), watch._idle_seconds()
            assert idle >= 0.05
            advance()
            assert watch._idle_seconds() <= time.perf_counter() - before
    assert _reports(tmp_path) == []


@pytest.mark.parametrize(("step_s", "patience"), [(0.0, 60.0), (10.0, 200.0)])
def test_patience_by_itself(step_s: float, patience: float, running: Timeline, tmp_path: Path) -> None:
    with HangWatch(running, tmp_path) as watch:
        running.ended.extend((step, step * step_s) for step in range(3))
        assert watch._patience_seconds() == 600.0, "first steps compile"
        running.ended.extend((step, step * step_s) for step in range(3, 6))
        assert watch._patience_seconds() == patience
        with running.span("pause", "validation"):
            assert watch._patience_seconds() == 600.0


def test_asked_by_a_signal(running: Timeline, tmp_path: Path, capsys: Any) -> None:
    with HangWatch(running, tmp_path):
        os.kill(os.getpid(), signal.SIGUSR2)
        _until(lambda: len(_reports(tmp_path)) == 1)
    (report,) = _reports(tmp_path)
    assert "rank 0" in report["why"] and "SIGUSR2" in report["why"]
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    capsys.readouterr()
    with HangWatch(running, tmp_path / "hang.json"):  # a folder that cannot be written to
        os.kill(os.getpid(), signal.SIGUSR2)
        printed: list[str] = []
        _until(lambda: printed.append(capsys.readouterr().err) or f"{tmp_path / 'hang.json'}: " in "".join(printed))
    assert "SIGUSR2" in "".join(printed)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("killed", [False, True])
def test_a_rank_that_has_ended_or_was_killed(killed: bool, tmp_path: Path) -> None:
    """Rank 0 is asked for where all stand."""

    def loop() -> list[str]:
        timeline = Timeline()
        timeline.enable(torch.device("cpu"))
        with HangWatch(timeline, tmp_path):
            timeline.open_step()
            dist.barrier()
            if dist.get_rank() == 0:
                _until(lambda: (tmp_path / "ended").exists())
                os.kill(os.getpid(), signal.SIGUSR2)
                _until(lambda: len(_reports(tmp_path)) == 1)
            elif killed:
                (tmp_path / "ended").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "ended").touch()
        return [one.name for one in threading.enumerate() if one.name.startswith("freescale")]

    with pytest.raises(RankFailed, match="rank 1: died") if killed else nullcontext():
        assert run_distributed(loop, 2) == [[], []]
    (_, late) = _reports(tmp_path)[0]["ranks"]
    assert "has ended" in late["silent"] if killed else late == {"rank": 1, "ended": True}
