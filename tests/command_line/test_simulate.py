"""``freescale simulate`` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import CostModel
from lightning_freescale.command_line.main import main
from lightning_freescale.simulator.quantity import WORDS
from tests.helpers.reports import report_of, step

REQUIRED = ("--ranks", "4,16", "--batch-size", "8")


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, np.random.default_rng(0).lognormal(4, 1, 300).round() + 1)))
    return path


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], lengths: Path) -> Callable[..., str]:
    """What the command prints; of what it refuses, the error."""

    def run(*words: Any, required: tuple[str, ...] = REQUIRED, fails: bool = False) -> str:
        line = ["simulate", "--lengths", lengths, *required, "--steps", 4, "--draws", 2, *words]
        if not fails:
            main([str(word) for word in line])
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in line])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run


def test_a_table_of_all_techniques_and_what_it_rests_on(told: Callable[..., str]) -> None:
    out = told("--compute-ms", "50:100:200")
    assert out.startswith("lengths.txt: 300 samples; lengths: mean ")
    assert "predicted, not measured: 4 steps of 8 histories per rank and step, drawn with replacement from lengths.txt" in out
    for line in ("   16  plain ", "       balance + overlap ", "       + two levels ", "All figures are predicted;"):
        assert f"\n{line}" in out
    known = out[out.index("what this rests on") :]
    assert "compute per item " in known and "us, assumed: --compute-ms" in known and "rows: 10,000,000 of 1024 bytes" in known
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_files_of_it(told: Callable[..., str], tmp_path: Path) -> None:
    files = {kind: tmp_path / f"found.{kind}" for kind in ("json", "png", "html")}
    told("--compute-ms", 100, "--json", files["json"], "--plot", files["png"], "--page", files["html"])
    found = json.loads(files["json"].read_text())
    assert {each["ranks"] for each in found["predicted"]} == {4, 16}
    assert all(each["step"]["word"] == "predicted" for each in found["predicted"])
    assert {each["word"] for each in found["known"].values()} <= set(WORDS)
    assert files["png"].stat().st_size > 10_000 and "<title>Predicted steps</title>" in files["html"].read_text()


def test_techniques_are_added_one_by_one(told: Callable[..., str], tmp_path: Path) -> None:
    out = told("--compute-ms", 100, "--techniques", "overlap,dedup,micro_batches=2", "--json", tmp_path / "found.json")
    names = [each["name"] for each in json.loads((tmp_path / "found.json").read_text())["predicted"]][:4]
    assert names == ["plain", "overlap", "+ dedup", "+ micro_batches=2"] and "balance" not in out
    assert "choose from balance, overlap" in told("--compute-ms", 100, "--techniques", "balanced", fails=True)
    assert "without overlap=True" in told("--compute-ms", 100, "--techniques", "split_backward", fails=True)


def test_what_is_told_takes_the_place_of_what_is_assumed(told: Callable[..., str], tmp_path: Path) -> None:
    network = tmp_path / "network.json"
    network.write_text('{"bandwidth": {"value": 1e9, "word": "measured", "source": "nccl-tests"}, "ranks_per_node": 2}')
    others = ("--host-ms", 3, "--dense-mb", "10:20:40", "--collision-rate", "0.3@8", "--rows", 100000, "--network", network)
    out = told("--compute-ms", 100, "--attention", 0.2, *others)
    for line in (
        "3 ms, assumed: --host-ms",
        "20 (10 - 40) MB, assumed: --dense-mb",
        "1 GB/s, measured: nccl-tests",
        "measured: from a collision rate of 0.300, --collision-rate, at 8 ranks",
        "rows: 100,000 of 1024 bytes for an item; 2 ranks per node",
    ):
        assert line in out


def test_compute_that_a_run_has_measured(told: Callable[..., str], tmp_path: Path) -> None:
    """Every rank's step takes 2 ms, and 30 us for an item: that is what the fit to the report's series finds."""
    rng, report = np.random.default_rng(1), tmp_path / "report.json"
    histories = rng.lognormal(4, 1, (30, 2, 8)).round() + 1
    seconds = 0.002 + CostModel(linear=3e-5, quadratic=2e-8)(histories).sum(axis=2)
    parts = np.array([[step(0.1, forward=each, host_overhead=0.004) for each in ranks] for ranks in seconds])
    made = report_of(parts).document()
    sums = np.stack([np.ones_like(histories), histories, histories**2, 0 * histories], axis=-1).sum(axis=2)
    made["series"]["features"] = sums.tolist()
    report.write_text(json.dumps(made))
    told("--report", report, "--json", tmp_path / "found.json")
    known = json.loads((tmp_path / "found.json").read_text())["known"]
    for name, value in (("linear", 3e-5), ("quadratic", 2e-8), ("base", 0.002)):
        assert known[name]["word"] == "measured" and known[name]["source"] == "report.json", name
        assert known[name]["value"] == pytest.approx(value, rel=0.15), name
    assert known["host"]["word"] == "measured" and known["host"]["value"] == pytest.approx(0.004)
    report.write_text("{")
    assert "report.json is not JSON, or was cut short" in told("--report", report, fails=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "one of the arguments --compute-ms --report is required"),
        (("--compute-ms", "fast"), "'fast' is neither a number >= 0 nor LOW:NUMBER:HIGH"),
        (("--compute-ms", "3:2:1"), "'3:2:1' is neither"),
        (("--compute-ms", 1, "--collision-rate", "0.3"), "as in 0.2@8"),
        (("--compute-ms", 1, "--steps", 1), "'1' is not a whole number >= 2"),
        (("--compute-ms", 1, "--collision-rate", "0.999@4", "--rows", 100000000), "check the number of rows"),
        (("--compute-ms", 1, "--network", "none.json"), "none.json"),
    ],
)
def test_what_is_refused(told: Callable[..., str], words: tuple[Any, ...], said: str) -> None:
    assert said in told(*words, fails=True)
