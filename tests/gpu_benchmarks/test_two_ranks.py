"""Two ranks on one device: what is right is told with its rates, and what is wrong is a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import first_hour
import part_two_ranks
import pytest
import torch
import torch.distributed as dist
import two_ranks_lanes
import two_ranks_pair
from hour_report import Report
from two_ranks_pair import Rank

WITHOUT_TORCHREC = """
import sys
from pathlib import Path
sys.path[:0] = [str(Path({script!r}).parent)]
for name in ("torchrec", "fbgemm_gpu", "lightning", "pytorch_lightning"):
    sys.modules[name] = None  # to import it is an error
import part_two_ranks
part_two_ranks.find_spec = lambda name: None
part_two_ranks.TRANSPORTS = ("host",)
part_two_ranks.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_what_a_cpu_can(tmp_path: Path) -> None:
    found = _run([part_two_ranks.__file__], tmp_path)
    assert not found["failed"]
    lanes = [row for row in found["rows"] if "equal to gloo" in row]
    assert [(row["transport"], row["on"]) for row in lanes] == [("host", "CPU")] * 2 + [("native", "CPU")] * 2
    assert all(row["equal to gloo"] and row["GB/s"] > 0 and row["gloo: GB/s"] > 0 for row in lanes)
    killed = [row for row in found["rows"] if "noticed after s" in row]
    under = [(row["a rank is killed under"], row["transport"]) for row in killed]
    assert under == [("process group", "host"), ("strategy", "host"), ("process group", "native")]
    assert all(row["noticed after s"] < row["timeout s"] and "Error: " in row["error"] for row in killed)
    trained = [row for row in found["rows"] if "trained with" in row]
    assert [row["trained with"] for row in trained] == ["host"]
    assert all(row["steps"] == 8 and row["weights from ddp's"] <= row["allowed"] for row in trained)
    assert {entry["what"].split(",")[0] for entry in found["skipped"]} == {
        "native under the strategy",
        "nccl-zero-cta",
        "peer",
        "two-level",
    }


@pytest.mark.slow
def test_needs_torch_alone(tmp_path: Path) -> None:
    found = _run(["-c", WITHOUT_TORCHREC.format(script=part_two_ranks.__file__)], tmp_path)
    assert not found["failed"] and any("equal to gloo" in row for row in found["rows"])
    why = {entry["what"]: entry["why"] for entry in found["skipped"]}
    assert why["host under the strategy"] == "lightning, torchrec, fbgemm_gpu: not installed"


@pytest.mark.parametrize(
    ("exchanges", "training", "trained"),
    [(30, 50, ["host", "peer"]), (20, 45, ["host", "native"]), (5, 20, ["host", "native", "peer"]), (45, 75, ["host"])],
)
def test_training_leaves_time_for_the_transports_that_come_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exchanges: float, training: float, trained: list[str]
) -> None:
    now, ran, allowed = 0.0, [], []

    def run(seconds: float, work: Any, transport: str, *_: Any) -> list[Any]:
        nonlocal now
        lane = work is two_ranks_lanes.lane
        ran.append((transport, "exchanges" if lane else "training"))
        allowed.append(now + seconds)
        now += exchanges if lane else training
        return []

    monkeypatch.setattr(part_two_ranks, "_run", run)
    monkeypatch.setattr(part_two_ranks.time, "monotonic", lambda: now)
    monkeypatch.setattr(part_two_ranks, "find_spec", lambda name: name)
    report = Report("two_ranks", tmp_path)
    part_two_ranks.measure(report, ["host", "native", "peer"], None, True, part_two_ranks.SECONDS)
    assert ran[:3] == [("host", "exchanges"), ("host", "training"), ("native", "exchanges")]
    assert [name for name, kind in ran if kind == "exchanges"] == ["host", "native", "peer"]
    assert [name for name, kind in ran if kind == "training"] == trained
    assert len(report.found()["skipped"]) == 3 - len(trained)
    assert max(allowed) <= part_two_ranks.SECONDS <= first_hour.PARTS["two_ranks"] - 20


def _run(command: list[str], out: Path) -> dict[str, Any]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command, "--quick", "--out", str(out)], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "part_two_ranks.json").read_text())


@pytest.mark.slow
def test_wrong_bytes_are_a_failure() -> None:
    said = list(two_ranks_pair.run(_compare_with_a_wrong_group, timeout=60))
    (_, right), _, (_, wrong), _, (name, failure) = said
    assert right["equal to gloo"] and not wrong["equal to gloo"]
    assert name == "fail" and failure["error"] == "rank 1 received other bytes than by gloo"


