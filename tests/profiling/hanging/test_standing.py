"""Where a rank stands, seen by another of its threads."""

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

import pytest
import torch
import torch.distributed as dist

from lightning_freescale._worker import WorkerThread
from lightning_freescale.profiling.hanging.standing import StandingSeen, why_silent
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed


@pytest.fixture
def timeline() -> Timeline:
    made = Timeline()
    made.enable(torch.device("cpu"))
    return made


def _stands(timeline: Timeline) -> dict[str, Any]:
    found = StandingSeen(timeline, 3).as_document()
    return json.loads(json.dumps(found))  # as it travels


def test_stages(timeline: Timeline) -> None:
    assert _stands(timeline)["stage"] == "outside of a step" and _stands(timeline)["step"] is None
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
    assert (
        found["stage"] == "host: hook" and "test_standing.py" in found["place"] and "_stands" in found["code"] + found["place"]
    )
    assert (found["host"], found["process"]) == (socket.gethostname(), os.getpid())


def test_the_exchange_it_waits_in(timeline: Timeline) -> None:
    timeline.open_step()
    with timeline.collective("all_reduce", "world", moved=8):
        pass
    with timeline.span("forward", "forward"), timeline.collective("broadcast", "world", moved=12), timeline.collective("inner"):
        time.sleep(0.02)
        found = _stands(timeline)
    expected = {"name": "broadcast", "group": "world", "step": 0, "number": 1, "ranks": None, "moved_bytes": 12}
    assert found["exchange"] == expected and found["stage"] == "forward"
    assert found["since_s"] >= 0.02 and found["exchanges_begun"]["world"] == 2
    assert _stands(timeline)["exchange"] is None


def test_a_message_is_of_its_two_ranks(timeline: Timeline) -> None:
    timeline.open_step()
    with timeline.collective("recv", "world 4>1 0"):
        assert _stands(timeline)["exchange"]["ranks"] == [4, 1]
    with timeline.collective("recv", "world any>1 of 1"):
        assert _stands(timeline)["exchange"]["ranks"] == [1]


def _in_a_group() -> list[int]:
    timeline = Timeline()
    timeline.enable(torch.device("cpu"))
    timeline.open_step()
    group = dist.new_group([1, 2])
    with timeline.collective("all_reduce", str(getattr(group, "group_name", "0"))):
        return _stands(timeline)["exchange"]["ranks"] if dist.get_rank() else []


def test_the_ranks_of_a_group() -> None:
    assert run_distributed(_in_a_group, 3) == [[], [1, 2], [1, 2]]


def test_threads_that_work_and_that_exchange(timeline: Timeline) -> None:
    timeline.open_step()
    worker, idle, own = (WorkerThread(name) for name in ("freescale-net", "freescale-idle", "freescale-hang store"))
    idle.submit(int).result()
    begun, done = threading.Semaphore(0), threading.Event()

    def exchange() -> None:
        with timeline.background_collective("embedding exchange", 64):
            begun.release()
            done.wait()

    def work() -> None:
        begun.release()
        done.wait()

    jobs = [worker.submit(exchange), own.submit(work)]
    begun.acquire(), begun.acquire()
    (found,) = _stands(timeline)["threads"]
    done.set()
    assert (found["thread"], found["exchange"], found["moved_bytes"]) == ("freescale-net", "embedding exchange", 64)
    assert found["since_s"] >= 0 and "exchange (test_standing.py:" in found["place"]
    for job in jobs:
        job.result()
    assert timeline.under_way == {} and _stands(timeline)["threads"] == []
    for each in (worker, idle, own):
        assert each.stop(10.0)


class _DeviceClock:
    """Stamps that tell no time yet, as events of a device that is behind."""

    def stamp(self) -> object:
        return object()


def test_stamps_of_a_device_are_not_asked_for_their_time(timeline: Timeline) -> None:
    timeline.clock = _DeviceClock()  # type: ignore[assignment]
    timeline.open_step()
    seen = StandingSeen(timeline, 0)
    with timeline.collective("all_reduce", "world"):
        seen.look()
        time.sleep(0.02)
        assert 0.02 <= seen.as_document()["since_s"] < 10


def test_why_a_process_is_silent() -> None:
    here = socket.gethostname()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert "runs no Python" in why_silent(here, process.pid)
        assert "or the network is gone" in why_silent("elsewhere", process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"is stopped; kill -CONT {process.pid}" in why_silent(here, process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert "has ended" in why_silent(here, process.pid), "also while nobody has asked for its status"
    finally:
        process.kill()
        process.communicate()
    assert why_silent(here, process.pid) == f"process {process.pid} on {here} has ended"
