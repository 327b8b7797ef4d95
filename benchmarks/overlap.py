"""Share of the embedding exchange that a step waits for: TorchRec's methods against the overlapped exchange.

Run it on shaped links: ``python benchmarks/netlab.py --hosts 4 --rate 80mbit -- python benchmarks/overlap.py``. Each rank
trains on ``--batch`` histories per step. Compute is a sleep, equally long on all ranks, so only the embedding exchange exceeds
the floor. The variants take turns in the same processes, on the same batches:

floor       no embedding exchange; the all-reduce of the dense part stays
plain       TorchRec's row-wise sharded EmbeddingCollection
pipeline    plain under TorchRec's TrainPipelineSparseDist, which exchanges the ids ahead
dedup       plain, with each id of the rank's batch looked up once; they are found before the step starts
ours        the overlapped exchange, with a lookahead of one batch
split       ours, with the gradients of the dense weights, a share of compute, after those of the rows
micro-4     ours with each batch in 4 micro-batches of about as many ids; split-4: both; also with other numbers
hot-rows    ours with hot_rows="auto", after ``--warm-up`` steps; with netlab's ``--ranks-per-host``, as is two-level
hot-1.25    ours with rows hot that at least 1.25 ranks of a node request, if any does; also with other numbers
threshold   ours, which also waits for all rows that occur in half of the steps, after ``--warm-up`` steps
two-level   ours with every row hot: each row of another host takes two hops
plain-gloo  plain over gloo's own all-to-all; the others post their receives first, as the overlapped exchange does

Exposed is the median step of a variant less that of the floor. The measured reductions are compared with those that the bytes
predict: the rows that two successive batches need, over the rows that TorchRec sends, for all rows and for the busiest link.

Regimes: ``production`` draws Zipf-distributed ids of 5 million rows, with the history lengths of ml-latest-small. ``hard``
takes the users of that data set, most of whose rows collide. ``histories`` takes whole histories of ``--data``. Each table
takes rows x dim x 4 bytes over all ranks. There are three tables: one of plain, dedup and plain-gloo together, one of pipeline,
and one of ours.

The ranks share the cores of this machine, and the cost of that counts as exposed. With eight ranks on two cores, slow links and
compute down by the same factor, for example with ``--rate 50mbit`` and ``--compute-ms 720``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
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

HOT = ("hot-1.125", "hot-1.25", "hot-1.5", "hot-2", "hot-3")
IN_PARTS = ("micro-2", "micro-4", "micro-8", "split-2", "split-4")
VARIANTS = (
    "floor",
    "plain",
    "pipeline",
    "dedup",
    "ours",
    "split",
    *IN_PARTS,
    "threshold",
    "hot-rows",
    *HOT,
    "two-level",
    "plain-gloo",
)
BY_DEFAULT = ("floor", "plain", "pipeline", "dedup", "ours", "split", "micro-4", "split-4", "plain-gloo")
OURS = ("ours", "split", "threshold", "hot_rows", "two_level", *(name.replace("-", "_") for name in (*HOT, *IN_PARTS)))
SKIPPED = 3  # steps at the start of a round, while the pipelines fill; the last one, without a lookahead, is excluded too


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    harness.finish_on_all_ranks(measure(options), options)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--regime", choices=("production", "hard", "histories"), default="production")
    add("--data", type=Path, help="file of the histories, .npz or .txt.gz, in the histories regime")
    add("--variants", nargs="+", choices=VARIANTS, default=list(BY_DEFAULT))
    add("--compute-ms", type=float, default=240.0, help="sleep of a step (default: 240)")
    add("--batch", type=int, help="histories per rank and step (default: 32, or 64 in the hard regime)")
    add("--rows", type=int, default=5_000_000, help="rows of the table in the production regime (default: 5 million)")
    add("--dim", type=int, default=64, help="width of an embedding (default: 64)")
    add(
        "--weights-share",
        type=float,
        default=0.15,
        help="share of compute that a split backward does last (default: 0.15)",
    )
    add("--steps", type=int, default=16, help="steps of a round (default: 16)")
    add("--rounds", type=int, default=3)
    add("--warm-up", type=int, default=200, help="steps without compute before the first round (default: 200)")
    options = parser.parse_args(arguments)
    if options.steps < SKIPPED + 3 or options.rounds < 1:
        parser.error(f"--steps {options.steps} --rounds {options.rounds}: at least {SKIPPED + 3} and 1")
    if (options.data is None) == (options.regime == "histories"):
        parser.error(f"--regime {options.regime} --data {options.data}: pass --data in the histories regime, and only there")
    if "floor" not in options.variants:
        options.variants = ["floor", *options.variants]
    options.batch = options.batch or {"hard": 64}.get(options.regime, 32)
    return options


def measure(options: Any) -> dict[str, float]:
    """Return the figures, and print them on rank 0. Collective."""
    torch.set_num_threads(1)
    overlap_variants.weights_share = options.weights_share
    if options.regime == "hard":
        rows, draw = overlap_workload.hard(options.batch)
    elif options.regime == "histories":
        rows, draw = overlap_workload.histories(options.data, options.batch)
    else:
        rows, draw = options.rows, overlap_workload.production(options.rows, options.batch)
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = overlap_workload.batches(draw, options.steps, rank)
    counts = [int(name.removeprefix("micro-")) for name in options.variants if name.startswith("micro-")]
    figures = overlap_workload.collisions(draw, options.steps, world, rows, counts) if rank == 0 else {}
    warm = [name for name in ("threshold", "hot-rows", *HOT) if name in options.variants]
    early = overlap_workload.batches(draw, options.steps + options.warm_up, rank)[options.steps :] if warm else []
    del draw
    variants = overlap_variants.build(
        options.variants, rows, options.dim, options.compute_ms / 1000, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    for name in warm:
        variants[name].warm_up(early)
        variants[name].count_anew()
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, variant in variants.items():
            times[name].append(_round(variant, batches))
    for name, variant in variants.items():
        figures |= _figures(name.replace("-", "_"), times[name], variant, options)
    figures |= _reductions(figures)
    if rank == 0:
        _show(figures, options)
    for variant in variants.values():
        variant.close()
    return figures


def _round(variant: Any, batches: Sequence[Any]) -> list[tuple[float, float]]:
    """Return the milliseconds of wall time and of the process's CPU time of each step that counts."""
    dist.barrier()
    marks = [(time.perf_counter(), time.process_time()) for _ in variant.steps(batches)]
    return (1000 * np.diff(marks, axis=0)[SKIPPED - 1 : -1]).tolist()