def _compare_with_a_wrong_group(rank: Rank) -> None:
    """On rank 1 alone, one byte of a large exchange is another."""
    rank.init_gloo()
    group, right = dist.new_group(backend="gloo"), dist.all_to_all_single

    def wrong(out: torch.Tensor, *args: object, group: object, **kwargs: object) -> object:
        work = right(out, *args, group=group, **kwargs)
        work.wait()
        if rank.rank and group is not None and len(out) > 10_000:
            out[5000] += 1
        return work

    dist.all_to_all_single = wrong
    for nbytes in (4096, 100_000):
        two_ranks_lanes._compare(rank, group, "host", nbytes, 1)


def _said_of_death(seconds: float, noticed: Exception | None) -> dict[str, Any]:
    said: list[Any] = []
    two_ranks_lanes.say_death(Rank(0, 10.0, said.append), "host", "strategy", seconds, noticed)
    return dict(said)


def test_a_death_that_is_noticed_in_time() -> None:
    said = _said_of_death(3.0, RuntimeError("rank 1 is gone\nand more"))
    assert "fail" not in said and said["row"]["error"] == "RuntimeError: rank 1 is gone"
    assert said["figure"] == {"name": "host_strategy_killed_seconds", "value": 3.0}


@pytest.mark.parametrize(("seconds", "noticed"), [(3.0, None), (40.0, RuntimeError("rank 1 is gone"))])
def test_a_death_that_is_noticed_late_or_never(seconds: float, noticed: Exception | None) -> None:
    assert "no error within the timeout of 10 s" in _said_of_death(seconds, noticed)["fail"]["error"]


def test_nobody_dies_and_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges that go on well although the other rank should be gone end in time, as a failure."""
    said: list[Any] = []
    monkeypatch.setattr(two_ranks_lanes, "_exchange", lambda *_: time.sleep(0.01))
    monkeypatch.setattr(two_ranks_lanes, "LONGEST", 0.2)
    two_ranks_lanes._survive(Rank(0, 0.1, said.append), None, "host", 1)
    assert dict(said)["fail"]["error"].startswith("no error within the timeout")


@pytest.mark.parametrize(
    ("ours", "weight", "told"),
    [
        ([0.5, 0.4], 1.0, None),
        ([0.5, 0.4], 1.00001, "weights differ by 1e-05"),
        ([0.5, 0.40001], 1.0, "losses by 2e-05"),
        ([0.5, float("nan")], 1.0, "losses by nan"),
        ([0.5, 0.4], float("nan"), "weights differ by nan"),
        ([0.5], 1.0, "1 steps"),
    ],
)
def test_training_that_differs(ours: list[float], weight: float, told: str | None) -> None:
    import two_ranks_training

    said: list[Any] = []
    reference, found = {"w": torch.tensor([1.0, 0.5])}, {"w": torch.tensor([weight, 0.5])}
    two_ranks_training._say_difference(Rank(0, 1.0, said.append), "host", [0.5, 0.4], reference, ours, found)
    failure = dict(said).get("fail")
    assert (failure is None) if told is None else (told in failure["error"])


@pytest.mark.slow
def test_gloo_that_fails_on_one_rank_leaves_both_in_step() -> None:
    """On a GPU it may refuse CUDA tensors on one rank alone, which the other one is waiting for."""
    said = list(two_ranks_pair.run(_compare_while_gloo_fails_on_rank_1, timeout=60, group_timeout=4))
    rows = [about for name, about in said if name == "row"]
    assert len(rows) == 2 and not [name for name, _ in said if name == "fail"]
    for row in rows:
        assert row["equal to gloo"] and "rank 1: gloo takes no CUDA tensors" in row["gloo: ms"] and row["gloo: GB/s"] is None


def _compare_while_gloo_fails_on_rank_1(rank: Rank) -> None:
    rank.init_gloo()
    lane, right = dist.new_group(backend="gloo"), dist.all_to_all_single
    calls = []

    def fails(*args: object, group: object, **kwargs: object) -> object:
        calls.append(group)
        if rank.rank and group is not lane and lane in calls:  # one that is timed: the expected bytes came before the lane's
            raise RuntimeError("gloo takes no CUDA tensors")
        return right(*args, group=group, **kwargs)

    dist.all_to_all_single = fails
    for nbytes in (4096, 100_000):
        calls.clear()
        two_ranks_lanes._compare(rank, lane, "host", nbytes, 1)
