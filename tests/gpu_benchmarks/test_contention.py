"""Transfers beside compute, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import part_contention
import pytest
import sm_free_checks
import sm_free_compute
import sm_free_measure
import sm_free_plan
import torch
import torch.distributed as dist
import two_ranks_pair
from sm_free_running import Running
from two_ranks_pair import Rank

SCRIPT = Path(sm_free_plan.__file__).with_name("part_contention.py")
SMALL = sm_free_plan.of_size(on_gpu=False, quick=True)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run without a GPU finds."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "part_contention.md").read_text() in done.stdout
    return _found(out)


@pytest.mark.slow
def test_measures_what_a_cpu_can(ran: dict[str, Any]) -> None:
    equality, *rows = ran["rows"]
    assert equality["collectives"] == equality["equal to gloo"] > 100
    assert [(row["compute"], row["beside"], row["on"]) for row in rows] == [
        ("gemm", "host", "CPU"),
        ("attention", "host", "CPU"),
    ]
    figures = ran["figures"]
    for row in rows:
        name = f"{row['compute']}_host"
        assert row["ms alone"] > 0 and row["ms beside"] > 0 and row["GB/s"] > 0 and row["GB/s without compute"] > 0
        assert figures[f"{name}_slowdown_low"] <= figures[f"{name}_slowdown"] <= figures[f"{name}_slowdown_high"]
    assert figures["host_gbps"] > 0 and figures["host_equal_share"] == 1


@pytest.mark.slow
def test_says_what_it_leaves_out(ran: dict[str, Any]) -> None:
    skipped = {entry["what"] for entry in ran["skipped"]}
    assert skipped == {"profile of host", "sm_copy", "copy_engine", "peer", "symm_mem", "peer_copy", "nccl"}
    assert not ran["failed"]


@pytest.mark.parametrize(("devices", "asked"), [(1, False), (2, True)])
def test_asks_for_a_second_gpu_before_it_makes_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: int, asked: bool
) -> None:
    """And ``peer`` comes last: a mistake in it could take the GPU from all others."""
    began: list[str] = []
    monkeypatch.setattr(two_ranks_pair, "run", lambda work, plan, name="symm_mem", timeout=0: began.append(name) or [])
    monkeypatch.setattr(two_ranks_pair, "lacking", lambda transport: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    plan = sm_free_plan.of_size(on_gpu=True, quick=True)
    monkeypatch.setattr(sm_free_plan, "of_size", lambda *_: plan)
    with pytest.raises(SystemExit):
        part_contention.main(["--out", str(tmp_path)])
    assert began == ["host", "sm_copy", "copy_engine", *(["peer_copy"] if asked else []), "symm_mem", "peer"]
    assert asked != any(entry["what"] == "peer_copy" for entry in _found(tmp_path)["skipped"])


def _found(out: Path) -> dict[str, Any]:
    return json.loads((out / "part_contention.json").read_text())


def test_padding_takes_no_part_in_the_attention() -> None:
    lengths = sm_free_compute.histories(SMALL)[: sm_free_compute.BLOCK]
    block = sm_free_compute._block(SMALL, lengths)
    together = sm_free_compute.attend(*block, longest=SMALL.longest)
    for history, length in enumerate(lengths):
        own = [part[history : history + 1, :, :length] for part in block]
        torch.testing.assert_close(together[history, :, :length], sm_free_compute.attend(*own, longest=SMALL.longest)[0])
        assert not together[history, :, length:].any()


def test_rate_between_two_moments() -> None:
    running = Running(lambda: 0)
    running._marks = [(1.0, 0), (2.0, 10**9), (4.0, 5 * 10**9)]
    assert running.gbps(1.5, 3.0) == pytest.approx((3 - 0.5) / 1.5)


def test_a_failing_transfer_fails_the_measurement() -> None:
    def step() -> int:
        raise RuntimeError("the link is down")

    with pytest.raises(RuntimeError, match="the link is down"), Running(step):
        pass


def test_slowdown_is_against_the_same_round() -> None:
    """The first round warms up; the machine slows down for all in the last two."""
    taken = {("gemm", "alone"): [9.0, 1.0, 2.0, 2.0], ("gemm", "host"): [9.0, 1.1, 2.2, 2.4]}
    figures = sm_free_measure.make_figures(taken, {("gemm_", "host"): [0.0, 1.0, 2.0, 3.0]})
    assert figures["gemm_host_slowdown"] == pytest.approx(1.1)
    assert figures["gemm_host_slowdown_high"] == pytest.approx(1.15)
    assert figures["gemm_alone_ms"] == 2 and figures["gemm_host_gbps"] == 2


COPIES = {"Memcpy DtoH (Device -> Pinned)": 2, "Memcpy HtoD (Pinned -> Device)": 1}
WITHIN = {"Memset (Device)": 1, "Memcpy DtoD (Device -> Device)": 1}


@pytest.mark.parametrize(
    ("events", "kernels"), [(COPIES, 0), (COPIES | WITHIN, 2), (COPIES | {"elementwise": 2, "gemm": 1}, 3)]
)
def test_counts_kernels(monkeypatch: pytest.MonkeyPatch, events: dict[str, int], kernels: int) -> None:
    said = _profiled(monkeypatch, {"gemm": 1}, events)
    assert said["row"]["kernels in a step"] == kernels
    assert "2 x Memcpy DtoH (Device -> Pinned)" in said["row"]["all that the GPU does"]
    assert said["figure"] == {"name": "host_kernels", "value": kernels}


@pytest.mark.parametrize(("seen", "copies"), [({}, COPIES), ({"gemm": 1}, {"Memcpy DtoH (Device -> Pinned)": 1})])
def test_a_blind_profiler_proves_nothing(monkeypatch: pytest.MonkeyPatch, seen: dict, copies: dict) -> None:
    assert _profiled(monkeypatch, seen, copies).keys() == {"skip"}


def _profiled(monkeypatch: pytest.MonkeyPatch, work: dict[str, int], step: dict[str, int]) -> dict[str, Any]:
    monkeypatch.setattr(sm_free_checks, "_device_events", lambda step: Counter(step()))
    plan, said = sm_free_plan.of_size(on_gpu=True, quick=True), []
    sm_free_measure._say_kernels(Rank(0, 1.0, said.append), plan, lambda: work, "host", lambda: step, "")
    return dict(said)


@pytest.mark.slow
def test_finds_a_group_that_is_wrong() -> None:
    said = list(two_ranks_pair.run(_compare_a_wrong_group, timeout=60))
    (_, row), (_, figure), (name, failure) = said
    assert name == "fail" and 0 < row["equal to gloo"] < row["collectives"] and figure["value"] < 1
    assert "all-to-all, uneven, torch.float32" in failure["error"]
    assert "all-to-all, empty, torch.float32" not in failure["error"]


def _compare_a_wrong_group(rank: Rank) -> None:
    """On rank 1 alone, the last row that arrives is another."""
    rank.init_gloo()
    right = dist.all_to_all_single

    def wrong(out: torch.Tensor, *args: object, group: object, **kwargs: object) -> object:
        work = right(out, *args, group=group, **kwargs)
        work.wait()
        if rank.rank and group is not None and out.numel():
            out[-1] = (out[-1] == 0).to(out.dtype)
        return work

    dist.all_to_all_single = wrong
    sm_free_measure._say_equality(rank, "host", *sm_free_checks.equality(SMALL, dist.new_group(backend="gloo")))
