"""The flags that every benchmark has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import harness


def test_figures_are_written_and_required(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = harness.parser("").parse_args(["--json", str(path), "--require", "speed>=2", "--require", "gap <= 0.1"])
    harness.finish({"speed": 2.5, "gap": 0.1}, options)
    written = json.loads(path.read_text())
    assert written["figures"] == {"speed": 2.5, "gap": 0.1}
    assert {"machine", "cores", "torch", "commit"} <= written["measured_on"].keys()


@pytest.mark.parametrize(
    ("demand", "code"), [("gap<=0.09", 1), ("speed>=3", 1), ("other<=1", "--require 'other<=1'"), ("gap", "--require 'gap'")]
)
def test_falling_short_is_an_error(demand: str, code: int | str) -> None:
    options = harness.parser("").parse_args(["--require", demand])
    with pytest.raises(SystemExit) as stopped:
        harness.finish({"speed": 2.5, "gap": 0.1}, options)
    assert stopped.value.code == code or str(stopped.value.code).startswith(str(code))
