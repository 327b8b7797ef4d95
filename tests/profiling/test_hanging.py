"""Where ranks stand when a run hangs: seen by a thread aside, in a table, and what wakes that thread."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale._runtime.worker import WorkerThread, start_daemon
from lightning_freescale.profiling import HangWatch, Timeline
from lightning_freescale.profiling import hang_watch as module
from lightning_freescale.profiling.hang_report import (
    RankObserver,
    hang_document,
    hang_text,
    in_words,
    ranks_in_words,
    why_silent,
)
from lightning_freescale.profiling.hang_watch import WakeUp
from lightning_freescale.testing import RankFailed, run_distributed


@pytest.fixture
def timeline() -> Timeline:
    made = Timeline()
    made.enable(torch.device("cpu"))
    return made


def _stands(timeline: Timeline) -> dict[str, Any]:
    return json.loads(json.dumps(RankObserver(timeline, 3).standing()))  # as it travels


def test_stages_and_exchanges(timeline: Timeline) -> None:
    found = _stands(timeline)
    assert (found["stage"], found["step"]) == ("outside of a step", None)
    for _ in range(3):
        timeline.open_step()
        timeline.close_step()
    timeline.open_step()
    found = _stands(timeline)
    assert (found["rank"], found["step"], found["stage"], len(found["last_steps_s"])) == (3, 3, "between the stages", 2)
    with timeline.span("data", "fetch"):
        assert _stands(timeline)["stage"] == "data wait: fetch"
    with timeline.span("pause", "validation"), timeline.span("host", "hook"):
        found = _stands(timeline)
    assert found["stage"] == "host: hook" and "test_hanging.py" in found["place"]
    assert "_stands" in found["code"] + found["place"]
    assert (found["host"], found["process"]) == (socket.gethostname(), os.getpid())
    timeline.open_step()
    with timeline.collective("all_reduce", "world", moved=8):
        pass
    with timeline.span("forward", "forward"), timeline.collective("broadcast", "world", moved=12), timeline.collective("inner"):
        time.sleep(0.02)
        found = _stands(timeline)
    expected = {"name": "broadcast", "group": "world", "step": 3, "number": 1, "ranks": None, "moved_bytes": 12}
    assert found["exchange"] == expected and found["stage"] == "forward"
    assert found["since_s"] >= 0.02 and found["exchanges_begun"]["world"] == 2
    assert _stands(timeline)["exchange"] is None


def _ranks(timeline: Timeline, group: str) -> list[int]:
    with timeline.collective("recv", group):
        return _stands(timeline)["exchange"]["ranks"]


def _in_a_group() -> list[int]:
    timeline = Timeline()
    timeline.enable(torch.device("cpu"))
    timeline.open_step()
    group = dist.new_group([1, 2])
    return _ranks(timeline, group.group_name) if dist.get_rank() else []


def test_the_ranks_of_a_message_and_of_a_group(timeline: Timeline) -> None:
    timeline.open_step()
    assert (_ranks(timeline, "world 4>1 0"), _ranks(timeline, "world any>1 of 1")) == ([4, 1], [1])
    assert run_distributed(_in_a_group, 3) == [[], [1, 2], [1, 2]]


def test_threads_that_work_and_that_exchange(timeline: Timeline) -> None:
    timeline.open_step()
    worker, idle, own = (WorkerThread(name) for name in ("freescale-net", "freescale-idle", "freescale-hang store"))
    idle.submit(int).result()
    begun, done = threading.Barrier(3), threading.Event()

    def exchange() -> None:
        with timeline.background_collective("embedding exchange", 64):
            begun.wait()
            done.wait()

    jobs = [worker.submit(exchange), own.submit(lambda: (begun.wait(), done.wait()))]
    begun.wait()
    (found,) = _stands(timeline)["threads"]
    done.set()
    assert (found["thread"], found["exchange"], found["moved_bytes"]) == ("freescale-net", "embedding exchange", 64)
    assert found["since_s"] >= 0 and "exchange (test_hanging.py:" in found["place"]
    for job in jobs:
        job.result()
    assert timeline.under_way == {} and _stands(timeline)["threads"] == []
    for each in (worker, idle, own):
        assert each.stop(10.0)


def test_stamps_of_a_device_are_not_asked_for_their_time(timeline: Timeline) -> None:
    """They tell no time yet, as events of a device that is behind."""
    timeline.clock = type("DeviceClock", (), {"stamp": object})()
    timeline.open_step()
    seen = RankObserver(timeline, 0)
    with timeline.collective("all_reduce", "world"):
        seen.look()
        time.sleep(0.02)
        assert 0.02 <= seen.standing()["since_s"] < 10


def test_why_a_process_is_silent() -> None:
    here = socket.gethostname()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert "runs no Python" in why_silent(here, process.pid)
        assert "network" in why_silent("elsewhere", process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"kill -CONT {process.pid}" in why_silent(here, process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert "has ended" in why_silent(here, process.pid), "also before its parent has asked for its status"
    finally:
        process.kill()
        process.communicate()
    assert "has ended" in why_silent(here, process.pid)


def _rank(rank: int, number: int | None = None, *, begun: int = 0, step: int | None = 12, **fields: Any) -> dict[str, Any]:
    """A rank that waits in exchange ``number`` of the world, or computes after it has begun some; ``within`` changes it."""
    exchange = {"group": "world", "step": step, "number": number, "name": "all_reduce", "ranks": None, "moved_bytes": 2_500_000}
    exchange.update(fields.pop("within", {}))
    return {
        "rank": rank,
        "step": step,
        "last_steps_s": [0.1, 0.12],
        "stage": "forward",
        "exchange": None if number is None else exchange,
        "since_s": 30.0 + rank,
        "place": "training_step (train.py:7)",
        "code": "loss = self.model(batch)",
        "threads": [],
        "exchanges_begun": {"world": begun} if number is None else {exchange["group"]: number + 1},
        **fields,
    }


def _told(*ranks: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The exchanges of the document, and the text in one line."""
    document = hang_document("rank 0 has ended no step for 30 s", ranks, 60.0)
    return document["exchanges"], " ".join(hang_text(document).split())


