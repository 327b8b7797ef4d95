"""Is a fit under "freescale" that under "ddp"? Random models, data, optimizers and Trainer options, many of them.

Each case trains the same small LightningModule unsharded under ``"ddp"``, and sharded with and without dedup, or in two levels.
Adam under ``"ddp"`` leaves rows without a gradient alone, as it does on tables. A defect is a loss, a weight or a random number
that differs, or an error after the first step; refusals before it are counted apart.
"""

from __future__ import annotations

import logging
import os
import time

os.environ["OMP_NUM_THREADS"] = "1"

import harness
from random_cases import divided, on_two_nodes, random_case, sharded_ways
from random_fits import defects, run_case

from lightning_freescale.testing import run_distributed


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after that time")
    parser.add_argument("--micro-batches", action="store_true", help="sharded, with the steps in 2 to 4 of them")
    parser.add_argument("--two-level", action="store_true", help="4 ranks on 2 nodes, sharded with exchange='two_level'")
    options = parser.parse_args()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    began, figures = time.monotonic(), {"cases": 0, "refused": 0, "defects": 0}
    for seed in range(options.first_seed, options.first_seed + options.count):
        if time.monotonic() - began > options.seconds:
            break
        case = random_case(seed)
        if options.micro_batches:
            case = divided(case)
        if options.two_level:
            case = on_two_nodes(case)
        try:
            ranks = run_distributed(run_case, case.ranks, case, timeout=120)
            found, refused = defects(ranks), {ranks[0][name].error for name in sharded_ways(case)} - {""}
        except RuntimeError as error:  # a rank failed or hung
            found, refused = [str(error)[-600:]], set()
        figures["cases"] += 1
        figures["refused"] += bool(refused and not found)
        figures["defects"] += bool(found)
        for text in found:
            print(f"seed {seed}: {text}\n  {case}", flush=True)
        for text in refused if not found else ():
            print(f"seed {seed}: refused, {text[:160]}", flush=True)
    print(f"{figures['cases']} cases: {figures['defects']} with a defect, {figures['refused']} refused before the first step")
    harness.finish(figures, options)


if __name__ == "__main__":
    main()
