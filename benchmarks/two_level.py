"""Bytes between nodes in a step, in the flat exchange and in two levels: counted in the engine's messages, not timed.

Real ranks on this machine, divided into nodes by their numbers, train on the batches of the overlap benchmark's production
workload. The engine counts the bytes between nodes, including heads of messages. Hot rows together make up ``--hot`` of all
accesses. Their bytes follow from the requests of other nodes to each owner: an id of 4 bytes, two flags, the row, and its
gradient.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
import overlap_variants
import overlap_workload
import torch
import torch.distributed as dist

from lightning_freescale.embeddings.overlap.row_updates import Collisions
from lightning_freescale.testing import run_distributed

EXCHANGES = ("flat", "two_level")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the table (default: 5 million)")
    parser.add_argument("--dim", type=int, default=64, help="width of an embedding (default: 64)")
    parser.add_argument("--batch", type=int, default=32, help="histories per rank and step (default: 32)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hot", type=float, default=0.5, help="share of hot rows in all accesses (default: 0.5)")
    options = parser.parse_args()
    ranks = options.nodes * options.ranks_per_node
    hot = _hot_ids(options, ranks)
    figures = {"hot_rows": float(len(hot))}
    for exchange in EXCHANGES:
        found = run_distributed(_count, ranks, exchange, hot, options, timeout=900)
        names = ("all_bytes", "hot_bytes", "sent_bytes")
        figures |= {f"{exchange}_{name}": float(value) for name, value in zip(names, np.sum(found, axis=0))}
    for name in ("all", "hot"):
        figures[f"{name}_reduction"] = 1 - figures[f"two_level_{name}_bytes"] / figures[f"flat_{name}_bytes"]
    print(f"{options.nodes} nodes of {options.ranks_per_node} ranks, {options.rows} rows of {options.dim} numbers", end=", ")
    print(f"{options.batch} histories per rank; {len(hot)} rows make up {options.hot:.0%} of all accesses")
    print(f"{'MB per step of all ranks':<26}{'all sent':>10}{'between nodes':>15}{'of hot rows':>13}")
    for exchange in EXCHANGES:
        sent, crossed, of_hot = (figures[f"{exchange}_{name}_bytes"] / 1e6 for name in ("sent", "all", "hot"))
        print(f"{exchange:<26}{sent:10.2f}{crossed:15.2f}{of_hot:13.3f}")
    print(f"{'less between nodes':<36}{figures['all_reduction']:15.1%}{figures['hot_reduction']:13.1%}")
    harness.finish(figures, options)


def _hot_ids(options: Any, ranks: int) -> np.ndarray:
    """Return the fewest ids that make up that share of all accesses in these steps."""
    draw = overlap_workload.production(options.rows, options.batch)
    drawn = np.concatenate([draw(step, rank)[0] for step in range(options.steps) for rank in range(ranks)])
    counts = np.bincount(drawn, minlength=options.rows)
    by_count = np.argsort(-counts, kind="stable")
    return by_count[: int(np.searchsorted(counts[by_count].cumsum(), options.hot * len(drawn))) + 1]


def _count(exchange: str, hot: np.ndarray, options: Any) -> tuple[float, float, float]:
    """Return the bytes of this rank per step: to other nodes, for hot rows that it owns, and to all ranks."""
    rank, each = dist.get_rank(), options.ranks_per_node
    draw = overlap_workload.production(options.rows, options.batch)
    batches = overlap_workload.batches(draw, options.steps, rank)
    del draw
    torch.manual_seed(0)
    model = overlap_variants.Recommender(options.rows, options.dim, 0.0)
    variant = overlap_variants.Ours(model, exchange=exchange, ranks_per_node=each)
    layout = variant.engine.collections["items"].local.layout
    start, rows = layout.starts[layout.places[rank]], layout.rows_of(rank)
    is_hot = torch.zeros(rows, dtype=torch.bool)
    mine = layout.keys(0, torch.from_numpy(hot)) - start
    is_hot[mine[(mine >= 0) & (mine < rows)]] = True
    crossed, compare = 0, Collisions.compare

    def compare_and_count(collisions: Collisions, following: Any, current: Any) -> Any:
        nonlocal crossed
        asked = following.requested.incoming
        per_node = len(asked.sizes) // options.nodes
        other = [peer // per_node != rank // each for peer in range(len(asked.sizes))]
        parts = zip(asked.rows.split(asked.sizes), other)
        crossed += sum(int(is_hot[part].sum()) for part, far in parts if far)
        return compare(collisions, following, current)

    Collisions.compare = compare_and_count  # type: ignore[method-assign]
    for _ in variant.steps(batches):
        pass
    sent = variant.sent()
    variant.close()
    per_row = 4 + 2 + 2 * 4 * options.dim
    # the first batch is not compared with one before it
    return sent["cross_node_bytes"] / options.steps, crossed * per_row / (options.steps - 1), sent["bytes"] / options.steps


if __name__ == "__main__":
    main()
