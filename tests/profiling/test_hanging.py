"""The states of ranks in a hang, observed by another thread, and their table."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale._runtime.worker import WorkerThread
from lightning_freescale.profiling import Timeline
from lightning_freescale.profiling.hang_report import (
    RankObserver,
    hang_document,
    hang_text,
    in_words,
    ranks_in_words,
    why_silent,
)
from lightning_freescale.testing import run_distributed


def _stands(timeline: Timeline) -> dict[str, Any]:
    return json.loads(json.dumps(RankObserver(timeline, 3).state()))  # as it travels


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
        assert 0.02 <= seen.state()["since_s"] < 10


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
    """Return a rank that waits in exchange ``number`` of the world, or computes after ``begun``; ``within`` changes it."""
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
    """Return the exchanges of the document, and the text in one line."""
    document = hang_document("rank 0 has ended no step for 30 s", ranks, 60.0)
    return document["exchanges"], " ".join(hang_text(document).split())


def test_who_has_not_come() -> None:
    ranks = [_rank(0, 3), _rank(1, begun=3), _rank(2, 3), _rank(3, begun=5)]
    (exchange,), text = _told(*ranks)
    assert (exchange["waiting"], exchange["missing"], exchange["unknown"]) == ([0, 2], [1], [])
    assert "rank 0 has ended no step for 30 s" in text and "60 s" in text
    assert "rank 1 has not reached all_reduce (exchange 3 of step 12 in group world)" in text and "ranks 0, 2 wait" in text
    table = hang_text(hang_document("", ranks, 60.0)).splitlines()[-3:]
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
    assert exchange["missing"] == exchange["unknown"] == [] and "all ranks have reached all_reduce" in text
    ends = [_rank(k, 0, within={"group": "world 0>1 7", "ranks": [0, 1], "name": ("send", "recv")[k]}) for k in (0, 1)]
    (exchange,), text = _told(*ends, _rank(2))
    assert exchange["missing"] == [] and "different" not in text
    assert "all ranks have reached send or recv" in text
    (exchange,), _ = _told(ends[0], _rank(1), _rank(2))
    assert exchange["missing"] == [1]


def test_ranks_that_do_not_answer_and_that_have_ended() -> None:
    silent, ended = {"rank": 1, "silent": "process 7 on node3 has ended"}, {"rank": 2, "ended": True}
    (exchange,), text = _told(_rank(0, 3), silent, ended)
    assert exchange["unknown"] == [1] and exchange["missing"] == [2]
    assert "rank 1 does not answer, and rank 0 waits in all_reduce" in text
    assert "process 7 on node3 has ended" in text and "training has ended" in text


def test_threads_that_exchange_in_the_background() -> None:
    idle = {"thread": "freescale-b", "exchange": None, "moved_bytes": None, "since_s": None, "place": "g (b.py:2)"}
    busy = {"thread": "freescale-net", "exchange": "rows", "moved_bytes": 300, "since_s": 4.0, "place": "f (a.py:1)"}
    _, text = _told(_rank(0, threads=[busy, idle]))
    assert "rank 0, thread freescale-net in rows of 0.3 kB for 4.0 s, at f (a.py:1)" in text
    assert "rank 0, thread freescale-b at g (b.py:2)" in text


def test_many_ranks_make_a_short_table() -> None:
    document = hang_document("", [*(_rank(rank, 3) for rank in range(255)), _rank(255)], 60.0)
    assert len(hang_text(document).splitlines()) < 8 and "0-254" in hang_text(document)
    assert ranks_in_words([8, 0, 1, 2, 5, 7]) == "0-2, 5, 7-8"
    assert (in_words([3]), in_words([3, 4])) == ("rank 3", "ranks 3-4")