def _figures(name: str, times: Any, variant: Any, options: Any) -> dict[str, float]:
    """Return medians and quartiles of steps, each the mean over the ranks, and bytes per rank and step."""
    steps = options.steps * options.rounds
    counted = {key: value / steps for key, value in sorted(variant.sent().items())}
    mean = torch.tensor([*np.reshape(times, -1), *counted.values()], dtype=torch.float64)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    wall, cpu = mean[: len(mean) - len(counted)].reshape(-1, 2).numpy().T
    low, middle, high = np.percentile(wall, [25, 50, 75])
    figures = {f"{name}_ms": middle, f"{name}_low_ms": low, f"{name}_high_ms": high, f"{name}_cpu_ms": np.median(cpu)}
    figures |= {f"{name}_{key}": value for key, value in zip(counted, mean[-len(counted) :].tolist())}
    return {key: float(value) for key, value in figures.items()}


def _reductions(figures: dict[str, float]) -> dict[str, float]:
    exposed = {name: figures[f"{name}_ms"] - figures["floor_ms"] for name in _measured(figures) if name != "floor"}
    found = {f"{name}_exposed_ms": value for name, value in exposed.items()}
    for mine, prefix in ((name, "" if name == "ours" else f"{name}_") for name in OURS if name in exposed):
        for other in (name for name in ("plain", "pipeline", "dedup") if name in exposed):
            found[f"{prefix}reduction_vs_{other}"] = 1 - exposed[mine] / exposed[other]
            found[f"{prefix}step_over_{other}"] = figures[f"{mine}_ms"] / figures[f"{other}_ms"]
    return found


def _measured(figures: dict[str, float]) -> list[str]:
    return [name for name in (variant.replace("-", "_") for variant in VARIANTS) if f"{name}_ms" in figures]


def _show(figures: dict[str, float], options: Any) -> None:
    rate = os.environ.get("NETLAB_RATE", "unknown rate")
    print(f"{options.regime}: {dist.get_world_size()} ranks, links of {rate}, compute {options.compute_ms:g} ms", end="; ")
    print(f"{options.batch} histories per rank and step, embeddings of {options.dim} numbers")
    print("{tokens_per_rank:.0f} ids per rank and step, {unique_per_rank:.0f} of them unique".format(**figures), end="; ")
    print("{collision_rate:.1%} of the rows of a global batch are in the one before as well".format(**figures))
    print(f"{'':<12}{'step ms':>9}{'half within':>17}{'exposed ms':>12}{'CPU ms':>9}{'MB sent':>9}")
    for name in _measured(figures):
        half = f"{figures[f'{name}_low_ms']:.1f} - {figures[f'{name}_high_ms']:.1f}"
        exposed = figures.get(f"{name}_exposed_ms", 0.0)
        print(f"{name:<12}{figures[f'{name}_ms']:9.1f}{half:>17}{exposed:12.1f}", end="")
        print(f"{figures[f'{name}_cpu_ms']:9.1f}{figures[f'{name}_bytes'] / 1e6:9.2f}")
    for mine, prefix in ((name, "" if name == "ours" else f"{name}_") for name in OURS):
        for other in ("plain", "pipeline", "dedup"):
            if f"{prefix}reduction_vs_{other}" in figures:
                reduction, ratio = figures[f"{prefix}reduction_vs_{other}"], figures[f"{prefix}step_over_{other}"]
                print(f"{mine} against {other}: {reduction:.1%} less exposed, step x {ratio:.3f}")
    for other in ("plain", "dedup"):
        everywhere, busiest = figures[f"predicted_reduction_vs_{other}"], figures[f"predicted_busiest_vs_{other}"]
        print(f"predicted by bytes against {other}: {everywhere:.1%} less exposed; over the busiest link {busiest:.1%}", end="")
        in_parts = [name for name in OURS if f"predicted_{name}_vs_{other}" in figures]
        print("".join(f"; {name} {figures[f'predicted_{name}_vs_{other}']:.1%}" for name in in_parts))


if __name__ == "__main__":
    main()
