"""Distribution of requests over the owners of a table whose catalogue is sorted by popularity: counted, not timed.

Batches are those of the overlap benchmark's production workload, but item 0 is the most popular one, 1 the next, and so on. The
load of an owner is the number of rows that all ranks request from it in a step. An imbalance is the largest load over the mean
load. The figures are means over steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent))

import harness
import overlap_workload

from lightning_freescale.embeddings.row_order import RowOrder


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the table (default: 5 million)")
    parser.add_argument("--batch", type=int, default=32, help="histories per rank and step (default: 32)")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    rows = options.rows
    draws = [overlap_workload.production(rows, options.batch, by_popularity) for by_popularity in (True, False)]
    ways = {
        "blocks": (draws[0], RowOrder(rows)),
        "hash": (draws[0], RowOrder.hashed(rows)),
        "shuffled": (draws[1], RowOrder(rows)),  # blocks of a catalogue without order, for comparison
    }
    figures = {}
    print(f"{rows} rows, Zipf {overlap_workload.EXPONENT}, {options.batch} histories per rank, {options.steps} steps")
    print(f"{'ranks':>5}  {'placement':<9}  {'rows, mean':>10}  {'largest':>8}  {'imbalance':>9}  {'without dedup':>13}")
    for ranks in options.ranks:
        for name, (draw, order) in ways.items():
            steps = [[draw(step, rank)[0] for rank in range(ranks)] for step in range(options.steps)]
            once = _loads([[np.unique(own) for own in ids] for ids in steps], order)
            found = [once.mean(), once.max(axis=1).mean(), _imbalance(once), _imbalance(_loads(steps, order))]
            named = zip(("rows_mean", "rows_largest", "imbalance", "imbalance_without_dedup"), found)
            figures |= {f"{name}_{ranks}_{each}": float(value) for each, value in named}
            print(f"{ranks:5}  {name:<9}  {found[0]:10.0f}  {found[1]:8.0f}  {found[2]:9.3f}  {found[3]:13.3f}")
    harness.finish(figures, options)


def _loads(steps: list[list[overlap_workload.Ids]], order: RowOrder) -> np.ndarray:
    """Return the rows that all ranks request from each owner, shape ``[steps, ranks]``."""
    return np.array([overlap_workload.requests(ids, order).sum(axis=0) for ids in steps])


def _imbalance(loads: np.ndarray) -> float:
    return float((loads.max(axis=1) / loads.mean(axis=1)).mean())


if __name__ == "__main__":
    main()
