"""Difference between predictions from lengths and the epochs of the sampler, and the duration of ``simulate``.

A prediction draws a few steps and plans some of them, as ``simulate`` does. It is compared with the mean over whole epochs that
are drawn with another seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
from lengths import read_lengths

from lightning_freescale.balance import BalancedSampler, BalanceReport, CostModel
from lightning_freescale.balance.forecast import PLANNED_STEPS, draw_steps, report_plans

SIMULATE = """
import sys, time
from lightning_freescale.command_line.simulate import run
began = time.process_time()  # of one thread: equal to the wall time without other load
run("simulate", sys.argv[1:])
print(time.process_time() - began)
"""
"""A process of its own, so that loading what is compiled counts, as it does for who calls it once."""
SIMULATED_RANKS = "8,64,256"


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", action="append", required=True, metavar="PATH", help="lengths: .npz with offsets, or text")
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32, help="steps of a prediction (default: 32)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs to compare with (default: 8)")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'data':<10}{'ranks':>6}{'steps/epoch':>12}  as drawn: predicted, epochs   balanced: predicted, epochs   off by")
    for path in options.data:
        name, lengths = read_lengths(path)
        costs = CostModel.from_config(256)(lengths)
        for ranks in map(int, options.ranks.split(",")):
            predicted = report_plans(draw_steps(costs, ranks, options.batch_size, steps=options.steps), PLANNED_STEPS)
            epochs = _epochs(costs, ranks, options.batch_size, options.epochs)
            off = abs(predicted.balanced / epochs.balanced - 1)
            row = f"{predicted.unbalanced:>18.3f}{epochs.unbalanced:>9.3f}{predicted.balanced:>21.3f}{epochs.balanced:>9.3f}"
            print(f"{name:<10}{ranks:>6}{epochs.steps // options.epochs:>12}{row}{off:>9.1%}", flush=True)
            figures[f"{name}_{ranks}_off"] = off
        figures[f"{name}_seconds"] = seconds = _simulate_seconds(lengths, options.batch_size)
        spent = f"{seconds:.2f} s of processor time, start of Python and imports aside"
        print(f"{name:<10}simulate --ranks {SIMULATED_RANKS}: {spent}")
    figures["worst_off"] = max(value for key, value in figures.items() if key.endswith("_off"))
    harness.finish(figures, options)


def _epochs(costs: np.ndarray, ranks: int, batch_size: int, epochs: int) -> BalanceReport:
    sampler = BalancedSampler(costs, batch_size, num_replicas=ranks, rank=0, seed=1)
    steps = ((epoch, step) for epoch in range(epochs) for step in range(sampler.steps_per_epoch))
    return BalanceReport.from_steps(sampler.step_plan(*step).balance for step in steps)


def _simulate_seconds(lengths: np.ndarray, batch_size: int) -> float:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.npy"
        np.save(path, lengths)
        asked = ["--lengths", path, "--ranks", SIMULATED_RANKS, "--batch-size", batch_size, "--dim", 256]
        command = [sys.executable, "-c", SIMULATE, *map(str, asked)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(printed.splitlines()[-1])


if __name__ == "__main__":
    main()
