"""The benchmark of transfers beside compute, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

sys.path += [str(Path(__file__).parents[1] / "benchmarks" / folder) for folder in ("", "gpu")]

import harness
import sm_free_checks
import sm_free_compute
import sm_free_measure
import sm_free_pair
import sm_free_plan
from sm_free_running import Running

SCRIPT = Path(sm_free_plan.__file__).with_name("sm_free.py")
SMALL = sm_free_plan.of_size(on_gpu=False, quick=True, mib=None, ctas=24, rounds=None)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, float]]:
    """What a run without a GPU prints, and its figures."""
    path = tmp_path_factory.mktemp("gpu") / "figures.json"
    flags = ["--quick", "--json", str(path), "--require", "host_gbps>=0", "--require", "gemm_host_slowdown>=0"]
    script = [sys.executable, str(SCRIPT), *flags]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())["figures"]


@pytest.mark.slow
def test_measures_what_a_cpu_can(ran: tuple[str, dict[str, float]]) -> None:
    printed, figures = ran
    for compute in ("gemm", "attention"):
        assert figures[f"{compute}_alone_ms"] > 0
        assert figures[f"{compute}_host_slowdown_low"] <= figures[f"{compute}_host_slowdown"]
        assert figures[f"{compute}_host_slowdown"] <= figures[f"{compute}_host_slowdown_high"]
        assert figures[f"{compute}_host_gbps"] > 0
    assert figures["host_gbps"] > 0
    assert figures["equal_cases"] == figures["cases"] > 100
    assert f"cases equal to gloo: {figures['cases']} of {figures['cases']}" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_copy", "copy_engine", "peer_copy", "symm_mem", "profiler"])
def test_says_what_it_leaves_out(ran: tuple[str, dict[str, float]], name: str) -> None:
    printed, figures = ran
    assert f"skipped: {name}: " in printed
    assert not [figure for figure in figures if name in figure or figure.endswith("_kernels")]


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["gemm_sm_copy_slowdown<=1.02", "host_kernels<=0"])
def test_a_figure_that_was_left_out_cannot_be_required(ran: tuple[str, dict[str, float]], figure: str) -> None:
    options = harness.parser("").parse_args(["--require", figure])
    with pytest.raises(SystemExit, match=f"--require '{figure}': write NAME"):
        harness.finish(ran[1], options)


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
    figures = sm_free_measure._figures(taken, {("gemm_", "host"): [0.0, 1.0, 2.0, 3.0]})
    assert figures["gemm_host_slowdown"] == pytest.approx(1.1)
    assert figures["gemm_host_slowdown_high"] == pytest.approx(1.15)
    assert figures["gemm_alone_ms"] == 2 and figures["gemm_host_gbps"] == 2


COPIES = {"Memcpy DtoH (Device -> Pinned)": 2, "Memcpy HtoD (Pinned -> Device)": 1}
WITHIN = {"Memset (Device)": 1, "Memcpy DtoD (Device -> Device)": 1}


@pytest.mark.parametrize(
    ("events", "kernels"), [(COPIES, 0), (COPIES | WITHIN, 2), (COPIES | {"elementwise": 2, "gemm": 1}, 3)]
)
def test_counts_kernels(monkeypatch: pytest.MonkeyPatch, events: dict[str, int], kernels: int) -> None:
    monkeypatch.setattr(sm_free_checks, "_device_events", lambda step: Counter(step()))
    plan = sm_free_plan.of_size(on_gpu=True, quick=True, mib=None, ctas=24, rounds=None)
    figures, notes = sm_free_measure._prove(plan, lambda: {"gemm": 1}, {"host": lambda: events})
    assert figures == {"host_kernels": kernels}
    assert "2 x Memcpy DtoH (Device -> Pinned)" in notes[0]


@pytest.mark.parametrize(("seen", "copies"), [({}, COPIES), ({"gemm": 1}, {"Memcpy DtoH (Device -> Pinned)": 1})])
def test_a_blind_profiler_proves_nothing(monkeypatch: pytest.MonkeyPatch, seen: dict, copies: dict) -> None:
    monkeypatch.setattr(sm_free_checks, "_device_events", lambda step: Counter(step()))
    plan = sm_free_plan.of_size(on_gpu=True, quick=True, mib=None, ctas=24, rounds=None)
    figures, notes = sm_free_measure._prove(plan, lambda: seen, {"host": lambda: copies})
    assert not figures and notes[0].startswith("skipped: profiler: ")


@pytest.mark.slow
def test_finds_a_group_that_is_wrong() -> None:
    count, differing = sm_free_pair.run(_compare_a_wrong_group, timeout=60)
    assert len(differing) < count
    assert "all-to-all, uneven, torch.float32" in differing and "all-to-all, empty, torch.float32" not in differing


@pytest.mark.slow
@pytest.mark.parametrize(("end", "error"), [("_die", ProcessExitedException), ("_raise", ProcessRaisedException)])
def test_a_peer_that_ends_ends_the_run(end: str, error: type[Exception]) -> None:
    start = time.monotonic()
    with pytest.raises(error):
        sm_free_pair.run(globals()[end], timeout=100)
    assert time.monotonic() - start < 50


@pytest.mark.slow
def test_a_run_that_hangs_is_ended() -> None:
    with pytest.raises(TimeoutError, match="did not finish within 3 s"):
        sm_free_pair.run(_hang, timeout=3)


def _compare_a_wrong_group(rank: int) -> tuple[int, list[str]]:
    """On rank 1 alone, the last row that arrives is another."""
    right = dist.all_to_all_single

    def wrong(out: torch.Tensor, *args: object, group: object, **kwargs: object) -> object:
        work = right(out, *args, group=group, **kwargs)
        work.wait()
        if rank and group is not None and out.numel():
            out[-1] = (out[-1] == 0).to(out.dtype)
        return work

    dist.all_to_all_single = wrong
    return sm_free_checks.equality(SMALL, dist.new_group(backend="gloo"))


def _die(rank: int) -> None:
    if rank:
        os._exit(3)
    dist.barrier()


def _raise(rank: int) -> None:
    if rank:
        raise ValueError("the peer gives up")
    dist.barrier()


def _hang(rank: int) -> None:
    time.sleep(100)
