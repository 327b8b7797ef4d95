"""One rank's watch, without Lightning: when it tells, how often, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.profiling import HangWatch, Timeline
from lightning_freescale.profiling.hanging import watch as watch_room
from lightning_freescale.testing import run_distributed


@pytest.fixture
def timeline() -> Timeline:
    made = Timeline()
    made.enable(torch.device("cpu"))
    made.open_step()
    return made


def _reports(folder: Path) -> list[dict[str, Any]]:
    path = folder / "hang.json"
    return json.loads(path.read_text())["reports"] if path.exists() else []


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_told_again_after_twice_as_long(timeline: Timeline, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(watch_room, "LOOK_SECONDS", 0.02)
    with HangWatch(timeline, tmp_path, hang_timeout=0.2, hang_signal=None) as watch, timeline.span("forward", "forward"):
        _until(lambda: len(_reports(tmp_path)) == 3)
    assert watch.file == tmp_path / "hang.json"
    told = [report["next_s"] for report in _reports(tmp_path)]
    assert told[1] >= 2 * told[0] and told[2] >= 2 * told[1]
    (rank,) = _reports(tmp_path)[0]["ranks"]
    assert rank["stage"] == "forward" and rank["step"] == 0 and rank["ended_s_ago"] is None
    assert "test_watch.py" in rank["place"] and "_until" in rank["code"] + rank["place"]
    assert capsys.readouterr().err.count("BubbleProfiler: rank 0 has ended no step for") == 3


def test_steps_and_batches_of_validation_are_progress(timeline: Timeline, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(watch_room, "LOOK_SECONDS", 0.02)
    with HangWatch(timeline, tmp_path, hang_timeout=30.0, hang_signal=None) as watch:
        for advance in (watch.note_progress, lambda: (timeline.close_step(), timeline.open_step())):
            time.sleep(0.1)
            before, idle = time.perf_counter(), watch._idle_seconds()
            assert idle >= 0.05
            advance()
            assert watch._idle_seconds() <= time.perf_counter() - before
    assert _reports(tmp_path) == []


def test_a_hang_follows_another(timeline: Timeline, tmp_path: Path, monkeypatch: Any) -> None:
    """After progress patience is what it was."""
    monkeypatch.setattr(watch_room, "LOOK_SECONDS", 0.02)
    with HangWatch(timeline, tmp_path, hang_timeout=0.2, hang_signal=None):
        _until(lambda: len(_reports(tmp_path)) == 2)
        timeline.close_step()
        timeline.open_step()
        _until(lambda: len(_reports(tmp_path)) == 3)
    _, second, third = _reports(tmp_path)
    assert third["next_s"] < 2 * second["next_s"] and third["ranks"][0]["step"] == 1


@pytest.mark.parametrize(("step_s", "patience"), [(0.0, 60.0), (10.0, 200.0)])
def test_patience_by_itself(step_s: float, patience: float, timeline: Timeline, tmp_path: Path) -> None:
    with HangWatch(timeline, tmp_path, hang_signal=None) as watch:
        assert watch._patience_seconds() == 600.0, "first steps compile"
        timeline.ended.extend((step, step * step_s) for step in range(6))
        assert watch._patience_seconds() == patience
    with HangWatch(timeline, tmp_path, hang_timeout=None, hang_signal=None) as watch:
        assert watch._patience_seconds() == float("inf")


def test_asked_by_a_signal(timeline: Timeline, tmp_path: Path) -> None:
    with HangWatch(timeline, tmp_path, hang_timeout=None):
        os.kill(os.getpid(), signal.SIGUSR2)
        _until(lambda: len(_reports(tmp_path)) == 1)
    assert _reports(tmp_path)[0]["why"] == "rank 0 was asked by SIGUSR2"
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_folder_that_cannot_be_written_to(timeline: Timeline, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    with HangWatch(timeline, tmp_path / "file", hang_timeout=None):
        os.kill(os.getpid(), signal.SIGUSR2)
        told: list[str] = []
        _until(lambda: told.append(capsys.readouterr().err) or "could not be written" in "".join(told))
    assert "was asked by SIGUSR2" in "".join(told)


@pytest.mark.parametrize("timeout", [0, -1.0, "soon", True, float("nan")])
def test_a_timeout_that_does_not_fit(timeout: Any, timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hang_timeout=.*pass seconds above 0"):
        HangWatch(timeline, tmp_path, hang_timeout=timeout)


@pytest.mark.parametrize("name", ["USR2", 12, ""])
def test_a_signal_that_does_not_fit(name: Any, timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hang_signal=.*pass the name of a signal"):
        HangWatch(timeline, tmp_path, hang_signal=name)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_signal_that_nobody_can_handle(name: str, timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"hang_signal='{name}'.*another one"):
        HangWatch(timeline, tmp_path, hang_signal=name)


def _plain_loop(folder: Path, ends: Callable[[], None]) -> list[str]:
    """Rank 1 ends in some way, and rank 0 is asked for where all stand."""
    timeline, rank = Timeline(), dist.get_rank()
    timeline.enable(torch.device("cpu"))
    with HangWatch(timeline, folder, hang_timeout=None):
        timeline.open_step()
        dist.barrier()
        if rank == 0:
            _until(lambda: (folder / "ended").exists())
            os.kill(os.getpid(), signal.SIGUSR2)
            _until(lambda: len(_reports(folder)) == 1)
        else:
            ends()
    (folder / "ended").touch()
    return [one.name for one in threading.enumerate() if one.name.startswith("freescale")]


@pytest.mark.usefixtures("patient")
def test_a_rank_that_was_killed(tmp_path: Path) -> None:
    def ends() -> None:
        (tmp_path / "ended").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Exception, match="died"):
        run_distributed(_plain_loop, 2, tmp_path, ends)
    (report,) = _reports(tmp_path)
    assert "has ended" in report["ranks"][1]["silent"]


def test_a_rank_whose_training_has_ended(tmp_path: Path) -> None:
    assert run_distributed(_plain_loop, 2, tmp_path, lambda: None) == [[], []]
    (report,) = _reports(tmp_path)
    assert report["ranks"][1] == {"rank": 1, "ended": True}
