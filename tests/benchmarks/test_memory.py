"""Benchmarks of time and memory: reading interactions, checkpoints, a long run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import harness
import interactions
import numpy as np
import pytest


@pytest.mark.slow
def test_reading_interactions_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "figures.json"
    flags = ["--rows", "500", "--cases", "table_sort", "dat", "--json", str(written), "--require", "dat_seconds<=100"]
    monkeypatch.setattr(sys, "argv", ["interactions.py", *flags])
    interactions.main()
    figures = json.loads(written.read_text())["figures"]
    names = {f"{case}_{name}" for case in ("table_sort", "dat") for name in ("seconds", "processor_seconds", "peak_ratio")}
    assert figures.keys() == names and all(np.isfinite(list(figures.values())))


def test_memory_of_checkpoints_is_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    bounds = [f"--require=sharded_{name}_rank0_shards<=30" for name in ("save", "load")]  # chunks of 16 MB on shards of 4
    command = ["--megabytes=8", "--kinds", "sharded", f"--folder={tmp_path}", f"--json={figures}", *bounds]
    subprocess.run([sys.executable, Path(harness.__file__).parent / "checkpoints.py", *command], check=True, timeout=240)
    found = json.loads(figures.read_text())["figures"]
    assert found["sharded_consolidate_tables"] > 0 and found["sharded_wait_per_copy"] > 0


def test_a_long_run_is_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = ["--steps=40", "--every=10", f"--json={figures}", "--require=threads_per_thousand_steps<=1"]
    subprocess.run([sys.executable, Path(harness.__file__).parent / "soak.py", *command], check=True, timeout=240, cwd=tmp_path)
    assert "rss_mb_per_thousand_steps" in json.loads(figures.read_text())["figures"]