def test_who_has_not_come() -> None:
    ranks = [_rank(0, 3), _rank(1, begun=3), _rank(2, 3), _rank(3, begun=5)]
    (exchange,), text = _told(*ranks)
    assert (exchange["waiting"], exchange["missing"], exchange["unknown"]) == ([0, 2], [1], [])
    assert "rank 0 has ended no step for 30 s" in text and "60 s" in text
    assert "rank 1 has not come to all_reduce (exchange 3 of step 12 in group world)" in text and "ranks 0, 2 wait" in text
    table = hang_text(hang_document("", ranks, None)).splitlines()[-3:]
    assert [line.split("  ")[0] for line in table] == ["ranks", "0, 2", "1, 3"], "ranks that stand alike are one row"
    for cell in ("all_reduce", "2.5 MB", "forward", "training_step (train.py:7)", "loss = self.model(batch)"):
        assert cell in table[1]
    assert "0.100 to 0.120 s" in table[1] and "32.0 s" in table[1]
    (exchange,), _ = _told(_rank(0, 3), _rank(1, step=13), _rank(2, step=11, begun=9))
    assert exchange["missing"] == [2], "numbers begin anew in every step"
    exchanges, text = _told(_rank(0), _rank(1, step=None))
    assert exchanges == [] and "exchange" not in text


def test_only_the_ranks_of_a_group_are_missed() -> None:
    (exchange,), _ = _told(_rank(0, 0, within={"group": "2", "ranks": [0, 2]}), _rank(1), _rank(2))
    assert exchange["missing"] == [2]
    exchanges, text = _told(_rank(0, 0), _rank(1, 0, within={"group": "2", "ranks": [0, 1]}))
    assert [(exchange["waiting"], exchange["missing"]) for exchange in exchanges] == [([1], [0]), ([0], [1])]
    assert "rank 0 is in all_reduce" in text and "rank 1 is in all_reduce" in text


