"""How evenly streams of many ranks can be balanced, with and without sending samples: simulated, numpy only.

Every rank reads histories whose lengths are drawn with replacement from a data set. The figures are predicted imbalances: the
sum over steps of the most expensive rank's cost / the sum of the mean rank's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
from lengths import read_lengths
from numpy.typing import NDArray

from lightning_freescale.balance import CostModel, assign
from lightning_freescale.balance.pool import LocalPool

Costs = NDArray[np.float64]


def main() -> None:
    options = _options()
    cost = CostModel(linear=options.linear)(read_lengths(options.data)[1])
    streams = _streams(cost, options)
    read = streams[:, : options.steps]
    as_drawn, samples = read.sum(axis=2).T, _assigned(read)
    unbounded, _, _ = _pooled(streams, options.steps, options.unbounded_pool, None)
    bounded, oldest, seconds = _pooled(streams, options.steps, options.pool_batches, options.max_age)
    means = streams[:, : options.steps + options.pool_batches].mean(axis=(1, 2))
    figures = {
        "as_drawn": _imbalance(as_drawn),
        "none_unbounded": _imbalance(unbounded),
        f"none_age_{options.max_age}": _imbalance(bounded),
        "samples": _imbalance(samples),
        "stream_bound": float(means.max() / means.mean()),
    }
    print(f"{options.ranks} ranks, {options.batch_size} samples each, {options.steps} steps of {options.data.name}; predicted")
    print(f"{'as read':<58}{figures['as_drawn']:.4f}")
    print(f"{f'own pool of {options.unbounded_pool} batches, no age bound':<58}{figures['none_unbounded']:.4f}")
    bound = f"own pool of {options.pool_batches} batches, age bound {options.max_age} (oldest {oldest})"
    print(f"{bound:<58}{figures[f'none_age_{options.max_age}']:.4f}")
    print(f"{'samples sent to the rank that computes them':<58}{figures['samples']:.4f}")
    print(f"{'cost of the most expensive stream / mean, up to here':<58}{figures['stream_bound']:.4f}")
    print(f"choosing a batch takes {1000 * seconds:.2f} ms")
    harness.finish(figures, options)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help=".npz with offsets, or text: a user and the items per line")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pool-batches", type=int, default=8)
    parser.add_argument("--max-age", type=int, default=32)
    parser.add_argument("--unbounded-pool", type=int, default=32, help="batches of the pool without an age bound")
    parser.add_argument("--linear", type=float, default=1280.0, help="cost of a history: linear * length + length**2")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _streams(cost: Costs, options: argparse.Namespace) -> Costs:
    """What each rank reads, shape ``[ranks, batches, batch_size]``."""
    batches = options.steps + max(options.pool_batches, options.unbounded_pool)
    return np.random.RandomState(options.seed).choice(cost, (options.ranks, batches, options.batch_size))


def _pooled(streams: Costs, steps: int, pool_batches: int, max_age: int | None) -> tuple[Costs, int, float]:
    """Costs of shape ``[steps, ranks]``, the greatest age, and seconds per batch."""
    from time import perf_counter

    ranks, _, size = streams.shape
    pools = [LocalPool(size, pool_batches, max_age) for _ in range(ranks)]
    for pool, stream in zip(pools, streams):
        pool.add_samples(stream[:pool_batches].ravel())
    costs, oldest, seconds = np.empty((steps, ranks)), 0, 0.0
    for step in range(steps):
        target = streams[:, : step + pool_batches].mean() * size  # what is known to all
        oldest = max(oldest, *(pool.oldest for pool in pools))
        started = perf_counter()
        for rank, pool in enumerate(pools):
            costs[step, rank] = streams[rank].ravel()[pool.next_batch(target)].sum()
        seconds += perf_counter() - started
        for pool, stream in zip(pools, streams):
            pool.add_samples(stream[step + pool_batches])
    return costs, oldest, seconds / (steps * ranks)


def _assigned(read: Costs) -> Costs:
    """Costs of shape ``[steps, ranks]`` if the samples of a step may go to any rank."""
    ranks = len(read)
    batches = [read[:, step].ravel() for step in range(read.shape[1])]
    return np.array([np.bincount(assign(batch, ranks).rank_of_sample, batch, ranks) for batch in batches])


def _imbalance(costs: Costs) -> float:
    return float(costs.max(axis=1).sum() / costs.mean(axis=1).sum())


if __name__ == "__main__":
    main()
