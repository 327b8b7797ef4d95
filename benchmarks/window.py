"""Gain of distributing the samples of an optimizer step over its micro-batches; predicted, and measured.

``python benchmarks/window.py --data gowalla.train.txt.gz`` predicts windows of ``--window`` micro-batches of 32 samples per
rank: the time of the slowest ranks of the micro-batches over the mean time of all ranks. It compares each micro-batch as drawn,
each micro-batch balanced alone, and the samples of the window distributed first. A sample of length L costs ``--cost``. No plan
is below ``bound``, the largest of three bounds: the mean; the samples on one rank after another; the most expensive sample with
the cheapest others, in its micro-batch and in all others.

``python benchmarks/netlab.py --hosts 4 --rate 200mbit -- python benchmarks/window.py --data gowalla.train.txt.gz --measure``
trains with ``accumulate_grad_batches`` through Lightning instead, with one rank on each host. Each sample is a sleep in
proportion to its cost, ``--compute-ms`` for a mean micro-batch. The times of optimizer steps are compared with the prediction.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import lightning as L
import numpy as np
import torch
from lengths import read_lengths
from numpy.typing import NDArray
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.balance import assign
from lightning_freescale.balance.assign import contiguous_split, imbalance
from lightning_freescale.balance.window import share_window, window_bound
from lightning_freescale.data import BalanceOptions

PER_RANK = 32
COSTS = {"L": lambda length: length, "L2": lambda length: length**2, "mixed": lambda length: length**2 + 1280 * length}
ROWS = 1000
SKIPPED = 2
"""Optimizer steps at the beginning of a fit."""

Floats = NDArray[np.float64]


def main() -> None:
    """Predict, or measure on all ranks."""
    options = _options()
    name, lengths = read_lengths(options.data)
    costs = COSTS[options.cost](lengths.astype(np.float64))
    if options.measure:
        measured = _measured(costs, options)
        if os.environ["RANK"] == "0":
            print("\n".join(f"{key}: {value:.4g}" for key, value in measured.items()))
        harness.finish_on_all_ranks(measured, options)
    figures: dict[str, float] = {}
    print(f"{name}, cost {options.cost}, windows of {options.window}: predicted imbalance")
    print(f"{'ranks':>6}{'as drawn':>12}{'each step':>12}{'window':>12}{'bound':>12}{'ms':>8}")
    for ranks in options.ranks:
        found = _predicted(costs, ranks, options)
        print(
            f"{ranks:6}"
            + "".join(f"{found[key]:12.4f}" for key in ("drawn", "steps", "window", "bound"))
            + f"{found['ms']:8.1f}"
        )
        figures |= {f"{ranks}_{key}": value for key, value in found.items()}
    harness.finish(figures, options)


def _options() -> Any:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help=".npz with offsets, or text: user and items per line (.gz)")
    add("--cost", choices=COSTS, default="L2")
    add("--window", type=int, default=4, help="micro-batches of an optimizer step")
    add("--ranks", type=int, nargs="+", default=[4, 16, 64])
    add("--windows", type=int, default=20, help="number of drawn windows (default: 20)")
    add("--measure", action="store_true")
    add("--steps", type=int, default=12, help="optimizer steps of each measured fit (default: 12)")
    add("--compute-ms", type=float, default=240, help="sleep of a mean micro-batch (default: 240)")
    return parser.parse_args()


def _predicted(costs: Floats, ranks: int, options: Any) -> dict[str, float]:
    """Return the sums over all windows, over the mean."""
    draw, samples = np.random.RandomState(0), ranks * PER_RANK * options.window
    sums = dict.fromkeys(("drawn", "steps", "window", "bound"), 0.0)
    taken = []
    for _ in range(options.windows):
        window = costs[draw.choice(len(costs), samples, replace=samples > len(costs))]
        drawn = np.split(window, options.window)
        start = time.perf_counter()
        batch_of_sample = share_window(window, options.window, ranks)
        taken.append(time.perf_counter() - start)
        shared = [window[batch_of_sample == batch] for batch in range(options.window)]
        sums["drawn"] += sum(imbalance(each, contiguous_split(len(each), ranks), ranks) * each.sum() for each in drawn)
        sums["steps"] += sum(assign(each, ranks).imbalance * each.sum() for each in drawn)
        sums["window"] += sum(assign(each, ranks).imbalance * each.sum() for each in shared)
        sums["bound"] += window_bound(window, options.window, ranks) * window.sum()
        sums["mean"] = sums.get("mean", 0.0) + float(window.sum())
    return {key: value / sums["mean"] for key, value in sums.items() if key != "mean"} | {"ms": float(np.median(taken)) * 1e3}


class Sleeper(L.LightningModule):
    """A small table, and a sleep as long as the batch's costs say."""

    def __init__(self, seconds_per_cost: float) -> None:
        super().__init__()
        config = EmbeddingConfig(num_embeddings=ROWS, embedding_dim=8, name="item", feature_names=["item"])
        self.items = EmbeddingCollection(tables=[config])
        self.dense = torch.nn.Linear(8, 1)
        self.seconds_per_cost = seconds_per_cost
        self.began: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Record the start of an optimizer step at the first of its micro-batches."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.began.append(time.perf_counter())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        """Look up, sleep, and return a mean over samples."""
        found = self.items(batch["ids"])["item"].values()
        time.sleep(self.seconds_per_cost * batch["cost"])
        return self.dense(found).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD for all parameters."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _measured(costs: Floats, options: Any) -> dict[str, float]:
    """Return the seconds of optimizer steps over the mean rank's compute, for both methods in turns, and the prediction."""
    world, window = int(os.environ["WORLD_SIZE"]), options.window
    samples = PER_RANK * world * window * (options.steps + SKIPPED)
    chosen = costs[np.random.RandomState(0).choice(len(costs), samples, replace=samples > len(costs))]
    figures: dict[str, float] = {}
    for shares in (False, True):
        data = FreeScaleDataModule(
            list(range(samples)),
            batch_size=PER_RANK,
            cost=chosen,
            balance=BalanceOptions(window=shares),
            collate_fn=lambda batch: {
                "cost": float(chosen[batch].sum()),
                "ids": KeyedJaggedTensor.from_lengths_sync(["item"], torch.tensor(batch) % ROWS, torch.ones(len(batch)).int()),
            },
        )
        seconds = options.compute_ms / 1e3 / (chosen.mean() * PER_RANK)
        model = Sleeper(seconds)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = L.Trainer(
            strategy="freescale",
            accelerator="cpu",
            devices=1,
            num_nodes=world,
            max_epochs=1,
            accumulate_grad_batches=window,
            **quiet,
        )
        trainer.fit(model, data)
        sampler: Any = trainer.train_dataloader.sampler
        loads = [[float(chosen[each].sum()) for each in sampler.plan(0, step)] for step in range(len(sampler))]
        slowest, mean = (
            np.array([each(load) for load in loads]).reshape(-1, window).sum(axis=1)[SKIPPED:-1].sum() * seconds
            for each in (max, np.mean)
        )
        took = np.diff(model.began)[SKIPPED:].sum()
        name = "window" if shares else "steps"
        figures |= {f"{name}_predicted": float(slowest / mean), f"{name}_measured": float(took / mean)}
    figures["predicted_speedup"] = figures["steps_predicted"] / figures["window_predicted"]
    figures["measured_speedup"] = figures["steps_measured"] / figures["window_measured"]
    return figures


if __name__ == "__main__":
    main()
