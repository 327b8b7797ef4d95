"""Accuracy of the bubble profiler in runs with overlapped exchanges, micro-batches and loader workers.

``python benchmarks/netlab.py --hosts 4 --rate 200mbit -- python benchmarks/bubbles_overlapped.py`` profiles the runs of
``planted.py``. Ranks wait for each other only at the end of backward, in the exchange of dense gradients. The expected parts of
each rank therefore follow from the sleeps. The times of the exchanges are unknown but small. The benchmark prints the
difference between the means of the report and the expectation, as a share of the wall time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import planted
from harness import finish_on_all_ranks, parser
from planted import BATCH, Planted, Samples

from lightning_freescale.balance import BalancedSampler

RUNS = {
    "lengths": Planted(spread=0.5),
    "rank 1 slow": Planted(slow=1.3),
    "slow loader": Planted(loader=0.1),
    "slow hook": Planted(host=0.03),
    "all": Planted(spread=0.5, slow=1.3, loader=0.1, host=0.03),
}


def main() -> None:
    """Run on all ranks."""
    options = _options()
    leads, figures = int(os.environ["RANK"]) == 0, {"worst_part": 0.0}
    for setting in options.settings:
        for name, run in RUNS.items():
            document = planted.profile(setting, run, options.steps)
            if leads:
                off = _off(document, run, options.steps)
                print(f"{setting}, {name}: " + ", ".join(f"{part} {share:.2%}" for part, share in off.items()), flush=True)
                figures["worst_part"] = max(figures["worst_part"], *off.values())
    if leads:
        print(f"largest difference: {figures['worst_part']:.2%} of the wall time")
    finish_on_all_ranks(figures, options)


def _off(document: dict[str, Any], run: Planted, steps: int) -> dict[str, float]:
    """Return the largest difference over the ranks for each part, as a share of the wall time."""
    step, ranks = document["summary"]["step_s"], document["ranks"]
    compute = _compute(run, steps, len(ranks))[document["series"]["step"]]
    truth = {
        "data_wait": np.full(len(ranks), run.loader),
        "forward": compute.mean(axis=0) / 3,
        "backward": compute.mean(axis=0) * 2 / 3,
        "straggler_wait": (compute.max(axis=1, keepdims=True) - compute).mean(axis=0),
        "host_overhead": np.full(len(ranks), run.host),
    }
    found = {part: np.array([rank["shares"][part] for rank in ranks]) * step for part in truth}
    return {part: float(np.abs(found[part] - truth[part]).max() / step) for part in truth}


def _compute(run: Planted, steps: int, world: int) -> np.ndarray:
    """Return the seconds of compute of each step on each rank, shape ``[steps, ranks]``."""
    cost = Samples(run, steps + planted.WARMUP, world).cost
    sampler = BalancedSampler(cost, BATCH, num_replicas=world, rank=0, shuffle=False, balance=False)
    drawn = [[cost[mine].sum() for mine in sampler.plan(0, step)] for step in range(len(sampler))]
    slow = np.where(np.arange(world) == 1, run.slow, 1.0)
    return np.array(drawn) * slow * run.compute / BATCH


def _options() -> Any:
    arguments = parser(__doc__)
    arguments.add_argument("--settings", nargs="+", choices=planted.SETTINGS, default=list(planted.SETTINGS[2:]))
    arguments.add_argument("--steps", type=int, default=30, help="counted steps of a fit (default: 30)")
    planted.be_quiet()
    return arguments.parse_args()


if __name__ == "__main__":
    main()
