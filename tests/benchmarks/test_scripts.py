"""Each benchmark runs at a tiny size, and its figures are consistent."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import balance
import balance_gaps
import budget
import calibration
import comm_stress
import convergence
import convergence_models
import cuda_code
import faults
import harness
import host_work
import hot_rows
import interactions
import netlab
import numpy as np
import overlap_workload
import placement
import prediction
import pytest
import simulator_netlab
import simulator_published
import suite
from convergence_models import ELSEWHERE, FREESCALE, Recipe
from cuda_code import package_files, unclassified

from lightning_freescale.balance import BalancedSampler, assign
from lightning_freescale.testing import run_distributed
from tests.benchmarks.conftest import Run

pytestmark = pytest.mark.slow

Figures = dict[str, float]
BENCHMARKS = Path(suite.__file__).parent

# -- balance


def test_balance(users: Path, run: Run) -> None:
    size = ["--data", users, "--ranks", 2, 4, "--batches", 2, "--search", 0.01]
    figures = run(balance, *size, "--families", "short")
    for case in ("few_2", "few_4", "short_2", "short_4"):
        of = {way: figures[f"{case}_{way}"] for way in ("fixed_bound", "fixed", "zigzag", "random")}
        assert list(of.values()) == sorted(of.values())
        assert figures[f"{case}_fixed_gap"] == of["fixed"] / of["fixed_bound"]
    assert not any("verl" in name for name in figures)
    figures = run(budget, "--data", users, "--ranks", 2, 8, "--samples", 12)
    assert 0.5 < figures["fullest"] <= 1 and figures["few_200_2_imbalance"] < figures["few_200_2_itself_imbalance"]


def test_balance_gaps(users: Path, run: Run) -> None:
    case = "lognormal/4x8/mixed/slack/0"
    planned = assign(balance_gaps.case_costs(balance_gaps.Case.parse(case), {}), 4, assignment_mode="slack")
    assert run(balance_gaps, "--case", case)["lognormal_slack_worst"] == pytest.approx(planned.gap, abs=1e-12)
    grid = ["--data", users, "--families", "few", "short", "--ranks", 2, 16, "--per-rank", 3, 8, "--batches", 2]
    figures = run(balance_gaps, *grid, "--worst", 3)
    assert figures["few_cases"] == 3 * 2 * 3 * 3 and figures["sizes_left_out"] == 1, "16 x 8 samples are more than 100"
    assert figures["short_cases"] == 4 * 2 * 3 * 3 and figures["all_cases"] == figures["few_cases"] + figures["short_cases"]


def test_calibration_and_prediction(users: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = run(calibration, "--data", users, "--ranks", 2, "--runs", 2, "--start", "analytic", "--all-planned")
    assert all(1 <= figures[f"few_{kind}_2_calibrated"] < 1.25 for kind in ("quadratic", "mixed"))
    lengths = np.random.RandomState(0).lognormal(3, 1, 300).astype(int) + 1
    (tmp_path / "shop.txt").write_text("".join(f"{user}{' 7' * length}\n" for user, length in enumerate(lengths)))
    monkeypatch.setattr(prediction, "SIMULATED_RANKS", "2,4")
    size = ["--ranks", "4,128", "--batch-size", 4, "--epochs", 2]
    figures = run(prediction, "--data", tmp_path / "shop.txt", *size)
    assert figures["shop_128_off"] < 0.001, "an epoch of one step, the same in each"
    assert figures["worst_off"] == max(figures["shop_4_off"], figures["shop_128_off"])


def test_convergence(rounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss curves equal those of plain training, unless loss weights are wrong."""
    small = {"hstu": Recipe(6, 8, 20, {"dim": 16, "dropout": 0.0, "lr": 2e-3, "item_lr": 0.05, "std": 0.5})}
    monkeypatch.setitem(convergence_models.RECIPES, "ml-1m", small)
    path = tmp_path / "figures.json"

    def figures_of(*flags: str) -> Figures:
        convergence.main(["--data", str(rounds), "--json", str(path), *flags])
        return json.loads(path.read_text())["figures"]

    curves = ["--models", "hstu", "--seeds", "0", "--epochs", "0", "--steps", "12"]
    figures = figures_of(*curves)
    assert all(figures[f"hstu_{way}_curve_relative"] <= 1e-4 for way in (FREESCALE, ELSEWHERE))
    rounded = figures_of(*curves, "--wire", "bfloat16")["hstu_freescale_curve_relative"]
    assert figures["hstu_freescale_curve_relative"] < rounded < 2**-7
    monkeypatch.setattr(BalancedSampler, "loss_weight", lambda sampler, step: 1.0)
    assert figures_of(*curves)["hstu_freescale_curve_relative"] > 1e-3


