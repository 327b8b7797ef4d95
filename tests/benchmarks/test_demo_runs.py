"""The demo's figures are those of the reports that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import demo_runs
import pytest


def test_figures_by_hand(tmp_path: Path) -> None:
    parts = {"data_wait": 0.01, "transfer": 0.04, "host_overhead": 0.02}
    for rung, waits in zip(demo_runs.RUNGS, (0.33, 0.13, 0.12, 0.11)):
        bubble = waits + 0.07
        summary = {"bubble": bubble, "limit": 1 / (1 - bubble), "step_s": 0.1, "shares": parts | {"straggler_wait": waits}}
        (tmp_path / rung).mkdir()
        (tmp_path / rung / "report.json").write_text(json.dumps({"summary": summary}))
    figures = demo_runs.figures_of(tmp_path)
    assert figures["limit"] == pytest.approx(1 / 0.6) and figures["plain_at_equal_compute"] == 1
    assert figures["balance_at_equal_compute"] == pytest.approx(0.8 / 0.6)
    assert figures["split_backward_straggler_wait"] == 0.11 and figures["overlap_ms"] == pytest.approx(100)
