"""Overhead of the bubble profiler: the same run with and without it, in turns.

Each rank sleeps 100 ms a step as compute, exchanges a few small tensors as TorchRec does, and reduces its gradients. The figure
of a round is its mean step over whole windows of the profiler, including the exchange of records. The overhead is the median
over the rounds of with / mean of the neighbouring two without - 1, and the floor that of one without over the next. CPU time is
that of the process. The profiler's own figure is the one that it prints.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import harness
import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_freescale import BubbleProfiler
from lightning_freescale.testing import run_distributed

COMPUTE, WINDOW, WARMUP, LAG = 0.1, 50, 5, 2


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=2, help="windows of 50 steps per round (default: 2)")
    parser.add_argument("--exchanges", type=int, default=6, help="all-to-alls per step")
    options = parser.parse_args()
    results = run_distributed(_rounds, options.ranks, options, timeout=1200)
    times = np.array([[steps for steps, _ in rank] for rank in results])  # [ranks, runs, wall and CPU]
    figures = {"own": float(np.median([own for _, own in results[0] if own is not None]))}
    for clock, steps in zip(("wall", "cpu"), times.mean(axis=0).T):
        without, profiled = steps[::2], steps[1::2]
        figures |= {
            f"{clock}_ms": float(np.median(without) * 1e3),
            f"{clock}_overhead": float(np.median(2 * profiled / (without[:-1] + without[1:]) - 1)),
            f"{clock}_floor": float(np.median(np.abs(without[1:] / without[:-1] - 1))),
        }
        print(
            f"{clock}: {figures[f'{clock}_ms']:.2f} ms per step without; with the profiler {figures[f'{clock}_overhead']:+.2%} "
            f"(floor {figures[f'{clock}_floor']:.2%}); in ms {1e3 * (np.median(profiled) - np.median(without)):+.3f}"
        )
    print(f"the profiler's own figure: {figures['own']:.2%} of a step")
    harness.finish(figures, options)


def _rounds(options: Any) -> list[tuple[Any, float | None]]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel("ERROR")
    return [_run(options, profiled=run % 2 == 1) for run in range(2 * options.rounds + 1)]


class Sleeper(L.LightningModule):
    """Computes by sleeping."""

    def __init__(self, exchanges: int) -> None:
        super().__init__()
        self.layer, self.exchanges = nn.Linear(4, 1), exchanges

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Exchange and sleep."""
        rows = torch.zeros(64 * dist.get_world_size())
        for _ in range(self.exchanges):
            dist.all_to_all_single(torch.empty_like(rows), rows)
        time.sleep(COMPUTE)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


class Times(L.Callback):
    """Records the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """Record the time after the profiler, which comes first."""
        self.ends.append((time.perf_counter(), time.process_time()))


def _run(options: Any, profiled: bool) -> tuple[Any, float | None]:
    times, steps = Times(), options.windows * WINDOW
    profiler = BubbleProfiler(mkdtemp(prefix="overhead"), every_n_steps=WINDOW, verbose=False)
    profiler.options = replace(profiler.options, warmup_steps=WARMUP)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        strategy="ddp", accelerator="cpu", devices=options.ranks, max_epochs=1, use_distributed_sampler=False,
        callbacks=[profiler, times] if profiled else [times], **quiet,
    )  # fmt: skip
    trainer.fit(Sleeper(options.exchanges), DataLoader(torch.ones(steps + WARMUP + LAG, 4), batch_size=1))
    report = profiler.report
    # from the step after which a window begins to that after whose exchange the last ends
    measured = np.diff(np.array(times.ends)[[WARMUP - 1 + LAG, WARMUP - 1 + LAG + steps]], axis=0)[0] / steps
    return measured, None if report is None else report.overhead.total / report.step_s


if __name__ == "__main__":
    main()
