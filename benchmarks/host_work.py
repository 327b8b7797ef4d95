"""Processor time of the host per step and rank: of the process, and of the engine's thread alone.

A table of 200,000 rows trains with RowWiseAdagrad on histories with the lengths of ml-latest-small. The only other compute is a
tiny dense part, so the exchange remains. The variants train on the same batches in alternating rounds of one run: the floor
(local rows), plain TorchRec on gloo, the overlap engine, engine and floor with 4 micro-batches per step, and the engine with a
sharded ``nn.Embedding``. Other load on the machine hardly affects processor time.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parent))

import harness
import overlap_variants
import overlap_workload
import torch
import torch.distributed as dist

from lightning_freescale.testing import run_distributed

DIM, SAMPLES, WARMUP = 64, 32, 6
VARIANTS = ("floor", "plain-gloo", "ours", "floor-micro-4", "micro-4", "embedding")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for ranks in options.ranks:
        rounds = run_distributed(_measure, ranks, options, timeout=1200)[0]
        print(
            f"{ranks} ranks, {rounds['ids']:.0f} ids and {rounds['rows']:.0f} rows per rank and step; ms of processor per step "
            "and rank"
        )
        for name, label in (*((name, name) for name in VARIANTS), ("thread of ours", "engine's thread")):
            spread = sorted(rounds[name])
            print(f"  {label:15} {median(spread):6.2f} ({spread[0]:.2f} to {spread[-1]:.2f})")
            key = f"{'thread' if name not in VARIANTS else name.replace('-', '_')}_{ranks}"
            figures |= {f"{key}_ms": median(spread), f"{key}_least_ms": spread[0], f"{key}_most_ms": spread[-1]}
        training = {name: median(rounds[f"training of {name}"]) for name in VARIANTS}
        own = (training["floor-micro-4"] - training["floor"]) / 3
        engine = (training["micro-4"] - training["ours"]) / 3 - own
        thread_more = (median(rounds["thread of micro-4"]) - median(rounds["thread of ours"])) / 3
        print(
            f"  each further micro-batch: on the training thread {own:.2f} of the model and {engine:.2f} of the engine, on the"
        )
        print(f"    engine's thread {thread_more:.2f}")
        figures |= {f"micro_batch_ms_{ranks}": engine, f"micro_batch_thread_ms_{ranks}": thread_more}
        figures[f"micro_batch_model_ms_{ranks}"] = own
        figures[f"process_over_plain_{ranks}"] = median(rounds["ours"]) / median(rounds["plain-gloo"])
        figures[f"ids_{ranks}"], figures[f"rows_{ranks}"] = rounds["ids"], rounds["rows"]
        figures[f"embedding_over_collection_{ranks}"] = median(rounds["embedding"]) / median(rounds["ours"])
    harness.finish(figures, options)


def _measure(options: Any) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    draw = overlap_workload.production(options.rows, SAMPLES)
    data = overlap_workload.batches(draw, options.steps + WARMUP, dist.get_rank())
    made = overlap_variants.build(VARIANTS, options.rows, DIM, 0.0)
    found: dict[str, Any] = defaultdict(list)
    for _ in range(options.rounds):
        for name, variant in made.items():
            engine = getattr(variant, "engine", None)
            worker = None if engine is None else next(iter(engine.collections.values()))._worker
            for step, _ in enumerate(variant.steps(data)):
                if step == WARMUP - 1:
                    began, training = time.process_time(), time.thread_time()
                    thread = worker.cpu_seconds if worker else 0.0
            found[name].append(1e3 * (time.process_time() - began) / options.steps)
            found[f"training of {name}"].append(1e3 * (time.thread_time() - training) / options.steps)
            if worker:
                found[f"thread of {name}"].append(1e3 * (worker.cpu_seconds - thread) / options.steps)
            dist.barrier()
    totals = made["ours"].engine.statistics()
    found |= {name: totals[f"{key}"] / totals["steps"] for name, key in (("ids", "tokens"), ("rows", "rows"))}
    for variant in made.values():
        variant.close()
    return found


if __name__ == "__main__":
    main()