def test_different_exchanges_in_the_same_place_and_the_two_ends_of_a_message() -> None:
    (exchange,), text = _told(_rank(0, 3), _rank(1, 3, within={"name": "broadcast"}))
    assert exchange["names"] == {"all_reduce": [0], "broadcast": [1]}
    assert "different" in text and "rank 1 calls broadcast" in text
    (exchange,), text = _told(_rank(0, 3), _rank(1, 3))
    assert exchange["missing"] == exchange["unknown"] == [] and "all ranks have come to all_reduce" in text
    ends = [_rank(k, 0, within={"group": "world 0>1 7", "ranks": [0, 1], "name": ("send", "recv")[k]}) for k in (0, 1)]
    (exchange,), text = _told(*ends, _rank(2))
    assert exchange["missing"] == [] and "different" not in text
    assert "all ranks have come to send or recv" in text
    (exchange,), _ = _told(ends[0], _rank(1), _rank(2))
    assert exchange["missing"] == [1]


def test_ranks_that_do_not_answer_and_that_have_ended() -> None:
    silent, ended = {"rank": 1, "silent": "process 7 on node3 has ended"}, {"rank": 2, "ended": True}
    (exchange,), text = _told(_rank(0, 3), silent, ended)
    assert exchange["unknown"] == [1] and exchange["missing"] == [2]
    assert "rank 1 cannot be asked, and rank 0 waits in all_reduce" in text
    assert "process 7 on node3 has ended" in text and "its training has ended" in text


def test_threads_that_exchange_in_the_background() -> None:
    idle = {"thread": "freescale-b", "exchange": None, "moved_bytes": None, "since_s": None, "place": "g (b.py:2)"}
    busy = {"thread": "freescale-net", "exchange": "rows", "moved_bytes": 300, "since_s": 4.0, "place": "f (a.py:1)"}
    _, text = _told(_rank(0, threads=[busy, idle]))
    assert "rank 0, thread freescale-net in rows of 0.3 kB for 4.0 s, at f (a.py:1)" in text
    assert "rank 0, thread freescale-b at g (b.py:2)" in text


