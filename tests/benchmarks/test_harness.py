"""The flags that every benchmark has, what is written of its figures, and the list of runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import suite

pytestmark = pytest.mark.slow
BENCHMARKS = Path(suite.__file__).parent
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


def test_a_result_names_processor_day_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/benchmarks/balance.py", "--data", "/home/me/ml-1m.npz", "--large"])
    monkeypatch.setenv("NETLAB_COMMAND", "python benchmarks/netlab.py --hosts 4 --")
    found = harness.where()
    alone = "python benchmarks/balance.py --data ml-1m.npz --large"
    assert found["command"] == f"python benchmarks/netlab.py --hosts 4 -- {alone}", "no path of this machine"
    assert found["processor"] and re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])


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
