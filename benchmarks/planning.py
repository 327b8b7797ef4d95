"""Wait of a step for its plan, with and without a thread that makes plans ahead.

A step is a sleep, as if the host started a device and waited for it. The benchmark measures the host's wait for the index list
of the next batch, without reading the data set.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
from lengths import read_lengths

from lightning_freescale.balance import BalancedSampler, CostModel


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", required=True, metavar="PATH", help="lengths: .npz with offsets, or text")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=100.0, help="duration of a step (default: 100)")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    name, lengths = read_lengths(options.data)
    draw = np.random.RandomState(0)
    costs = CostModel.from_config(256)(draw.choice(lengths, 32 * options.ranks * (options.steps + 1)))
    ahead, inline = (BalancedSampler(costs, 32, num_replicas=options.ranks, rank=0) for _ in range(2))
    batches = iter(ahead)
    ways: dict[str, Callable[[int], object]] = {"ahead": lambda _: next(batches), "inline": lambda step: inline.plan(0, step)}
    waits = {way: _waits(plan, options.step_ms / 1000, options.steps) for way, plan in ways.items()}
    print(f"{name}, {options.ranks} ranks x 32, steps of {options.step_ms:g} ms: wait for the next plan, ms")
    figures = {}
    for way, values in waits.items():
        print(f"{way:<8} median {np.median(values):.2f}, 95th percentile {np.percentile(values, 95):.2f}")
        figures[f"{way}_ms"] = float(np.median(values))
    harness.finish(figures, options)


def _waits(plan: Callable[[int], object], seconds: float, steps: int) -> list[float]:
    """Return the milliseconds that each step but the first waits for its plan."""
    waits = []
    for step in range(steps):
        began = time.perf_counter()
        plan(step)
        waits.append(1000 * (time.perf_counter() - began))
        time.sleep(seconds)
    return waits[1:]


if __name__ == "__main__":
    main()
