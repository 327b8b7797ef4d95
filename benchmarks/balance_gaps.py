"""Distance of each plan from the best one: families of lengths x ranks x samples per rank x cost x mode.

The gap of a plan is its imbalance over the lower bound of ``Assignment.gap``, less 1. Samples of real data sets are drawn
without replacement. Sizes that a data set cannot fill are left out and counted.

Each batch is a *case*, such as ``short/8x32/square/fixed/17`` (family, ranks x samples per rank, cost, mode, seed). ``--case``
plans it again, and ``case_costs`` returns the costs of its samples.

With ``--exact``, the solver OR-tools CP-SAT searches for the best plan of the cases above the limit (``pip install -r
benchmarks/exact_requirements.txt``). Gaps are then relative to the bound that it proves, if that is larger. ``--search`` uses
the long search of balance.py for the cases that are too large for the solver.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
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
    """One batch and the ranks that share it."""

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
        """Parse the text that ``str`` returns."""
        family, size, cost, mode, seed = text.split("/")
        ranks, per_rank = size.split("x")
        return cls(family, int(ranks), int(per_rank), cost, mode, int(seed))


class Result(NamedTuple):
    """The plan of a case, its lower bound, and the milliseconds that planning took.

    ``found`` and ``proved`` come from the exact solver: its best plan and the bound that it proved, as imbalances.
    """

    case: Case
    imbalance: float
    bound: float
    ms: float
    found: float = np.inf
    proved: float = 0.0

    @property
    def gap(self) -> float:
        """The gap to the lower bound of the plan, or to that of the exact solver."""
        return max(0.0, self.imbalance / max(self.bound, self.proved) - 1)

    @property
    def missed(self) -> float:
        """The share by which the plan of the exact solver is better."""
        return max(0.0, self.imbalance / self.found - 1)

    @property
    def verdict(self) -> str:
        """The result of the comparison: ``"best"``, ``"missed"``, ``"undecided"`` or ``"above"``."""
        if self.gap <= LIMIT:
            return "best"
        return "missed" if self.missed > LIMIT else "undecided" if np.isfinite(self.found) else "above"


def case_costs(case: Case, data: dict[str, Floats]) -> Floats:
    """Return the costs of the samples of a case, shape ``[samples]``; ``data`` has the lengths of real data sets by name."""
    draw, samples = np.random.default_rng([case.seed, case.ranks, case.per_rank]), case.ranks * case.per_rank
    if case.family in SYNTHETIC:
        lengths = draw_lengths(case.family, draw, samples)
    else:
        lengths = draw.choice(data[case.family], samples, replace=False)
    return COSTS[case.cost](lengths)


def plan(case: Case, costs: Floats) -> Assignment:
    """Plan the case with this package."""
    return assign(costs, case.ranks, assignment_mode=case.mode)


def main() -> None:
    options = _options()
    data = dict(read_lengths(path) for path in options.data)
    unknown = [name for name in options.families or [] if name not in data.keys() | SYNTHETIC.keys()]
    if unknown:
        sys.exit(f"--families {' '.join(unknown)}: choose from {', '.join([*data, *SYNTHETIC])}")
    results = [_planned(case, data) for case in options.case or _grid(options, data)]
    if options.exact or options.search:
        results = [_compared(result, data, options) for result in results]
    print(_table("family", results, lambda case: case.family))
    by_size = sorted(results, key=lambda result: (result.case.ranks, result.case.per_rank))
    print("\n" + _table("size", by_size, lambda case: f"{case.ranks} x {case.per_rank}"))
    print("\n" + _table("cost", results, lambda case: case.cost))
    figures = _figures(results) | {"sizes_left_out": 0.0 if options.case else _left_out(options, data)}
    if figures["sizes_left_out"]:
        print(f"\n{figures['sizes_left_out']:g} sizes left out: the data set has fewer users")
    if options.exact or options.search:
        figures |= _compared_figures(results)
    above = sorted((result for result in results if result.gap > LIMIT), key=lambda result: -result.gap)
    print("\n".join(_line(result) for result in (results if options.case else above[: options.worst])))
    harness.finish(figures, options)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        action="append",
        default=[],
        help="as for balance.py, or .csv with users in the first column",
    )
    add("--families", nargs="+", metavar="NAME", help=f"names of data sets, or of {', '.join(SYNTHETIC)} (default: all)")
    add("--ranks", type=int, nargs="+", help=f"default {' '.join(map(str, RANKS))}")
    add("--per-rank", type=int, nargs="+", default=PER_RANK, help=f"default {' '.join(map(str, PER_RANK))}")
    add("--costs", nargs="+", choices=COSTS, default=list(COSTS))
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--batches", type=int, help="batches of each size (default: 5)")
    add("--seed", type=int, default=0, help="seed of the first batch (default: 0)")
    add("--quick", action="store_true", help=f"ranks {' '.join(map(str, QUICK_RANKS))}, {QUICK_BATCHES} batches")
    add("--worst", type=int, default=0, metavar="N", help="print the N worst cases above the limit")
    add(
        "--exact",
        type=float,
        default=0,
        metavar="SECONDS",
        help="search for the best plan of each case above the limit for this time",
    )
    add(
        "--exact-of",
        choices=["above", "all"],
        default="above",
        help="cases to search (default: above the limit)",
    )
    add("--exact-samples", type=int, default=256, help="largest number of samples for --exact (default: 256)")
    add("--search", type=float, default=0, metavar="SECONDS", help="search by annealing for better plans of larger cases")
    add("--case", type=Case.parse, nargs="+", help="plan these cases alone; --worst prints their names")
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
    ours = plan(case, costs)
    return Result(case, ours.imbalance, ours.lower_bound, (time.perf_counter() - start) * 1e3)


def _compared(result: Result, data: dict[str, Floats], options: argparse.Namespace) -> Result:
    """Add the result of the exact solver, or of a long search if there are too many samples for the solver."""
    case = result.case
    exact = options.exact and case.ranks * case.per_rank <= options.exact_samples
    if not (exact or options.search) or (result.gap <= LIMIT and options.exact_of == "above"):
        return result
    costs = case_costs(case, data)
    most = {"fixed": case.per_rank, "slack": int(case.per_rank * (1 + SLACK)), "free": case.ranks * case.per_rank}[case.mode]
    limits, ours = (case.per_rank if case.mode == "fixed" else 1, most), plan(case, costs).rank_of_sample
    if exact:
        from exact import best_imbalance

        found, proved = best_imbalance(costs, ours, case.ranks, limits, options.exact, LIMIT)
    else:
        from long_search import search

        found, proved = search(costs, ours, case.ranks, limits, result.bound, options.search), 0.0
    if found < result.bound * (1 - 1e-9):
        raise AssertionError(f"{case}: the lower bound is {result.bound}, but there is a plan of {found}")
    return result._replace(found=found, proved=proved)


def _compared_figures(results: list[Result]) -> dict[str, float]:
    """Print the cases that were searched for better plans, by family and mode, and return their figures."""
    seen = [result for result in results if np.isfinite(result.found)]
    counts = Counter((result.case.family, result.case.mode, result.verdict) for result in seen)
    verdicts = ("best", "missed", "undecided")
    print(f"\n{'searched':16}{'mode':8}" + "".join(f"{verdict:>10}" for verdict in verdicts) + f"{'most missed':>13}")
    for family, mode in dict.fromkeys((result.case.family, result.case.mode) for result in seen):
        most = max(result.missed for result in seen if (result.case.family, result.case.mode) == (family, mode))
        print(f"{family:16}{mode:8}" + "".join(f"{counts[family, mode, verdict]:10}" for verdict in verdicts) + f"{most:13.3%}")
    figures = {f"searched_{verdict}": float(sum(result.verdict == verdict for result in seen)) for verdict in verdicts}
    worst = max((result.missed for result in seen), default=0.0)
    return figures | {"searched_cases": float(len(seen)), "searched_most_missed": worst}


def _line(result: Result) -> str:
    known = f", found {result.found:.6f}, proved {result.proved:.6f}" if np.isfinite(result.found) else ""
    return f"{result.gap:9.4%}  {result.case}  {result.verdict}: ours {result.imbalance:.6f}, bound {result.bound:.6f}{known}"


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
    """Return the figures of each family, each mode, and all cases."""
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
