"""Bubbles that each technique removes, one more at a time, end to end through Lightning's Trainer.

``python benchmarks/netlab.py --hosts 8 --rate 25mbit -- python benchmarks/ladder.py --data ml-1m.seqs.npz --compute-ms 1440``

Histories have the lengths of the data set, and their items are Zipf-distributed over ``--rows`` rows. Compute is a sleep by a
cost model of the lengths, ``--compute-ms`` for a mean batch. The rungs take turns in the same processes, each in its own fit:

floor      equal costs on all ranks and no embedding exchange: the time of the loop, DDP and this machine
plain      TorchRec's own exchange under DDP, samples as drawn
balance    the same samples in each step, assigned by cost, at counts up to 25 % apart
overlap    ids are sent ahead, and rows and gradients are sent during compute
dedup      each row once per rank and step
split      the gradients of the dense weights, a share of compute, come last, while those of the rows are sent
window     2 micro-batches, in which the tables do not change
hot-rows   hot rows for several ranks of a host cross the network once; with netlab's ``--ranks-per-host``

Dedup requires lookahead here. No cache replicates hot rows, because their route saves the same bytes exactly. In all overlapped
exchanges, higher lanes have priority.

The bubble b is 1 - compute summed over ranks / (ranks x wall time). Let P, F and X be the time per step without compute of
plain, floor and a rung. The reduction is r = (P - X) / (P - F). The share of the achievable speed-up is the speed-up over
1 / (1 - r b). It is below 100 % if there is a floor, because b contains the floor. Brackets contain the least and the most of
the rounds. The headline is the rung ``split``, named before any run: it has all techniques that work with any loss.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ladder_fits
import numpy as np
import overlap_variants
import planted
import torch
from harness import finish_on_all_ranks, parser
from ladder_fits import ARCHETYPES, RUNGS, Fit
from numpy.typing import NDArray

BY_DEFAULT = tuple(RUNGS)[:-1]
HEADLINE = "split"
PARTS = ("data_wait", "straggler_wait", "transfer", "host_overhead", "unexplained")


def main() -> None:
    """Run on all ranks."""
    options = read_options()
    kind, leads = ARCHETYPES[options.archetype], int(os.environ["RANK"]) == 0
    data = ladder_fits.Histories(kind, options)
    runs: dict[str, list[Fit]] = {name: [] for name in options.rungs}
    for number in range(options.rounds):
        for name in options.rungs:
            runs[name].append(ladder_fits.fit(name, kind, data, options, number))
    figures = _figures(runs)
    if leads:
        _show(figures, options)
    finish_on_all_ranks(figures, options)


def _figures(runs: dict[str, list[Fit]]) -> dict[str, float]:
    """Return the figures of all ranks by rung. Collective."""
    figures: dict[str, float] = {}
    rounds: list[dict[str, float]] = [{} for _ in next(iter(runs.values()))]
    for name, fits in runs.items():
        key, (wall, compute) = _key(name), _mean_over_ranks(fits)
        figures |= summarize(key, wall, compute)
        for each, of_round in zip(rounds, zip(wall, compute)):
            each |= summarize(key, *of_round)
        figures |= {f"{key}_{part}": float(np.mean([fit.shares.get(part, 0.0) for fit in fits])) for part in PARTS}
        rates = [fit.collision_rate for fit in fits if fit.collision_rate is not None]
        if rates:
            figures[f"{key}_collision_rate"] = float(np.mean(rates))
    if {"floor", "plain"} <= set(runs):
        figures["limit"] = 1 / (1 - figures["plain_bubble"])
        for key in (_key(name) for name in runs if name not in ("floor", "plain")):
            figures |= compare(figures, key) | spread([compare(each, key) for each in rounds])
        if HEADLINE in runs:
            figures |= {
                name.replace(HEADLINE, "headline"): value for name, value in figures.items() if name.startswith(HEADLINE)
            }
    return figures


def _key(name: str) -> str:
    return name.replace("-", "_")


def _mean_over_ranks(fits: list[Fit]) -> NDArray[np.float64]:
    """Return seconds of wall and compute, shape ``[2, rounds, steps]``."""
    mean = torch.from_numpy(np.array([[getattr(fit, kind) for fit in fits] for kind in ("wall", "compute")]))
    torch.distributed.all_reduce(mean)
    return np.asarray(mean / torch.distributed.get_world_size())


def summarize(key: str, wall: NDArray[np.float64], compute: NDArray[np.float64]) -> dict[str, float]:
    """Return the figures of a rung from seconds of every step, means over ranks."""
    low, middle, high = np.percentile(1e3 * wall, [25, 50, 75])
    found = {
        "step_ms": 1e3 * wall.mean(),
        "compute_ms": 1e3 * compute.mean(),
        "median_ms": middle,
        "low_ms": low,
        "high_ms": high,
        "lost_ms": 1e3 * (wall - compute).mean(),
        "bubble": 1 - compute.sum() / wall.sum(),
    }
    return {f"{key}_{name}": float(value) for name, value in found.items()}


def compare(figures: dict[str, float], key: str) -> dict[str, float]:
    """Return what a rung has gained over plain: reduction, speed-up, and its share of what the two allow."""
    plain, floor, lost = (figures[f"{name}_lost_ms"] for name in ("plain", "floor", key))
    reduction = (plain - lost) / (plain - floor)
    speed_up = figures["plain_step_ms"] / figures[f"{key}_step_ms"]
    return {
        f"{key}_reduction": reduction,
        f"{key}_reduction_with_floor": 1 - lost / plain,
        f"{key}_speed_up": speed_up,
        f"{key}_of_allowed": speed_up * (1 - reduction * figures["plain_bubble"]),
    }


def spread(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the least and the most of each figure over the rounds."""
    ends = {"least": min, "most": max}
    return {f"{name}_{end}": of(each[name] for each in rounds) for name in rounds[0] for end, of in ends.items()}


