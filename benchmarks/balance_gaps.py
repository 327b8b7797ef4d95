"""How far every single plan of ours may be from the best: families of lengths x ranks x samples per rank x cost x mode.

A plan's gap is its imbalance over the lower bound that comes with it (``Assignment.gap``), less 1. Real data sets are drawn
from without replacement, so the sizes that they cannot fill are left out, and counted. Each batch is a *case*, as in
``short/8x32/square/fixed/17`` (family, ranks x samples per rank, cost, mode, seed): ``--case`` plans it again, and
``case_costs`` returns what its samples cost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
from lengths import SYNTHETIC, Floats, draw_lengths, read_lengths

from lightning_freescale.balance import Assignment, CostModel, assign

COSTS = {
    "linear": CostModel(linear=1.0, quadratic=0.0),
    "square": CostModel(linear=0.0, quadratic=1.0),
    "mixed": CostModel(linear=5.0 * 256, quadratic=1.0),
}
MODES, SLACK = ("fixed", "slack", "free"), 0.25
RANKS, PER_RANK = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), (8, 32, 128)
QUICK_RANKS, QUICK_BATCHES = (2, 8, 64, 256), 2
LIMIT = 0.001
"""No plan's gap should be larger."""


class Case(NamedTuple):
    """One batch and how it is to be shared out."""

    family: str
    ranks: int
    per_rank: int
    cost: str
    mode: str
    seed: int

    def __str__(self) -> str:
        return f"{self.family}/{self.ranks}x{self.per_rank}/{self.cost}/{self.mode}/{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Case:
        family, size, cost, mode, seed = text.split("/")
        ranks, per_rank = size.split("x")
        return cls(family, int(ranks), int(per_rank), cost, mode, int(seed))


class Result(NamedTuple):
    """What became of a case: gap to the certificate, and the milliseconds it took."""

    case: Case
    gap: float
    ms: float


def case_costs(case: Case, data: dict[str, Floats]) -> Floats:
    """What the samples of a case cost, shape ``[samples]``; ``data`` has the lengths of the real data sets by name."""
    draw, samples = np.random.default_rng([case.seed, case.ranks, case.per_rank]), case.ranks * case.per_rank
    if case.family in SYNTHETIC:
        lengths = draw_lengths(case.family, draw, samples)
    else:
        lengths = draw.choice(data[case.family], samples, replace=False)
    return COSTS[case.cost](lengths)


def plan(case: Case, costs: Floats) -> Assignment:
    """Ours."""
    return assign(costs, case.ranks, assignment_mode=case.mode, count_slack=SLACK)


def main() -> None:
    options = _options()
    data = dict(read_lengths(path) for path in options.data)
    unknown = [name for name in options.families or [] if name not in data.keys() | SYNTHETIC.keys()]
    if unknown:
        sys.exit(f"--families {' '.join(unknown)}: choose of {', '.join([*data, *SYNTHETIC])}")
    cases = options.case or list(_grid(options, data))
    results = [_planned(case, data) for case in cases]
    left_out = 0 if options.case else _left_out(options, data)
    print(_table("family", results, lambda case: case.family))
    by_size = sorted(results, key=lambda result: (result.case.ranks, result.case.per_rank))
    print("\n" + _table("size", by_size, lambda case: f"{case.ranks} x {case.per_rank}"))
    print("\n" + _table("cost", results, lambda case: case.cost))
    if left_out:
        print(f"\n{left_out} sizes left out: the data set has fewer users")
    above = sorted((result for result in results if result.gap > LIMIT), key=lambda result: -result.gap)
    for result in results if options.case else above[: options.worst]:
        print(f"{result.gap:9.4%}  {result.case}")
    figures = _figures(results) | {"sizes_left_out": left_out}
    harness.finish(figures, options)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, action="append", default=[], help="as benchmarks/balance.py takes it; also .csv, a user first")
    add("--families", nargs="+", metavar="NAME", help=f"some of the data and {', '.join(SYNTHETIC)}; all if not given")
    add("--ranks", type=int, nargs="+", help=f"default {' '.join(map(str, RANKS))}")
    add("--per-rank", type=int, nargs="+", default=PER_RANK, help=f"default {' '.join(map(str, PER_RANK))}")
    add("--costs", nargs="+", choices=COSTS, default=list(COSTS))
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--batches", type=int, help="of each size, default 5")
    add("--seed", type=int, default=0, help="of the first batch")
    add("--quick", action="store_true", help=f"ranks {' '.join(map(str, QUICK_RANKS))}, {QUICK_BATCHES} batches")
    add("--worst", type=int, default=0, metavar="N", help="name the N worst of the cases above the limit")
    add("--case", type=Case.parse, nargs="+", help="these alone, as --worst names them")
    options = parser.parse_args()
    options.ranks = options.ranks or (QUICK_RANKS if options.quick else RANKS)
    options.batches = options.batches or (QUICK_BATCHES if options.quick else 5)
    return options


