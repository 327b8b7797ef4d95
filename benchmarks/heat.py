"""Predictions from access frequencies of rows: collisions, and bytes of the route of hot rows. Counted, not timed.

Batches are drawn at random: Zipf-distributed ids as in the overlap benchmark, or histories of the data sets in ``--data``. A
row is counted once per rank and batch. Each figure is a mean over the steps after ``--warm-up``.

- **Collisions.** A row of a batch collides if the batch before has it on any rank. A threshold takes all rows for colliding
  that occurred in at least a share of the steps so far, by a count that decays by half in 50 steps. It *finds* a share of the
  colliding rows. For exact results a step waits for the rows that the threshold takes, and for those that it misses.
- **Routes.** Rows that at least ``threshold`` ranks of a node request, if any does, go through a proxy; with 0, all rows do.
  The rows sent between nodes, and in all, are divided by those without proxies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))

import harness
import overlap_workload
from numpy.typing import NDArray

Rows = NDArray[np.int64]
SHARES = (0.25, 0.5, 0.75)
THRESHOLDS = (0.0, 1.0, 1.1, 1.125, 1.25, 1.5, 2.0)
HALF_LIFE = 50


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, action="append", default=[], help="histories, .npz or .txt.gz; may be repeated")
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the Zipf-distributed table (default: 5 million)")
    parser.add_argument("--batch", type=int, default=32, help="histories per rank and step (default: 32)")
    parser.add_argument("--shapes", nargs="+", default=["2x4", "8x8"], help="nodes x ranks per node (default: 2x4 8x8)")
    parser.add_argument("--warm-up", type=int, default=150, help="steps (default: 150)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default: 20)")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    draws = {"zipf": (options.rows, _zipf(options.rows, options.batch))}
    draws |= {path.name.partition(".")[0]: _histories(path, options.batch) for path in options.data}
    for shape in options.shapes:
        nodes, each = (int(size) for size in shape.split("x"))
        for name, (rows, draw) in draws.items():
            found = _measure(rows, draw, nodes, each, options.warm_up, options.steps)
            figures |= {f"{name}_{shape}_{key}": value for key, value in found.items()}
            _show(f"{name}, {nodes} nodes of {each} ranks", found)
    harness.finish(figures, options)


def _zipf(rows: int, batch: int) -> Callable[[int, int], Rows]:
    draw = overlap_workload.production(rows, batch)
    return lambda step, rank: np.unique(draw(step, rank)[0])


def _histories(path: Path, batch: int) -> tuple[int, Callable[[int, int], Rows]]:
    rows, draw = overlap_workload.histories(path, batch)
    return rows, lambda step, rank: np.unique(draw(step, rank)[0])


def _measure(rows: int, draw: Callable[[int, int], Rows], nodes: int, each: int, warm_up: int, steps: int) -> dict[str, float]:
    owner_node = np.random.default_rng(0).integers(0, nodes, rows)
    occurred, reads, visits = np.zeros((3, rows), np.float32)
    before = np.zeros(rows, bool)
    weight, decay = 0.0, 0.5 ** (1 / HALF_LIFE)
    collided = {share: np.zeros(3) for share in SHARES}
    sent = {threshold: np.zeros(2) for threshold in THRESHOLDS}
    flat, colliding_rows, requested_rows = np.zeros(2), 0, 0
    for step in range(warm_up + steps):
        use = np.zeros((nodes, rows), np.int8)
        for rank in range(nodes * each):
            use[rank // each][draw(step, rank)] += 1
        now = use.any(axis=0)
        if step >= warm_up:
            colliding = now & before
            colliding_rows, requested_rows = colliding_rows + colliding.sum(), requested_rows + now.sum()
            for share, sums in collided.items():
                taken = now & (occurred >= share * weight)
                sums += [(taken & colliding).sum(), taken.sum(), (taken | colliding).sum()]
            for threshold, sums in sent.items():
                sums += _sent(use, owner_node, _hot(reads, visits, threshold), each)
            flat += _sent(use, owner_node, np.zeros(rows, bool), each)
        occurred, reads, visits, weight = occurred * decay, reads * decay, visits * decay, weight * decay + 1
        occurred += now
        reads += use.sum(axis=0)
        visits += (use > 0).sum(axis=0)
        before = now
    figures: dict[str, Any] = {"collision_rate": colliding_rows / requested_rows}
    for share, (right, taken, waited) in collided.items():
        figures |= {f"found_{share}": right / colliding_rows, f"right_{share}": right / taken}
        figures[f"waited_{share}"] = waited / colliding_rows
    for threshold in THRESHOLDS:
        between, everything = sent[threshold] / flat
        figures |= {f"between_{threshold}": between, f"all_{threshold}": everything}
    return {name: float(value) for name, value in figures.items()}


def _hot(reads: NDArray[np.float32], visits: NDArray[np.float32], threshold: float) -> NDArray[np.bool_]:
    return (reads >= threshold * visits) & ((reads - visits >= 2) | (threshold == 0))


def _sent(use: NDArray[np.int8], owner_node: Rows, hot: NDArray[np.bool_], each: int) -> NDArray[np.float64]:
    """Return the rows sent between nodes, and to other ranks in all, in one direction."""
    between = near = 0
    for node, of_node in enumerate(use):
        far = owner_node != node
        by_proxy = hot & far
        between += int(of_node[far & ~hot].sum(dtype=np.int64)) + int((of_node[by_proxy] > 0).sum())
        near += int(of_node[by_proxy | ~far].sum(dtype=np.int64))
    return np.array([between, between + near * (each - 1) / each])  # ranks of a node are equally likely


def _show(title: str, figures: dict[str, float]) -> None:
    print(f"{title}: {figures['collision_rate']:.1%} of the rows of a global batch collide")
    print(f"{'occurs in a share of steps':<28}{'colliding rows found':>22}{'right':>8}{'waited for / exact':>20}")
    for share in SHARES:
        found, right, waited = (figures[f"{name}_{share}"] for name in ("found", "right", "waited"))
        print(f"{share:<28}{found:22.1%}{right:8.1%}{waited:20.2f}")
    print(f"{'readers per node at least':<28}{'rows between nodes':>22}{'rows in all':>14}")
    for threshold in THRESHOLDS:
        print(f"{threshold:<28}{figures[f'between_{threshold}']:22.3f}{figures[f'all_{threshold}']:14.3f}")


if __name__ == "__main__":
    main()