# -- scripts of two ranks


def _main(script: str, change: Callable[[ModuleType], None] | None, *words: str) -> int:
    os.environ["LOCAL_RANK"] = "0"  # each rank has its own host, as under benchmarks/netlab.py
    os.environ["NETLAB_RATE"] = "10gbit"
    module = __import__(script)  # imported here because some scripts change the environment
    if change is not None:
        change(module)
    sys.argv = [f"{script}.py", *words]
    with pytest.raises(SystemExit) as stopped:
        module.main()
    return int(stopped.value.code or 0)


def _less(exchange: ModuleType) -> None:
    exchange.LOW = 1024 * 1024


def _overlap(of: Figures) -> bool:
    same = of["plain_bytes"] == of["pipeline_bytes"] == of["plain_gloo_bytes"] > of["dedup_bytes"]
    return same and of["ours_bytes"] == pytest.approx(of["dedup_bytes"], rel=0.2) and of["ours_mispredicted_lookups"] == 0


def _ladder(of: Figures) -> bool:
    rungs = all(
        0 < of[f"{rung}_bubble"] < 1 and of[f"{rung}_step_ms"] > of[f"{rung}_compute_ms"] for rung in ("plain", "split")
    )
    return rungs and of["limit"] == pytest.approx(1 / (1 - of["plain_bubble"])) and 0 < of["overlap_collision_rate"] <= 1


def _auto(of: Figures) -> bool:
    return of["auto_over_best"] > 0 and of.get("auto_chose_1", 0) + of.get("auto_chose_2", 0) == 1


def _lookups(of: Figures) -> bool:
    return all(of[f"{kind}_{phase}_ms"] > 0 for kind in ("sequences", "long_bags") for phase in ("train", "validate"))


def _real(of: Figures) -> bool:
    waits = of["floor_drawn_waits_ms"] > 0 and of["plain_exposed_ms"] == of["plain_waits_ms"] - of["floor_drawn_waits_ms"]
    rungs = ("ddp", "plain", "pipeline", "plain_once", "balance", "split")
    return waits and all(f"{rung}_later_ms" in of for rung in rungs) and "grouped_exposed_ms" not in of


RANKS: dict[str, tuple[str, int, Any, Callable[[Figures], bool]]] = {
    "overlap": (
        "--rows 5000 --batch 4 --dim 8 --steps 8 --rounds 1 --compute-ms 3 --require floor_ms<=0",
        1,  # the requirement fails on every rank
        None,
        _overlap,
    ),
    "exchange": ("--mbytes 1 --rounds 2", 0, _less, lambda of: of["ours_over_ideal"] > 0 and of["high_over_idle"] > 0),
    "end_to_end": (
        "--variants overlapped micro-2 auto --batch 2 --rows 500 --dim 4 --compute-ms 1 --steps 20 --rounds 1",
        0,
        None,
        _auto,
    ),
    "lookups": ("--kinds sequences long_bags --steps 12 --rounds 1", 0, None, _lookups),
    "ladder": (
        "--rungs floor plain balance overlap dedup split --rows 300 --compute-ms 4 --steps 8 --rounds 2",
        0,
        None,
        _ladder,
    ),
    "real_compute": (
        "--model sasrec --rungs floor floor-drawn ddp plain pipeline plain-once grouped balance split --rows 300 --batch 2 "
        "--layers 1 --max-length 20 --steps 4 --rounds 2 --ddp-steps 4 --ddp-rounds 1",
        0,
        None,
        _real,
    ),
}
"""For each script: the flags, the exit code, a change that makes it smaller, and a condition on the figures."""


@pytest.mark.parametrize("script", RANKS)
def test_script_of_two_ranks(script: str, tmp_path: Path) -> None:
    flags, code, change, holds = RANKS[script]
    path, words = tmp_path / "figures.json", [word.replace("+", " ") for word in flags.split()]
    init = script not in ("overlap", "exchange", "real_compute")
    assert run_distributed(_main, 2, script, change, *words, "--json", str(path), init=init) == [code] * 2
    assert holds(figures := json.loads(path.read_text())["figures"]), figures


