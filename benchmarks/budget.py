"""Predicted use of a token budget: how full the steps are, how many there are, and how long ranks wait.

In ``each rank by itself``, each rank fills a batch until the next sample does not fit, as common loaders do. The ranks then
have different orders and different numbers of steps. ``steps apart`` is the share of steps that the last rank has more than the
first one: the other ranks would wait for a collective that never starts. The cost of a sample is that of ``CostModel()``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
from lengths import Floats, read_lengths

from lightning_freescale.balance import BalancedSampler, BalanceReport, Budget, CostModel
from lightning_freescale.balance.global_batches import draw_order

STEPS = 24
"""Steps of an epoch, evenly spread, that are planned."""


def main() -> None:
    """Print a row for every data set, number of ranks and truncation."""
    parser = harness.parser(__doc__)
    parser.add_argument("--data", action="append", required=True, metavar="PATH", help="lengths: .npz with offsets, or text")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--samples", type=int, default=32, help="number of samples of mean length in the budget (default: 32)")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'':38}{'each rank by itself':>26}{'one plan':>30}")
    print(
        f"{'data':<18}{'ranks':>6}{'budget':>8}{'':>6}{'filled':>8}{'imbal.':>8}{'apart':>10}"
        f"{'filled':>9}{'imbal.':>8}{'bound':>8}{'fullest':>9}"
    )
    for path in options.data:
        name, lengths = read_lengths(path)
        for cut in (200, 0):
            kept = np.minimum(lengths, cut) if cut else lengths
            limit = float(np.ceil(max(options.samples * kept.mean(), kept.max())))
            for ranks in options.ranks:
                ours, theirs = _one_plan(kept, ranks, limit), _each_by_itself(kept, ranks, limit)
                title = f"{name}, {f'up to {cut}' if cut else 'all'}"
                print(
                    f"{title:<24}{ranks:>6}{limit:>8.0f}{theirs['filled']:>8.1%}{theirs['imbalance']:>8.3f}"
                    f"{theirs['apart']:>10.1%}{ours['filled']:>9.1%}{ours['imbalance']:>8.3f}{ours['bound']:>8.3f}"
                    f"{ours['fullest']:>9.1%}"
                )
                key = f"{name}_{cut or 'all'}_{ranks}"
                figures |= {f"{key}_{figure}": value for figure, value in ours.items()}
                figures |= {f"{key}_itself_{figure}": value for figure, value in theirs.items()}
    figures["fullest"] = max(value for key, value in figures.items() if key.endswith("_fullest"))
    harness.finish(figures, options)


def _one_plan(lengths: Floats, ranks: int, limit: float) -> dict[str, float]:
    sampler = BalancedSampler(CostModel()(lengths), Budget(limit, lengths), num_replicas=ranks, rank=0)
    plans = [sampler.step_plan(0, int(step)) for step in np.linspace(0, len(sampler) - 1, min(STEPS, len(sampler)))]
    report = BalanceReport.from_steps(plan.balance for plan in plans)
    fullest = max(float(lengths[samples].sum()) for plan in plans for samples in plan.samples_of_ranks)
    assert sampler.batches.fill is not None
    return {
        "filled": sampler.batches.fill,
        "imbalance": report.balanced,
        "bound": report.lower_bound,
        "fullest": fullest / limit,
        "steps": len(sampler),
    }


def _each_by_itself(lengths: Floats, ranks: int, limit: float) -> dict[str, float]:
    """Plan ranks that share a drawn order evenly, up to the step in which the first rank has no batch left."""
    costs, order = CostModel()(lengths), draw_order(len(lengths), 0, 0)
    batches = [_greedy(lengths[order[rank::ranks]], costs[order[rank::ranks]], limit) for rank in range(ranks)]
    counts = [len(each) for each in batches]
    met = np.array([each[: min(counts)] for each in batches])
    filled = lengths.sum() / (ranks * limit * max(counts))
    imbalance = float(met.max(axis=0).sum() / met.mean(axis=0).sum())
    return {"filled": filled, "imbalance": imbalance, "apart": (max(counts) - min(counts)) / max(counts), "steps": max(counts)}


def _greedy(lengths: Floats, costs: Floats, limit: float) -> list[float]:
    """Return the cost of each batch."""
    batches, held = [0.0], 0.0
    for length, cost in zip(lengths.tolist(), costs.tolist()):
        if held + length > limit:
            batches.append(0.0)
            held = 0.0
        batches[-1] += cost
        held += length
    return batches


if __name__ == "__main__":
    main()
