"""Results of the demo: runs examples/demo.py and reads the figures from the reports of its runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
RUNGS = ("plain", "balance", "overlap", "split_backward")
"""Folders that the demo writes, in the order of its runs; on the slow link they are in ``slow_link``."""
PARTS = ("data_wait", "straggler_wait", "transfer", "host_overhead")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each run (default: 6)")
    options = parser.parse_args()
    with TemporaryDirectory() as out:
        subprocess.run([sys.executable, DEMO, "--epochs", str(options.epochs), "--out", out], check=True)
        figures = {f"here.{name}": value for name, value in figures_of(Path(out)).items()}
        if (Path(out) / "slow_link").exists():  # the demo prints the reason if the machine cannot emulate hosts
            figures |= {f"link.{name}": value for name, value in figures_of(Path(out) / "slow_link").items()}
    harness.finish(figures, options)


def figures_of(folder: Path) -> dict[str, float]:
    """Return bubble, its parts, step and speed-up at equal compute of each run, and the limit."""
    reports = [json.loads((folder / rung / "report.json").read_text()) for rung in RUNGS]
    plain = reports[0]["summary"]
    figures: dict[str, float] = {"limit": plain["limit"]}
    for rung, report in zip(RUNGS, reports):
        found: dict[str, Any] = report["summary"]
        figures[f"{rung}_bubble"] = found["bubble"]
        figures |= {f"{rung}_{part}": found["shares"][part] for part in PARTS}
        figures[f"{rung}_ms"] = found["step_s"] * 1e3
        figures[f"{rung}_at_equal_compute"] = (1 - found["bubble"]) / (1 - plain["bubble"])
    return figures


if __name__ == "__main__":
    main()