def _grid(options: argparse.Namespace, data: dict[str, Floats]) -> Iterator[Case]:
    for family, ranks, per_rank in _sizes(options, data):
        if _fills(data, family, ranks * per_rank):
            for seed in range(options.seed, options.seed + options.batches):
                for cost in options.costs:
                    yield from (Case(family, ranks, per_rank, cost, mode, seed) for mode in options.modes)


def _left_out(options: argparse.Namespace, data: dict[str, Floats]) -> int:
    return sum(not _fills(data, family, ranks * per_rank) for family, ranks, per_rank in _sizes(options, data))


def _sizes(options: argparse.Namespace, data: dict[str, Floats]) -> Iterator[tuple[str, int, int]]:
    for family in options.families or [*data, *SYNTHETIC]:
        for ranks in options.ranks:
            yield from ((family, ranks, per_rank) for per_rank in options.per_rank)


def _fills(data: dict[str, Floats], family: str, samples: int) -> bool:
    return family in SYNTHETIC or samples <= len(data[family])


def _planned(case: Case, data: dict[str, Floats]) -> Result:
    costs = case_costs(case, data)
    start = time.perf_counter()
    gap = plan(case, costs).gap
    return Result(case, gap, (time.perf_counter() - start) * 1e3)


def _table(head: str, results: list[Result], key: Callable[[Case], str]) -> str:
    modes = [mode for mode in MODES if any(result.case.mode == mode for result in results)]
    lines = [f"{head:16}" + "".join(f"{mode + ': mean':>14}{'worst':>10}{'above':>7}{'of':>6}" for mode in modes)]
    rows = defaultdict(list)
    for result in results:
        rows[key(result.case)].append(result)
    for name, row in [*rows.items(), ("all", results)]:
        cells = [[result.gap for result in row if result.case.mode == mode] for mode in modes]
        lines.append(f"{name:16}" + "".join(_cell(np.array(gaps)) for gaps in cells))
    return "\n".join(lines)


def _cell(gaps: Floats) -> str:
    return f"{gaps.mean():14.4%}{gaps.max():10.3%}{(gaps > LIMIT).sum():7}{len(gaps):6}" if len(gaps) else " " * 37


def _figures(results: list[Result]) -> dict[str, float]:
    """Of every family, every mode, and all."""
    parts = defaultdict(list)
    for result in results:
        for name in ("all", result.case.mode, result.case.family, f"{result.case.family}_{result.case.mode}"):
            parts[name].append(result)
    figures = {}
    for name, part in parts.items():
        gaps = np.array([result.gap for result in part])
        figures |= {f"{name}_mean": float(gaps.mean()), f"{name}_worst": float(gaps.max()), f"{name}_cases": float(len(gaps))}
        figures |= {f"{name}_above": float((gaps > LIMIT).sum()), f"{name}_ms": float(np.mean([result.ms for result in part]))}
    return figures


if __name__ == "__main__":
    main()
