"""The benchmarks of the overlap: bytes and times of exchanges, of the host's work, and of whole steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exchange
import host_work
import overlap
import pytest

from lightning_freescale.testing import run_distributed
from tests.helpers.shown_page import packed


def _exit_code(main: Callable[[], Any]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


def test_overlap_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "figures.json"
    size = ["--rows", "5000", "--batch", "4", "--dim", "8", "--steps", "8", "--rounds", "1", "--compute-ms", "3"]
    size += ["--shift-at", "5"]
    monkeypatch.setattr(sys, "argv", ["overlap.py", *size, "--json", str(written), "--require", "floor_ms<=0"])
    assert run_distributed(_exit_code, 2, overlap.main, init=False) == [1, 1]  # every rank exits alike
    figures = json.loads(written.read_text())["figures"]
    assert figures["plain_bytes"] == figures["pipeline_bytes"] == figures["plain_gloo_bytes"] > figures["dedup_bytes"]
    assert figures["ours_bytes"] == pytest.approx(figures["dedup_bytes"], rel=0.2)
    assert 0 < figures["collision_rate"] < 1 and figures["ours_mispredicted_lookups"] == 0
    assert {"reduction_vs_plain", "reduction_vs_dedup", "step_over_dedup", "ours_exposed_after_ms"} <= figures.keys()


@pytest.mark.slow
def test_exchange_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "figures.json"
    monkeypatch.setattr(exchange, "LOW", 1024 * 1024)
    monkeypatch.setenv("NETLAB_RATE", "10gbit")
    size = ["--mbytes", "1", "--rounds", "2", "--json", str(written), "--require", "ours_over_ideal<=0"]
    monkeypatch.setattr(sys, "argv", ["exchange.py", *size])
    assert run_distributed(_exit_code, 2, exchange.main, init=False) == [1, 1]
    figures = json.loads(written.read_text())["figures"]
    ratios = {"ours_over_ideal", "gloo_over_ideal", "high_over_idle", "low_slowdown", "latency_over_gloo_sync"}
    assert ratios <= figures.keys() and all(figures[name] > 0 for name in ratios)
    assert {"hidden_sleep", "hidden_matmul"} <= figures.keys()


@pytest.mark.slow
def test_host_work_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "figures.json"
    size = ["--ranks", "2", "3", "--rows", "5000", "--steps", "4", "--rounds", "1", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["host_work.py", *size])
    host_work.main()
    figures = json.loads(written.read_text())["figures"]
    names = ["process_over_plain_{}", "embedding_over_collection_{}", "micro_batch_thread_ms_{}", "ids_{}", "rows_{}"]
    variants = [name.replace("-", "_") for name in (*host_work.VARIANTS, "thread")]
    names += [f"{name}_{{}}{ending}" for name in variants for ending in ("_ms", "_least_ms", "_most_ms")]
    differences = ["micro_batch_ms_{}", "micro_batch_model_ms_{}"]  # of so few steps they may be below zero
    assert figures.keys() == {name.format(ranks) for name in [*names, *differences] for ranks in (2, 3)}
    assert all(figures[name.format(ranks)] > 0 for name in names for ranks in (2, 3))


def _auto_against_fixed(path: str, profile: str) -> int:
    os.environ["LOCAL_RANK"] = "0"  # each rank on a host of its own, as under benchmarks/netlab.py
    import end_to_end  # here, as it changes the environment

    chosen = ["--variants", "overlapped", "micro-2", "auto", "--json", path, "--require", "auto_over_best>=0"]
    chosen += ["--profile", profile]
    small = ["--batch", "2", "--rows", "500", "--dim", "4", "--compute-ms", "1", "--steps", "20", "--rounds", "1"]
    sys.argv = ["end_to_end.py", *chosen, *small]
    with pytest.raises(SystemExit) as stopped:
        end_to_end.main()
    return int(stopped.value.code or 0)


@pytest.mark.slow
def test_auto_is_held_against_each_fixed_number(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert run_distributed(_auto_against_fixed, 2, str(path), str(tmp_path)) == [0, 0]
    shown, _ = packed(tmp_path / "report.html")
    assert {"exchange overlapped", "micro-2"} <= {report["run"]["label"] for report in shown}
    figures = json.loads(path.read_text())["figures"]
    names = ("overlapped", "micro_2", "auto")
    compute = sum(figures[f"{name}_compute_ms"] for name in names) / len(names)
    typical = {name: figures[f"{name}_lost_ms"] + compute for name in names}
    assert figures["auto_over_best"] == pytest.approx(typical["auto"] / min(typical["overlapped"], typical["micro_2"]))
    assert figures.get("auto_chose_1", 0) + figures.get("auto_chose_2", 0) == 1
    assert figures["auto_compute_ms"] == pytest.approx(figures["micro_2_compute_ms"], rel=0.3), "as many steps of the same data"
