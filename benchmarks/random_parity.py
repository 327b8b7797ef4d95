"""Is a fit under "freescale" that under "ddp"? Random models, data, optimizers and Trainer options, many of them.

Each case trains the same small LightningModule unsharded under ``"ddp"``, and sharded, with and without dedup or overlap, or
with hot rows. Adam under ``"ddp"`` leaves rows without a gradient alone, as it does on tables. A defect is a loss, a prediction
or a weight that differs, or a random number, or an error after the first step; refusals before it are counted apart, as are
fits that fail under ``"ddp"``.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter

os.environ["OMP_NUM_THREADS"] = "1"

import harness
from random_cases import Case, divided, on_two_nodes, sharded_ways
from random_draws import drawn, random_case
from random_fits import defects, run_case

from lightning_freescale.testing import run_distributed


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after that time")
    parser.add_argument("--micro-batches", action="store_true", help="train sharded with 2 to 4 micro-batches per step")
    parser.add_argument("--hot-rows", action="store_true", help="4 ranks on 2 nodes, sharded with hot_rows=")
    options = parser.parse_args()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    began, figures = time.monotonic(), dict.fromkeys(["cases", "refused", "defects", "failed_unsharded"], 0)
    had, compared = Counter[str](), Counter[str]()
    for seed in range(options.first_seed, options.first_seed + options.count):
        if time.monotonic() - began > options.seconds:
            break
        case = random_case(seed)
        if options.micro_batches:
            case = divided(case)
        if options.hot_rows:
            case = on_two_nodes(case)
        kind, texts, hot = _compared(case)
        for text in texts:
            print(f"seed {seed}: {text}", flush=True)
        if kind == "defects":
            print(f"  {case}", flush=True)
        figures["cases"] += 1
        if kind != "same":
            figures[kind] += 1
        has = drawn(case) + ["rows in two hops"] * hot
        had.update(has)
        compared.update(has if kind in ("same", "defects") else ())
    for name, count in had.most_common():
        print(f"{count:4} cases with {name}, {compared[name]} compared")
    refused, failed = figures["refused"], figures["failed_unsharded"]
    print(f"{(time.monotonic() - began) / max(1, figures['cases']):.1f} s per case, {failed} failed under 'ddp'")
    print(f"{figures['cases']} cases: {figures['defects']} with a defect, {refused} refused before the first step")
    harness.finish(figures, options)


def _compared(case: Case) -> tuple[str, list[str], bool]:
    """Run a case. Return ``"same"``, ``"defects"``, ``"refused"`` or ``"failed_unsharded"``, messages, and if rows were hot."""
    try:
        ranks = run_distributed(run_case, case.ranks, case, timeout=120)
    except RuntimeError as error:  # a rank failed or hung
        return "defects", [str(error)[-600:]], False
    hot = any(outcome.hot for outcomes in ranks for outcome in outcomes.values())
    if found := defects(ranks):
        return "defects", found, hot
    if failed := {outcomes["ddp"].error for outcomes in ranks} - {""}:
        return "failed_unsharded", [f"fails under 'ddp', {text[:160]}" for text in failed], hot
    refused = {ranks[0][name].error for name in sharded_ways(case)} - {""}
    return "refused" if refused else "same", [f"refused, {text[:160]}" for text in refused], hot


if __name__ == "__main__":
    main()
