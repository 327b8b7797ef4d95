"""Our assignment against those of others on real history lengths: predicted imbalance, distance to the lower bound, runtime.

Every figure is of the same global batches of 32 samples per rank, each drawn anew from the users (with replacement where there
are too few). A sample of length L costs L**2 + 1280 L, an HSTU block of width 256. Imbalances are means over the batches
weighted by cost (sum of max / sum of mean); runtimes are medians, taken in turns. "HF contiguous" is made for padded batches,
and scored here on jagged ones. Runtimes of the others are those of our versions of their algorithms.
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
from contest import OURS, PER_RANK, SLACK, Contest, Floats
from lengths import read_lengths

from lightning_freescale.balance.solver import swaps

LARGE, WORTH_SEARCHING = 1024, 0.002
ROWS = {
    "random": "random",
    "zigzag": "zig-zag",
    "kk": "KK, equal counts",
    "hf": "HF contiguous",
    "fixed": "ours, fixed",
    "fixed_bound": "  lower bound",
    "slack": f"ours, slack {SLACK:.0%}",
    "free": "ours, free",
    "slack_bound": "  lower bound",
    "dominated": "dominated steps",
}


def main() -> None:
    options = _options()
    figures: dict[str, float] = {}
    for path in options.data:
        name, lengths = read_lengths(path)
        columns = {ranks: _run(lengths, ranks, options) for ranks in [*options.ranks, *([LARGE] if options.large else [])]}
        print(f"{name}: {len(lengths)} users, mean length {lengths.mean():.1f}, max {lengths.max():g}; predicted imbalance, ms")
        print(_table(columns, options) + "\n", flush=True)
        figures |= {f"{name}_{ranks}_{key}": value for ranks, column in columns.items() for key, value in column.items()}
    harness.finish(figures, options)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, action="append", required=True, help=".npz with offsets, or text: user and items per line (.gz)")
    add("--ranks", type=int, nargs="+", default=[8, 64, 256])
    add("--batches", type=int, default=20, help="global batches")
    add("--compiled", choices=["on", "off", "both"], default="both", help="our solver with numba, without, or in turns")
    add("--large", action="store_true", help=f"ours on {LARGE} ranks, too")
    add("--search", type=float, default=0, metavar="SECONDS", help="look for a better plan where ours is above the bound")
    options = parser.parse_args()
    if options.compiled != "off" and not swaps.numba_enabled:
        parser.error(f"--compiled {options.compiled} needs numba: pip install 'lightning-freescale[fast]', or --compiled off")
    return options


def _run(lengths: Floats, ranks: int, options: argparse.Namespace) -> dict[str, float]:
    """Figures of one number of ranks."""
    solvers = {"off": [False], "on": [True], "both": [False, True]}[options.compiled]
    contest = Contest(ranks, solvers, with_peers=ranks != LARGE or not options.large)
    for batch in _batches(lengths, ranks, options.batches):
        contest.play(batch)
    return contest.figures() | (_searched(contest, options.search) if options.search else {})


def _batches(lengths: Floats, ranks: int, count: int) -> list[Floats]:
    """Lengths of each global batch, shape ``[samples]``."""
    draw, samples = np.random.RandomState(0), ranks * PER_RANK
    return [lengths[draw.choice(len(lengths), samples, replace=samples > len(lengths))] for _ in range(count)]


def _searched(contest: Contest, seconds: float) -> dict[str, float]:
    """Ours / the best that a long search finds, on the batch with the largest gap of each mode."""
    from long_search import search

    most = {"fixed": PER_RANK, "slack": int(PER_RANK * (1 + SLACK)), "free": contest.ranks * PER_RANK}
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
    both = "ms without / with numba (used from 2048 samples on). " if options.compiled == "both" else ""
    return "\n".join(lines) + f"\n{options.batches} global batches. {both}Largest gap to the lower bound: {gaps}"


def _cell(column: dict[str, float], name: str) -> str:
    if name not in column:
        return f"{'-':>26}"
    if name == "dominated":
        return f"{column[name]:10.0%}{'':16}"
    times = [f"{column[key]:.2f}" for key in (f"{name}_ms", f"{name}_compiled_ms") if key in column]
    return f"{column[name]:10.4f}{' / '.join(times):>16}"


if __name__ == "__main__":
    main()
