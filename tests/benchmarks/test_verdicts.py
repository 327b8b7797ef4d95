"""Causes that are planted are found, and what-ifs are held against runs without the cause."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import what_if

from lightning_freescale.testing import run_distributed


def _planted(module: str, *arguments: str) -> int:
    os.environ["LOCAL_RANK"] = "0"  # each rank on a host of its own, as under benchmarks/netlab.py
    import bubbles_overlapped
    import verdicts
    from planted import Planted

    verdicts.EVERYWHERE = {"data loading": Planted(compute=0.02, loader=0.2), "nothing": Planted(compute=0.02, host=0.2)}
    bubbles_overlapped.RUNS = {"slow loader": Planted(compute=0.02, loader=0.2)}
    sys.argv = [module, *arguments, "--settings", "exchange overlapped", "--steps", "6"]
    with pytest.raises(SystemExit) as stopped:
        {"verdicts": verdicts, "bubbles_overlapped": bubbles_overlapped}[module].main()
    return int(stopped.value.code or 0)


@pytest.mark.slow
def test_verdicts_are_right_or_wrong(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert run_distributed(_planted, 2, "verdicts", "--json", str(path), "--require", "wrong<=0") == [1, 1]
    figures = json.loads(path.read_text())["figures"]
    assert figures["right"] >= 1 and figures["wrong"] >= 1, "a slow loader, and a slow hook that was said to be nothing"


@pytest.mark.slow
def test_what_was_planted_under_overlap_is_found(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert run_distributed(_planted, 2, "bubbles_overlapped", "--json", str(path)) == [0, 0]
    assert 0 < json.loads(path.read_text())["figures"]["worst_part"] < 1


def test_what_ifs_are_held_against_runs_without_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"no data wait": 2.0, "perfect balance": 1.25, "no host overhead": 1.0, "full overlap": 1.6}
    steps = {"as it is": 0.4, "no data wait": 0.2, "perfect balance": 0.32, "no host overhead": 0.4, "starved": 0.4}
    steps |= {f"behind a worker: {run}": steps[run] for run in what_if.BEHIND} | {"behind a worker": 0.4}
    steps["starved: no data wait"] = 0.1  # 4 times as fast, where 2 was predicted
    slow = [{"setting": "ddp", "run": run, "step_s": step, "what_if": cases} for run, step in steps.items()]
    figures = what_if._figures(slow, [{"setting": "ddp", "run": "as it is", "step_s": 0.25}])
    assert (figures["combinations"], figures["within_5_percent"]) == (8, 7)
    assert figures["worst"] == figures["ddp_no_data_wait_starved_off"] == pytest.approx(0.5)
    assert "7 of 8 within 5 %" in capsys.readouterr().out
