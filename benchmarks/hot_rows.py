"""Bytes that cross between nodes in a step: without hot rows, with every row hot, and with those that pay off.

Real ranks on this machine, whose numbers alone make them nodes, train on the batches of the overlap benchmark's production
workload. Nothing is timed. The ways are:

flat       hot_rows=0: each rank requests its rows from their owners
two_level  every row is hot: each row of another node takes two hops
auto       hot_rows="auto", with a cost of transfers between nodes of ``--far`` times that within a node, after ``--warm-up``
           steps

Bytes between nodes are the engine's own count, with heads of messages. Those of popular rows, which together make up ``--hot``
of all accesses, follow from the requests of other nodes at each owner: an id of 4 bytes, two flags, the row, and its gradient.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
import overlap_variants
import overlap_workload
import torch
import torch.distributed as dist

from lightning_freescale.embeddings.overlap import hot_route
from lightning_freescale.embeddings.overlap.hot_rows import LinkCosts
from lightning_freescale.embeddings.overlap.row_updates import Collisions
from lightning_freescale.testing import run_distributed

WAYS = ("flat", "two_level", "auto")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the table (default: 5 million)")
    parser.add_argument("--dim", type=int, default=64, help="width of an embedding (default: 64)")
    parser.add_argument("--batch", type=int, default=32, help="histories per rank and step (default: 32)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hot", type=float, default=0.5, help="share of all accesses to popular rows (default: 0.5)")
    parser.add_argument("--far", type=float, default=10, help="cost between nodes / cost within (default: 10)")
    parser.add_argument("--warm-up", type=int, default=200, help="steps before those that count, of auto (default: 200)")
    parser.add_argument("--rerank-every", type=int, default=200, help="steps between two lists of hot rows (default: 200)")
    options = parser.parse_args()
    ranks = options.nodes * options.ranks_per_node
    popular = _popular_ids(options, ranks)
    figures = {"hot_rows": float(len(popular))}
    for way in WAYS:
        found = run_distributed(_count, ranks, way, popular, options, timeout=1800)
        names = ("all_bytes", "hot_bytes", "sent_bytes")
        figures |= {f"{way}_{name}": float(value) for name, value in zip(names, np.sum(found, axis=0))}
    for name in ("all", "hot"):
        flat, two_level, auto = (figures[f"{way}_{name}_bytes"] for way in WAYS)
        figures |= {f"{name}_reduction": 1 - two_level / flat, f"auto_{name}_reduction": 1 - auto / flat}
    figures["auto_share_of_reduction"] = figures["auto_all_reduction"] / figures["all_reduction"]
    figures["auto_more_sent"] = figures["auto_sent_bytes"] / figures["flat_sent_bytes"] - 1
    print(f"{options.nodes} nodes of {options.ranks_per_node} ranks, {options.rows} rows of {options.dim} numbers", end=", ")
    print(f"{options.batch} histories per rank; {len(popular)} rows make up {options.hot:.0%} of all accesses")
    print(f"{'MB per step of all ranks':<26}{'all sent':>10}{'between nodes':>15}{'of popular rows':>17}")
    for way in WAYS:
        sent, crossed, of_popular = (figures[f"{way}_{name}_bytes"] / 1e6 for name in ("sent", "all", "hot"))
        print(f"{way:<26}{sent:10.2f}{crossed:15.2f}{of_popular:17.3f}")
    for way, prefix in (("two_level", ""), ("auto", "auto_")):
        reductions = (figures[f"{prefix}{name}_reduction"] for name in ("all", "hot"))
        print(f"{f'less between nodes, {way}':<36}{next(reductions):15.1%}{next(reductions):17.1%}")
    print("auto keeps {auto_share_of_reduction:.1%} of that, and sends {auto_more_sent:+.1%} in all".format(**figures))
    harness.finish(figures, options)


def _draw(options: Any) -> overlap_workload.Draw:
    return overlap_workload.production(options.rows, options.batch)


def _popular_ids(options: Any, ranks: int) -> np.ndarray:
    """Return the fewest ids that make up that share of all accesses in the steps that count."""
    draw, first = _draw(options), options.warm_up
    drawn = np.concatenate([draw(first + step, rank)[0] for step in range(options.steps) for rank in range(ranks)])
    counts = np.bincount(drawn, minlength=options.rows)
    by_count = np.argsort(-counts, kind="stable")
    return by_count[: int(np.searchsorted(counts[by_count].cumsum(), options.hot * len(drawn))) + 1]


def _count(way: str, popular: np.ndarray, options: Any) -> tuple[float, float, float]:
    """Return the bytes of this rank per step: to other nodes, for popular rows that it owns, and to all ranks."""
    rank, each = dist.get_rank(), options.ranks_per_node
    batches = overlap_workload.batches(_draw(options), options.warm_up + options.steps, rank)
    torch.manual_seed(0)
    model = overlap_variants.Recommender(options.rows, options.dim, 0.0)
    costs = LinkCosts(near_s_per_byte=1e-9, far_s_per_byte=options.far * 1e-9, near_latency_s=0.0)
    changed: Any = overlap_variants.every_row_hot() if way == "two_level" else nullcontext()
    hot_rows: Any = {"flat": 0, "two_level": 1, "auto": "auto"}[way]
    with changed, patch.object(hot_route, "measure_links", lambda *_: costs):
        more = {"rerank_every_n_steps": options.rerank_every, "ranks_per_node": each}
        variant = overlap_variants.Ours(model, hot_rows=hot_rows, **more)
    if way == "auto":
        for _ in variant.steps(batches[: options.warm_up]):
            pass
    layout = variant.engine.collections["items"].local.layout
    start, rows = layout.starts[rank], layout.rows_of(rank)
    is_popular = torch.zeros(rows, dtype=torch.bool)
    mine = layout.keys(0, torch.from_numpy(popular)) - start
    is_popular[mine[(mine >= 0) & (mine < rows)]] = True
    crossed, compare = 0, Collisions.compare

    def compare_and_count(collisions: Collisions, following: Any, current: Any) -> Any:
        nonlocal crossed
        asked = following.requested.incoming
        for peer, part in enumerate(asked.rows.split(asked.sizes)):
            crossed += int(is_popular[part].sum()) * (peer // each != rank // each)
        return compare(collisions, following, current)

    Collisions.compare = compare_and_count
    variant.count_anew()
    for _ in variant.steps(batches[options.warm_up :]):
        pass
    sent = variant.sent()
    variant.close()
    per_row = 4 + 2 + 2 * 4 * options.dim
    # the first batch is not compared with one before it
    return sent["cross_node_bytes"] / options.steps, crossed * per_row / (options.steps - 1), sent["bytes"] / options.steps


if __name__ == "__main__":
    main()