def test_scripts_that_start_ranks(run: Run) -> None:
    """Check the requests of other nodes against the ids."""
    size = ["--rows", 3000, "--dim", 4, "--batch", 2, "--steps", 3, "--ranks-per-node", 2, "--hot", 1]
    figures = run(hot_rows, *size, "--warm-up", 8, "--rerank-every", 8)
    draw, per_row = overlap_workload.production(3000, 2), 4 + 2 + 2 * 4 * 4
    crossed = {"flat": 0, "two_level": 0}
    for step in (9, 10):
        for node in (0, 1):
            own = [np.unique(draw(step, rank)[0]) for rank in (2 * node, 2 * node + 1)]
            for way, asked in (("flat", own), ("two_level", [np.unique(np.concatenate(own))])):
                crossed[way] += sum(int((ids // 1500 != node).sum()) for ids in asked)
    for way, rows in crossed.items():
        assert figures[f"{way}_hot_bytes"] == pytest.approx(rows * per_row / 2)
    assert figures["two_level_hot_bytes"] < figures["auto_hot_bytes"] < figures["flat_hot_bytes"]
    assert figures["flat_sent_bytes"] < figures["auto_sent_bytes"] < figures["two_level_sent_bytes"]
    figures = run(comm_stress, "--ranks", 2, "--collectives", 600, "--seed", 3)
    kinds = [count for name, count in figures.items() if name.startswith("kind_")]
    assert figures["wrong"] == 0 and len(kinds) >= 5 and min(kinds) > 0 and sum(kinds) == 600
    figures = run(host_work, "--ranks", 2, "--rows", 5000, "--steps", 4, "--rounds", 1)
    assert figures["process_over_plain_2"] > 0 and figures["ids_2"] > 0
    figures = run(placement, "--rows", 100_000, "--batch", 8, "--steps", 2, "--ranks", 8)
    assert 1 <= figures["hash_8_imbalance"] < figures["shuffled_8_imbalance"] < figures["blocks_8_imbalance"]


def test_scripts_of_time_and_memory(run: Run, tmp_path: Path) -> None:
    figures = run(interactions, "--rows", 500, "--cases", "table_sort", "dat")
    assert np.isfinite(list(figures.values())).all() and {"dat_seconds", "table_sort_peak_ratio"} <= figures.keys()
    for script, words, name in (
        ("checkpoints", ["--megabytes=8", "--ranks=1", "--kinds", "sharded", f"--folder={tmp_path}"], "sharded_wait_per_copy"),
        ("soak", ["--steps=40", "--every=10", "--require=threads_per_thousand_steps<=1"], "rss_mb_per_thousand_steps"),
    ):
        path = tmp_path / f"{script}.json"
        command = [sys.executable, BENCHMARKS / f"{script}.py", *words, f"--json={path}"]
        subprocess.run(command, check=True, timeout=240, cwd=tmp_path)
        assert name in json.loads(path.read_text())["figures"]


def test_fault_campaign(tmp_path: Path) -> None:
    """After a rank is killed, no other rank hangs, and training resumes to the same weights."""
    path = tmp_path / "figures.json"
    faults.main(["--kinds", "killed", "--json", str(path), "--runs", "1"])
    figures = json.loads(path.read_text())["figures"]
    assert figures["runs"] == figures["resumed"] == 1 and not any(figures[name] for name in (*faults.DEFECTS, "failed"))
    faults.main(["--kinds", "killed", "--append", str(path), "--runs", "1", "--seed", "1"])
    assert json.loads(path.read_text())["figures"]["runs"] == 2


def test_the_fault_campaign_finds_defects(tmp_path: Path) -> None:
    """Train with wrong weights, and with an error that no rank names; the script fails if it does not find one of them."""
    path = tmp_path / "figures.json"
    faults.main(["--self-test", "--kinds", "other_weights", "loses_the_text", "--json", str(path)])
    figures = json.loads(path.read_text())["figures"]
    assert figures["runs"] == 2 and figures["silent_losses"] == 1 and figures["unnamed_errors"] >= 1


def test_simulator(run: Run) -> None:
    found = run(simulator_published)
    assert found["nvidia_tflop"] == pytest.approx(63.9, rel=0.01)
    off = {name: value for name, value in found.items() if name.endswith("_off") and not name.startswith("freescale")}
    assert 0.07 < off.pop("nvidia_cutlass_mean_off") <= 0.1, "the page says that the mean is not within 7 %"
    assert len(off) == 12 and max(map(abs, off.values())) <= 0.07
    assert found["nestpipe_share_1536_low"] <= 0.205 <= found["nestpipe_share_1536_high"]
    assert found["freescale_64_bubble"] == pytest.approx(0.28, abs=0.005)
    results = BENCHMARKS / "results"
    found = run(simulator_netlab, *(results / f"ladder_{ranks}.json" for ranks in (2, 4, 8)))
    committed = json.loads((results / "simulator_netlab.json").read_text())["figures"]
    assert found.keys() == committed.keys() and committed["most_off"] <= 0.07 and committed["most_bubble_points"] <= 4


# -- netlab


LAB = [sys.executable, netlab.__file__]
REDUCE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total, large, start = torch.tensor([dist.get_rank() + 1.0]), torch.ones(1_000_000), time.perf_counter()
dist.all_reduce(total)
dist.broadcast(large, src=0)
dist.all_reduce(large)  # the broadcast has then ended on every rank
seconds = time.perf_counter() - start
os.write(1, f"{total.item()} {seconds > 1} {os.environ['NETLAB_HOST']} {os.environ['NETLAB_COMMAND']}\\n".encode())
"""


@pytest.mark.skipif(netlab.available() is not None, reason=f"netlab: {netlab.available()}")
def test_ranks_on_hosts_of_their_own() -> None:
    done = subprocess.run(
        [*LAB, "--rate", "20mbit", "--", sys.executable, "-c", REDUCE], capture_output=True, text=True, timeout=120
    )
    expected = [f"3.0 True {host} python benchmarks/netlab.py --rate 20mbit --" for host in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    line = [*LAB, "--rate", "none", "--timeout", "1", "--", sys.executable, "-c", "import time; time.sleep(60)"]
    assert subprocess.run(line, capture_output=True, timeout=50).returncode == netlab.TIMED_OUT


def test_every_line_of_the_package_that_names_cuda_is_classified() -> None:
    """Add new lines to a list in benchmarks/cuda_code.py, with the reason."""
    files = dict(package_files())
    found = {name: lines for name, path in files.items() if (lines := unclassified(name, ast.parse(path.read_text())))}
    assert found == {}
    assert cuda_code.FUNCTIONS.keys() | cuda_code.CONDITIONS.keys() | cuda_code.ON_CPU_AS_WELL.keys() <= files.keys()


# -- common flags, written figures and the list of runs

RUNS = {name: command for group in suite.read_groups().values() for name, command in group.items()}


def _finish(path: Path, *more: str, **figures: float) -> dict[str, Any]:
    harness.finish(figures, harness.parser("").parse_args(["--json", str(path), *more]))
    return json.loads(path.read_text())


def test_figures_are_written_and_required(tmp_path: Path) -> None:
    path, figures = tmp_path / "figures.json", {"speed": 2.5, "gap": 0.1}
    path.write_text("not a result")
    written = _finish(path, "--require", "speed>=2", "--require", "gap <= 0.1", **figures)
    assert written.keys() == {"figures", "measured_on"} and written["figures"] == figures
    assert {"machine", "cores", "torch", "commit"} <= written["measured_on"].keys()
    for demand, code in {
        "gap<=0.09": "1",
        "speed>=3": "1",
        "other<=1": "--require 'other<=1'",
        "gap": "--require 'gap'",
    }.items():
        with pytest.raises(SystemExit) as stopped:
            _finish(path, "--require", demand, **figures)
        assert str(stopped.value.code).startswith(code)


def test_a_result_of_the_repository_remembers_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "EARLIER", 2)
    assert "earlier" not in _finish(tmp_path / "quick.json", gap=1.0)
    for gap in (2.0, 3.0, 4.0):
        written = _finish(tmp_path / "quick.json", gap=gap)
    assert written["figures"] == {"gap": 4.0}
    assert [run["figures"] for run in written["earlier"]] == [{"gap": 3.0}, {"gap": 2.0}], "newest first, no more than that"
    assert "earlier" not in _finish(tmp_path / "other.json", gap=1.0), "each file remembers its own"


# -- the list of runs


def test_every_run_is_of_a_script_with_these_flags() -> None:
    for name, command in RUNS.items():
        known: list[str] = []
        for word in command.split():
            if word.endswith(".py"):
                known = ["--json", "--require", *(BENCHMARKS / word).read_text().split('"')]
            elif word.startswith("--"):
                assert word in known, f"{name}: {word} is no flag of the script before it"


def test_results_are_those_of_the_list() -> None:
    groups = suite.read_groups()
    assert len({*RUNS, *groups}) == len(groups) + sum(map(len, groups.values())), "names are given once"
    for result in (BENCHMARKS / "results").glob("*.json"):
        command = json.loads(result.read_text())["measured_on"]["command"]
        scripts = [word.removeprefix("benchmarks/") for word in command.split() if word.endswith(".py")]
        assert scripts == [word for word in RUNS[result.stem].split() if word.endswith(".py")], result.name
