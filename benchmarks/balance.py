"""Our assignment against those of others: predicted imbalance, distance to the lower bound, runtime.

Every figure is of the same global batches of 32 samples per rank, each drawn anew from the users (with replacement where there
are too few). A sample of length L costs L**2 + 1280 L, an HSTU block of width 256. Imbalances are means over the batches
weighted by cost (sum of max / sum of mean); runtimes are medians, taken in turns. With ``--peers`` the others are their own
published code (``fetch_peers.py`` fetches it). "HF" is made for padded batches, and scored here on jagged ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
from contest import OURS, PER_RANK, Contest, Floats
from lengths import SYNTHETIC, draw_lengths, read_lengths
from peers import Peer, load_peers

from lightning_freescale.balance.assign import COUNT_SLACK

LARGE, WORTH_SEARCHING = 1024, 0.002
QUICK = ("verl", "nvidia")
"""The peers that take part with the large number of ranks; the others need seconds there."""
ROWS = {
    "random": "random",
    "zigzag": "zig-zag",
    "verl": "verl, equal counts",
    "nvidia": "NVIDIA, the same",
    "nvidia_free": "NVIDIA, any counts",
    "hf": "HF batch_rebalance",
    "fixed": "ours, fixed",
    "fixed_bound": "  lower bound",
    "slack": f"ours, slack {COUNT_SLACK:.0%}",
    "free": "ours, free",
    "slack_bound": "  lower bound",
    "dominated": "dominated steps",
    "fixed_over_verl": "time: fixed / verl's",
}


def main() -> None:
    options = _options()
    figures: dict[str, float] = {}
    sizes = [*options.ranks, *([LARGE] if options.large else [])]
    peers = load_peers(options.peers) if options.peers else {}
    data = dict(read_lengths(path) for path in options.data)
    for name in [*data, *options.families]:
        columns = {
            ranks: _run(_batches(name, data.get(name), ranks, options.batches), ranks, peers, options) for ranks in sizes
        }
        print(f"{name}: {_described(data.get(name))}; predicted imbalance, ms")
        print(_table(columns, options) + "\n", flush=True)
        figures |= {f"{name}_{ranks}_{key}": value for ranks, column in columns.items() for key, value in column.items()}
    harness.finish(figures, options)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, action="append", default=[], help=".npz with offsets, or text: user and items per line (.gz)")
    add("--families", nargs="+", choices=SYNTHETIC, default=[], help="also plan drawn lengths")
    add("--ranks", type=int, nargs="+", default=[8, 64, 256])
    add("--batches", type=int, default=20, help="number of global batches")
    add("--large", action="store_true", help=f"{LARGE} ranks too, with {' and '.join(QUICK)} of the peers")
    add("--peers", type=Path, metavar="FOLDER", help="folder that fetch_peers.py created")
    add("--search", type=float, default=0, metavar="SECONDS", help="search for a better plan if ours is above the bound")
    options = parser.parse_args()
    if not (options.data or options.families):
        parser.error("no lengths: pass --data FILE or --families NAME")
    return options


def _run(batches: list[Floats], ranks: int, peers: dict[str, Peer], options: argparse.Namespace) -> dict[str, float]:
    """Figures of one number of ranks."""
    large = ranks == LARGE and options.large
    contest = Contest(ranks, {name: peer for name, peer in peers.items() if name in QUICK or not large})
    for batch in batches:
        contest.play(batch)
    return contest.figures() | (_searched(contest, options.search) if options.search else {})


def _batches(name: str, lengths: Floats | None, ranks: int, count: int) -> list[Floats]:
    """Lengths of each global batch, shape ``[samples]``."""
    samples = ranks * PER_RANK
    if lengths is None:
        return [draw_lengths(name, np.random.default_rng([batch, ranks]), samples) for batch in range(count)]
    draw = np.random.RandomState(0)
    return [lengths[draw.choice(len(lengths), samples, replace=samples > len(lengths))] for _ in range(count)]


def _described(lengths: Floats | None) -> str:
    return "drawn" if lengths is None else f"{len(lengths)} users, mean length {lengths.mean():.1f}, max {lengths.max():g}"


def _searched(contest: Contest, seconds: float) -> dict[str, float]:
    """Ours / the best that a long search finds, on the batch with the largest gap of each mode."""
    from long_search import search

    most = {"fixed": PER_RANK, "slack": int(PER_RANK * (1 + COUNT_SLACK)), "free": contest.ranks * PER_RANK}
    found = {}
    for mode, (plan, cost) in contest.worst.items():
        if plan.gap > WORTH_SEARCHING:
            limits = PER_RANK if mode == "fixed" else 1, most[mode]
            best = search(cost, plan.rank_of_sample, contest.ranks, limits, plan.lower_bound, seconds)
            found[f"{mode}_over_best"] = plan.imbalance / best
            print(
                f"{contest.ranks} ranks, {mode}: gap {plan.gap:.2%}, ours / best of {seconds:g} s {plan.imbalance / best:.4f}"
            )
    return found


def _table(columns: dict[int, dict[str, float]], options: argparse.Namespace) -> str:
    lines = [f"{'ranks':20}" + "".join(f"{ranks:>26}" for ranks in columns)]
    lines += [f"{title:20}" + "".join(_cell(column, name) for column in columns.values()) for name, title in ROWS.items()]
    gaps = ", ".join(f"{mode} {max(column[f'{mode}_gap'] for column in columns.values()) - 1:.2%}" for mode in OURS)
    return "\n".join(lines) + f"\n{options.batches} global batches. Largest gap to the lower bound: {gaps}"


def _cell(column: dict[str, float], name: str) -> str:
    if name not in column:
        return f"{'-':>26}"
    if name == "dominated":
        return f"{column[name]:10.0%}{'':16}"
    if name.endswith("_over_verl"):
        return f"{column[name]:26.2f}"
    taken = f"{column[f'{name}_ms']:.2f}" if f"{name}_ms" in column else ""
    return f"{column[name]:10.4f}{taken:>16}"


if __name__ == "__main__":
    main()
