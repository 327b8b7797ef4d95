"""The part that times a model with and without overlap, as far as it goes without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import part_model
import pytest
from hour_report import Report
from one_rank_fit import Fit

from lightning_freescale.testing import run_distributed


def _main(out: Path) -> int:
    try:
        part_model.main(["--out", str(out), "--quick"])
    except SystemExit as end:
        return int(end.code)
    return -1


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run without a GPU finds."""
    out = tmp_path_factory.mktemp("model")
    assert run_distributed(_main, 1, out) == [0]
    assert {path.name for path in out.iterdir()} == {"part_model.json", "part_model.md"}  # few may be carried off
    return json.loads((out / "part_model.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("model", part_model.MODELS)
def test_ways_take_turns_and_are_compared_in_the_same_round(ran: dict[str, Any], model: str) -> None:
    rounds = [row for row in ran["rows"] if row["model"] == model and "round" in row]
    assert [row["way"] for row in rounds] == ["plain", "overlap", "overlap", "plain"]
    times = {(row["way"], row["round"]): row["step_ms"] for row in rounds}
    ratios = [times["overlap", turn] / times["plain", turn] for turn in range(2)]
    assert ran["figures"][f"{model}_over_plain"] == pytest.approx(sum(ratios) / 2)


@pytest.mark.slow
def test_parts_of_a_step_add_up(ran: dict[str, Any]) -> None:
    rows = [row for row in ran["rows"] if "bubble" in row]
    assert {(row["model"], row["way"]) for row in rows} == {
        (model, way) for model in part_model.MODELS for way in part_model.WAYS
    }
    for row in rows:
        assert 0 < row["bubble"] < 1 and row["bubble"] == pytest.approx(1 - row["compute"])
    assert ran["skipped"] == [{"what": "gpu_idle", "why": "no CUDA device"}]


def test_medians_over_the_rounds(tmp_path: Path) -> None:
    cpu = {"training": 0.5, "engine": 0.0, "others": 0.0}
    plain = [Fit(ms, cpu) for ms in (1.0, 2.0, 4.0)]  # the machine slows down for both
    overlapped = [Fit(ms, cpu, predicted=0.9) for ms in (1.1, 2.0, 3.6)]
    report = Report("model", tmp_path)
    part_model._compare(report, "hstu", {"plain": plain, "overlap": overlapped})
    _, row = report.found()["rows"]
    assert (row["step_ms"], row["low"], row["high"], row["rounds"]) == (2.0, 1.1, 3.6, 3)
    assert (row["over_plain"], row["over_low"], row["over_high"]) == (1.0, 0.9, pytest.approx(1.1))
    assert row["host_busy"] == 0.25 and not report.found()["failed"]


def test_overlap_that_does_not_overlap_fails(tmp_path: Path) -> None:
    cpu = {"training": 0.5, "engine": 0.0, "others": 0.0}
    report = Report("model", tmp_path)
    part_model._compare(report, "hstu", {"plain": [Fit(1.0, cpu)], "overlap": [Fit(1.0, cpu, predicted=0.0)]})
    assert "nothing was overlapped" in report.found()["failed"][0]["error"]
