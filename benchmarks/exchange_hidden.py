"""Time that the exchange of samples between ranks adds to a step; it is zero while a step takes longer than the transfer.

Run it on shaped links: ``python benchmarks/netlab.py --hosts 4 --rate 200mbit -- python benchmarks/exchange_hidden.py``. A step
is a sleep for the device's work, and an all-reduce of one number for the wait at the end of a training step. Rounds with a
loader and without one (the floor) take turns in the same processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from lightning_freescale.balance import CostModel
from lightning_freescale.data import BalancedStreamLoader

BATCH = 32
WAYS = ("floor", "global")


class Histories(IterableDataset[Any]):
    """Histories of log-normal lengths, with several numbers per item."""

    def __init__(self, rank: int, steps: int, width: int) -> None:
        self.draw, self.samples, self.width = np.random.RandomState(rank), BATCH * steps, width

    def __iter__(self) -> Iterator[Any]:
        for length in self.draw.lognormal(4.5, 0.8, self.samples).clip(1, 2000).astype(int):
            yield np.zeros((length, self.width), dtype=np.float32)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--step-ms", type=float, default=200.0, help="sleep of a step (default: 200)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round (default: 20)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64, help="numbers per item of a history (default: 64)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="freescale")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            times[way] += _round(way, group, options)
    sent, alone = _transfer(group, options)
    if dist.get_rank() == 0:
        figures = {"transfer_ms": alone, "sent_mb": sent / 1e6}
        rate = os.environ.get("NETLAB_RATE", "unknown rate")
        print(f"{dist.get_world_size()} ranks, links of {rate}, steps of {options.step_ms:g} ms")
        print(f"a step's samples: {sent / 1e6:.2f} MB sent per rank, {alone:.0f} ms when nothing else runs")
        for way, label in zip(WAYS, ("no loader (floor)", "samples exchanged")):
            low, median, high = np.percentile(times[way], [25, 50, 75]).tolist()
            print(f"{label:<24}{median:8.1f} ms per step (half within {low:.1f} to {high:.1f})")
            figures |= {f"{way}_ms": median, f"{way}_low_ms": low, f"{way}_high_ms": high}
        figures["global_over_floor"] = figures["global_ms"] / figures["floor_ms"]
        harness.finish(figures, options)
    dist.destroy_process_group()


def _loader(group: dist.ProcessGroup, options: Any) -> BalancedStreamLoader:
    rank, size = dist.get_rank(), dist.get_world_size()
    return BalancedStreamLoader(
        Histories(rank, options.steps + 8, options.width),
        BATCH,
        cost_fn=lambda sample: float(CostModel()(len(sample))),
        rank=rank,
        world_size=size,
        group=group,
        collate_fn=lambda samples: [torch.from_numpy(sample) for sample in samples],
    )


def _round(way: str, group: dist.ProcessGroup, options: Any) -> list[float]:
    """Return the milliseconds of each step except the first three."""
    batches = iter(range(10**6)) if way == "floor" else iter(_loader(group, options))
    marks = []
    for _ in range(options.steps):
        next(batches)
        time.sleep(options.step_ms / 1000)
        dist.all_reduce(torch.zeros(1))
        marks.append(time.perf_counter())
    if way != "floor":
        batches.close()
    dist.barrier()
    return (1000 * np.diff(marks)[2:]).tolist()


def _transfer(group: dist.ProcessGroup, options: Any) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step, and the milliseconds of an exchange that nothing hides."""
    loader = _loader(group, options)
    sizes, marks = [], []
    for batch in loader:
        sizes.append(sum(sample.nbytes for sample in batch))
        marks.append(time.perf_counter())
    share = 1 - 1 / dist.get_world_size()
    return float(np.mean(sizes)) * share, float(np.median(1000 * np.diff(marks)[3:]))


if __name__ == "__main__":
    main()
