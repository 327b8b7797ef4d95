"""The flags that every benchmark has, and what is written of its figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import harness
import pytest


def test_figures_are_written_and_required(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = harness.parser("").parse_args(["--json", str(path), "--require", "speed>=2", "--require", "gap <= 0.1"])
    harness.finish({"speed": 2.5, "gap": 0.1}, options)
    written = json.loads(path.read_text())
    assert written["figures"] == {"speed": 2.5, "gap": 0.1}
    assert {"machine", "cores", "torch", "commit"} <= written["measured_on"].keys()


def _finish(path: Path, **figures: float) -> dict[str, Any]:
    harness.finish(figures, harness.parser("").parse_args(["--json", str(path)]))
    return json.loads(path.read_text())


def test_a_result_of_the_repository_remembers_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "EARLIER", 2)
    assert "earlier" not in _finish(tmp_path / "quick.json", gap=1.0)
    for gap in (2.0, 3.0, 4.0):
        written = _finish(tmp_path / "quick.json", gap=gap)
    assert written["figures"] == {"gap": 4.0}
    assert [run["figures"] for run in written["earlier"]] == [{"gap": 3.0}, {"gap": 2.0}], "newest first, no more than that"
    assert all(run.keys() == {"commit", "date", "processor", "command", "figures"} for run in written["earlier"])
    assert "earlier" not in _finish(tmp_path / "other.json", gap=1.0), "each file remembers its own"


def test_a_file_elsewhere_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("not a result")
    assert _finish(path, gap=1.0).keys() == _finish(path, gap=2.0).keys() == {"figures", "measured_on"}


def test_a_result_names_processor_day_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/benchmarks/balance.py", "--data", "/home/me/ml-1m.npz", "--large"])
    monkeypatch.delenv("NETLAB_COMMAND", raising=False)
    alone = harness.where()
    assert alone["command"] == "python benchmarks/balance.py --data ml-1m.npz --large", "no path of this machine"
    assert alone["processor"] and re.fullmatch(r"\d{4}-\d\d-\d\d", alone["date"])
    monkeypatch.setenv("NETLAB_COMMAND", "python benchmarks/netlab.py --hosts 4 --")
    assert harness.where()["command"] == "python benchmarks/netlab.py --hosts 4 -- " + alone["command"]


@pytest.mark.parametrize(
    ("demand", "code"), [("gap<=0.09", 1), ("speed>=3", 1), ("other<=1", "--require 'other<=1'"), ("gap", "--require 'gap'")]
)
def test_falling_short_is_an_error(demand: str, code: int | str) -> None:
    options = harness.parser("").parse_args(["--require", demand])
    with pytest.raises(SystemExit) as stopped:
        harness.finish({"speed": 2.5, "gap": 0.1}, options)
    assert stopped.value.code == code or str(stopped.value.code).startswith(str(code))