def _show(figures: dict[str, float], options: Any) -> None:
    rate, world = os.environ.get("NETLAB_RATE", "unknown rate"), os.environ["WORLD_SIZE"]
    kind = ARCHETYPES[options.archetype]
    source = kind.family or ("ml-latest-small" if options.data is None else options.data.name)
    print(f"{options.archetype}: {world} ranks, links of {rate}, {kind.batch} histories ({source}) per rank and step,")
    print(
        f"{kind.tables} x {options.rows} rows of {kind.dim}, {options.compute_ms:g} ms of compute, {options.rounds} fits each"
    )
    if "limit" in figures:
        waits = ", ".join(f"{part.replace('_', ' ')} {figures[f'plain_{part}']:.1%}" for part in PARTS[:4])
        print(f"the bubble of plain,  b is {figures['plain_bubble']:.1%} ({waits}),")
        print(f"so the speed-up is at most 1 / (1 - b) = {figures['limit']:.2f}x")
    print(f"{'':<11}" + "".join(f"{name:>{_WIDTHS.get(name, 11)}}" for name in _HEAD))
    for name in options.rungs:
        print(_row(name, figures))


_HEAD = ("bubble", "data", "straggler", "transfer", "host", "step ms", "half within", "collide", "r", "speed-up", "of allowed")
_WIDTHS = {"half within": 16, "r": 24, "speed-up": 20}


def _row(name: str, figures: dict[str, float]) -> str:
    key = f"{_key(name)}_"
    of = {figure.removeprefix(key): value for figure, value in figures.items() if figure.startswith(key)}
    shares = "".join(f"{of[part]:>11.1%}" for part in PARTS[:4])
    half = f"{of['low_ms']:.0f} - {of['high_ms']:.0f}"
    title = "+ " * (name not in ("floor", "plain")) + name
    row = f"{title:<11}{of['bubble']:>11.1%}{shares}{of['median_ms']:>11.1f}{half:>16}"
    row += f"{of['collision_rate']:>11.0%}" if "collision_rate" in of else f"{'':>11}"
    if "reduction" in of:
        reduction = f"{of['reduction']:.1%} ({of['reduction_least']:.1%} - {of['reduction_most']:.1%})"
        speed_up = f"{of['speed_up']:.2f} ({of['speed_up_least']:.2f} - {of['speed_up_most']:.2f})"
        row += f"{reduction:>24}{speed_up:>20}{of['of_allowed']:>11.1%}"
    return row


def read_options(words: Sequence[str] | None = None) -> Any:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--rungs", nargs="+", choices=RUNGS, default=list(BY_DEFAULT))
    add("--archetype", choices=ARCHETYPES, default="middle")
    add("--data", type=Path, help="lengths, see lengths.py (default: those of ml-latest-small)")
    add("--compute-ms", type=float, default=240.0, help="sleep of a mean step (default: 240)")
    add("--rows", type=int, default=5_000_000)
    add(
        "--weights-share",
        type=float,
        default=0.15,
        help="share of compute that a split backward does last (default: 0.15)",
    )
    add("--steps", type=int, default=16, help="counted steps of a fit (default: 16)")
    add("--rounds", type=int, default=2)
    options = arguments.parse_args(words)
    planted.be_quiet()
    overlap_variants.weights_share = options.weights_share
    return options


if __name__ == "__main__":
    main()
