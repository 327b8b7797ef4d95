"""Many collectives of all kinds and sizes on two lanes at the same time, each verified.

Two threads issue collectives, each on its own freescale group, both synchronously and with several pending. All-reduces by gloo
run in between. Sizes and splits are random and equal on all ranks. The contents follow from source, target and position, so
each received byte is checked. ``wrong`` is the number of wrong collectives over all ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
import torch.distributed as dist
from comm_stress_collectives import KINDS, Lane, Plan, draw_plan

from lightning_freescale.comm import ProcessGroupFreeScaleOptions
from lightning_freescale.testing import run_distributed

LANES, IN_FLIGHT = 2, 4


def main() -> None:
    options = parse()
    started = time.perf_counter()
    results = run_distributed(stress, options.ranks, options, timeout=60 + 0.1 * options.collectives)
    seconds = time.perf_counter() - started
    wrong = [text for texts, _, _ in results for text in texts]
    counts, moved = results[0][1], sum(result[2] for result in results)
    figures = {"collectives": float(sum(counts.values())), "wrong": float(len(wrong)), "seconds": seconds}
    figures |= {"megabytes": moved / 1e6} | {f"kind_{name}": float(value) for name, value in sorted(counts.items())}
    print(f"{options.ranks} ranks, seed {options.seed}: {figures['collectives']:.0f} collectives", end=" ")
    print(f"({', '.join(f'{value} {name}' for name, value in sorted(counts.items()))})", end=", ")
    print(f"{figures['megabytes']:.0f} MB in {seconds:.1f} s, {len(wrong)} wrong")
    for text in wrong[:10]:
        print(text, file=sys.stderr)
    harness.finish(figures, options)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--collectives", type=int, default=10_000, help="collectives on all lanes together (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.ranks < 1 or options.collectives < 1:
        parser.error(f"--ranks {options.ranks} --collectives {options.collectives}: at least 1")
    return options


def stress(options: argparse.Namespace) -> tuple[list[str], Counter[str], int]:
    """Return the errors of this rank, the number of collectives of each kind, and the bytes received. Collective."""
    chosen = [
        ProcessGroupFreeScaleOptions(chunk_bytes=16 * 1024),
        ProcessGroupFreeScaleOptions(chunk_bytes=100_000, priority=1),
    ]
    groups = [dist.new_group(backend="freescale", timeout=timedelta(seconds=60), pg_options=each) for each in chosen]
    lanes = [Lane(group, dist.get_rank(), dist.get_world_size()) for group in groups]
    shares = [len(range(index, options.collectives, LANES)) for index in range(LANES)]
    threads = [
        threading.Thread(target=_guarded, args=(lane, share, 1000 * options.seed + index), daemon=True)
        for index, (lane, share) in enumerate(zip(lanes, shares))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    wrong = [text for lane in lanes for text in lane.wrong]
    return wrong, sum((lane.seen for lane in lanes), Counter()), sum(lane.moved for lane in lanes)


def _guarded(lane: Lane, collectives: int, seed: int) -> None:
    try:
        _run(lane, collectives, np.random.RandomState(seed))
    except Exception as error:
        lane.wrong.append(f"rank {lane.rank}: {type(error).__name__}: {error}")


def _run(lane: Lane, collectives: int, draw: np.random.RandomState) -> None:
    in_flight: list[tuple[Plan, Any, Callable[[], bool]]] = []
    for number in range(collectives):
        plan = draw_plan(draw, number, lane.size)
        work, check = KINDS[plan.kind](lane, plan)
        lane.seen[plan.kind] += 1
        if plan.waits_later:
            in_flight.append((plan, work, check))
        else:
            _finish(lane, plan, work, check)
        while len(in_flight) > (IN_FLIGHT if number + 1 < collectives else 0):
            _finish(lane, *in_flight.pop(int(draw.randint(len(in_flight)))))


def _finish(lane: Lane, plan: Plan, work: Any, check: Callable[[], bool]) -> None:
    if work is not None:
        work.wait()
    if not check():
        lane.wrong.append(f"rank {lane.rank}: {plan.kind} {plan.number} of {plan.dtype}, rows {plan.rows.tolist()}")


if __name__ == "__main__":
    main()