def test_many_ranks_make_a_short_table() -> None:
    document = hang_document("", [*(_rank(rank, 3) for rank in range(255)), _rank(255)], None)
    assert len(hang_text(document).splitlines()) < 8 and "0-254" in hang_text(document)
    assert ranks_in_words([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert (in_words([3]), in_words([3, 4])) == ("rank 3", "ranks 3-4")


@contextmanager
def _made(name: str | None) -> Iterator[WakeUp]:
    one = WakeUp(name)
    try:
        yield one
    finally:
        one.release()
        one.close()


@pytest.fixture
def wakes() -> Iterator[WakeUp]:
    """One that listens to SIGUSR2."""
    with _made("SIGUSR2") as one:
        assert one.problem is None
        yield one
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


@contextmanager
def _descriptor_of_others() -> Iterator[int]:
    """A wake-up descriptor that another part of the program has set."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    try:
        yield writes
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reads)
        os.close(writes)


def test_the_signal_wakes_and_what_else_wakes_asks_nothing(wakes: WakeUp) -> None:
    assert not wakes.wait(0.0)
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert wakes.wait(30.0)
    assert not wakes.wait(0.0), "it is forgotten"
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not wakes.wait(30.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    wakes.wake()
    assert not wakes.wait(30.0)


def test_a_handler_and_a_wake_up_descriptor_of_others_stay() -> None:
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
    with _descriptor_of_others() as writes:
        with _made("SIGUSR2") as wakes:
            assert wakes.problem is not None and "asyncio" in wakes.problem
        assert signal.set_wakeup_fd(-1) == writes


def test_what_others_took_over_meanwhile_is_left_to_them(wakes: WakeUp) -> None:
    with _descriptor_of_others() as writes:
        wakes.release()
        assert signal.set_wakeup_fd(-1) == writes


def test_where_no_signal_can_be_had_it_only_waits() -> None:
    def on_another_thread() -> None:
        with _made("SIGUSR2") as wakes:
            problems.append(wakes.problem)

    problems: list[str | None] = []
    start_daemon(on_another_thread, "test").join()
    with _made("SIGKILL") as wakes:
        problems.append(wakes.problem)
        assert signal.set_wakeup_fd(-1) == -1, "no descriptor is left behind"
    assert "main thread" in str(problems[0]) and "cannot be handled" in str(problems[1])
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    with _made(None) as wakes:
        assert wakes.problem is None and not wakes.wait(0.0)
        wakes.wake()
        assert not wakes.wait(30.0)


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


def test_reported_again_after_twice_as_long_until_a_step_ends(running: Timeline, tmp_path: Path, capsys: Any) -> None:
    with HangWatch(running, tmp_path, hang_timeout=0.2, hang_signal=None) as watch:
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
    assert "test_hanging.py" in rank["place"]
    assert capsys.readouterr().err.count("BubbleProfiler: rank 0") == 4


def test_steps_and_batches_of_validation_are_progress(running: Timeline, tmp_path: Path) -> None:
    with HangWatch(running, tmp_path, hang_timeout=30.0, hang_signal=None) as watch:
        for advance in (watch.note_progress, lambda: (running.close_step(), running.open_step())):
            time.sleep(0.1)
            before, idle = time.perf_counter(), watch._idle_seconds()
            assert idle >= 0.05
            advance()
            assert watch._idle_seconds() <= time.perf_counter() - before
    assert _reports(tmp_path) == []


@pytest.mark.parametrize(("step_s", "patience"), [(0.0, 60.0), (10.0, 200.0)])
def test_patience_by_itself(step_s: float, patience: float, running: Timeline, tmp_path: Path) -> None:
    with HangWatch(running, tmp_path, hang_signal=None) as watch:
        running.ended.extend((step, step * step_s) for step in range(3))
        assert watch._patience_seconds() == 600.0, "first steps compile"
        running.ended.extend((step, step * step_s) for step in range(3, 6))
        assert watch._patience_seconds() == patience
        with running.span("pause", "validation"):
            assert watch._patience_seconds() == 600.0
    with HangWatch(running, tmp_path, hang_timeout=None, hang_signal=None) as watch:
        assert watch._patience_seconds() == float("inf")


def test_asked_by_a_signal(running: Timeline, tmp_path: Path, capsys: Any) -> None:
    with HangWatch(running, tmp_path, hang_timeout=None):
        os.kill(os.getpid(), signal.SIGUSR2)
        _until(lambda: len(_reports(tmp_path)) == 1)
    (report,) = _reports(tmp_path)
    assert "rank 0" in report["why"] and "SIGUSR2" in report["why"]
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    capsys.readouterr()
    with HangWatch(running, tmp_path / "hang.json", hang_timeout=None):  # a folder that cannot be written to
        os.kill(os.getpid(), signal.SIGUSR2)
        printed: list[str] = []
        _until(lambda: printed.append(capsys.readouterr().err) or f"{tmp_path / 'hang.json'}: " in "".join(printed))
    assert "SIGUSR2" in "".join(printed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("hang_timeout", value) for value in (0, -1.0, "soon", True, float("nan"))),
        *(("hang_signal", value) for value in ("USR2", 12, "SIGKILL", "SIGSTOP")),
    ],
)
def test_options_that_do_not_fit(name: str, value: Any, running: Timeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        HangWatch(running, tmp_path, **{name: value})


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("killed", [False, True])
def test_a_rank_that_has_ended_or_was_killed(killed: bool, tmp_path: Path) -> None:
    """Rank 0 is asked for where all stand."""

    def loop() -> list[str]:
        timeline = Timeline()
        timeline.enable(torch.device("cpu"))
        with HangWatch(timeline, tmp_path, hang_timeout=None):
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
