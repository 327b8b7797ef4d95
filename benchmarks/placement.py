"""How evenly the owners of a table are asked for its rows, where the catalogue is sorted by popularity: counted, not timed.

Batches are those of the overlap benchmark's production workload, but item 0 is the most popular one, 1 the next, and so on. The
load of an owner is the rows that all ranks request from it in a step; an imbalance is the largest load over the mean one, and
the mean over steps is reported.
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
    draw = overlap_workload.production(options.rows, options.batch, by_popularity=True)
    orders = {"blocks": RowOrder(options.rows), "hash": RowOrder.hashed(options.rows)}
    figures = {}
    print(f"{options.rows} rows, Zipf {overlap_workload.EXPONENT}, {options.batch} histories per rank, {options.steps} steps")
    print(f"{'ranks':>5}  {'placement':<9}  {'rows, mean':>10}  {'largest':>8}  {'imbalance':>9}  {'without dedup':>13}")
    for ranks in options.ranks:
        steps = [[draw(step, rank)[0] for rank in range(ranks)] for step in range(options.steps)]
        for placement, order in orders.items():
            once = _loads([[np.unique(own) for own in ids] for ids in steps], order)
            every = _loads(steps, order)
            named = {"rows_mean": once.mean(), "rows_largest": once.max(axis=1).mean(), "imbalance": _imbalance(once)}
            named["imbalance_without_dedup"] = _imbalance(every)
            figures |= {f"{placement}_{ranks}_{name}": float(value) for name, value in named.items()}
            mean, largest, imbalance, without = named.values()
            print(f"{ranks:5}  {placement:<9}  {mean:10.0f}  {largest:8.0f}  {imbalance:9.3f}  {without:13.3f}")
    harness.finish(figures, options)


def _loads(steps: list[list[overlap_workload.Ids]], order: RowOrder) -> np.ndarray:
    """Rows that all ranks request from each owner: shape ``[steps, ranks]``."""
    return np.array([overlap_workload.requests(ids, order).sum(axis=0) for ids in steps])


def _imbalance(loads: np.ndarray) -> float:
    return float((loads.max(axis=1) / loads.mean(axis=1)).mean())


if __name__ == "__main__":
    main()
