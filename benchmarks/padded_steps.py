"""Steps of a SASRec that pads its batches: strategy "ddp" with samples as drawn, and "freescale", which plans for padding.

``python benchmarks/padded_steps.py --data ml-1m.seqs.npz``

The model is that of ``examples/sasrec.py``, on two gloo ranks of one core each. Histories have the lengths of the data set, cut
to ``--max-length``, and random items. Variants take turns: a round fits each of them anew on the same samples. The figure of a
round is the mean step after the first ones, in which "freescale" detects that batches are padded. The speed-up is the mean step
under "ddp" over this figure. The prediction is that of ``freescale simulate`` for the model's multiply-adds, which
covers the compute alone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import harness
import lightning as L
import numpy as np
import torch
from demo import quiet
from lengths import read_lengths
from sasrec import SASRec, collate
from torch.utils.data import DataLoader, Dataset

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.balance import CostModel
from lightning_freescale.balance.simulate import forecast
from lightning_freescale.testing import run_distributed

DIM, LAYERS, SKIPPED = 64, 2, 10


def main() -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--data", required=True, help="data set with the lengths, see lengths.py")
    add("--users", type=int, default=4000, help="histories drawn from it (default: 4000)")
    add("--items", type=int, default=4000, help="rows of the table (default: 4000)")
    add("--max-length", type=int, default=200)
    add("--batch-size", type=int, default=32, help="samples per rank and step (default: 32)")
    add("--ranks", type=int, default=2)
    add("--micro-batches", type=int, nargs="+", default=[1, 2, 4])
    add("--steps", type=int, default=40, help="steps of a fit (default: 40)")
    add("--rounds", type=int, default=5)
    options = parser.parse_args()
    name, known = read_lengths(options.data)
    # a sample's last item is only a target, and two are held out
    lengths = np.minimum(np.random.default_rng(0).choice(known, options.users) - 3, options.max_length).clip(min=1)
    rounds = run_distributed(_rounds, options.ranks, lengths, options, init=False, timeout=3600)
    figures = _figures(np.mean(rounds, axis=0), lengths, options)
    print(f"{name}, cut at {options.max_length}, {options.batch_size} samples per rank, {options.ranks} ranks: step under ddp "
          f"{figures['ddp_ms']:.0f} ms; {figures['padding']:.0%} of the computed tokens are padding as drawn")  # fmt: skip
    for parts in options.micro_batches:
        low, high = figures[f"micro_{parts}_low"], figures[f"micro_{parts}_high"]
        print(f"  micro-batches {parts}: {figures[f'micro_{parts}']:.2f} times as fast (half of the rounds within {low:.2f} to "
              f"{high:.2f}); predicted, of the compute alone, {figures[f'predicted_{parts}']:.2f}")  # fmt: skip
    harness.finish(figures, options)


class Histories(Dataset[dict[str, Any]]):
    """Random histories of given lengths."""

    def __init__(self, lengths: Any, items: int) -> None:
        self.lengths, self.items = lengths.astype(int), items

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return items, and the item that follows each."""
        items = np.random.default_rng(index).integers(0, self.items, self.lengths[index] + 1)
        return {"item": items[:-1], "target": items[1:]}


class Timed(SASRec):
    """Records the start of each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Record the start of a step."""
        self.began = [*getattr(self, "began", []), time.perf_counter()]

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log nothing."""


def _rounds(lengths: Any, options: Any) -> list[list[float]]:
    torch.set_num_threads(1)
    quiet()
    names = [0, *options.micro_batches]
    found = []
    for number in range(options.rounds):
        order = names[:: 1 if number % 2 else -1]
        times = {parts: _mean_step(parts, lengths, options, number) for parts in order}
        found.append([times[parts] for parts in names])
    return found


def _mean_step(parts: int, lengths: Any, options: Any, seed: int) -> float:
    data = Histories(lengths, options.items)
    torch.manual_seed(seed)
    model = Timed(options.items, options.max_length, DIM, LAYERS)
    trainer = L.Trainer(
        strategy="freescale" if parts else "ddp", accelerator="cpu", devices=options.ranks, max_epochs=1,
        limit_train_batches=options.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    together = lambda samples: collate(samples, options.items)  # noqa: E731
    if parts:
        module = FreeScaleDataModule(
            data, lengths, options.batch_size, collate_fn=together, micro_batches=parts, seed=seed, cost=_cost(),
            loss_reduction="target_mean", target_counts=lengths,
        )  # fmt: skip
        trainer.fit(model, module)
    else:
        trainer.fit(model, DataLoader(data, options.batch_size, shuffle=True, collate_fn=together))
    return float(np.diff(model.began)[SKIPPED:].mean())


def _cost() -> CostModel:
    return CostModel.from_config(DIM, LAYERS, feedforward=DIM)


def _figures(rounds: Any, lengths: Any, options: Any) -> dict[str, float]:
    figures = {"ddp_ms": 1e3 * float(np.median(rounds[:, 0]))}
    for place, parts in enumerate(options.micro_batches, start=1):
        low, middle, high = np.quantile(rounds[:, 0] / rounds[:, place], [0.25, 0.5, 0.75])
        drawn: dict[str, Any] = {"micro_batches": parts, "padded": True, "assignment_mode": "free"}
        ahead = forecast(lengths, options.ranks, options.batch_size, _cost(), **drawn)
        figures |= {f"micro_{parts}": float(middle), f"micro_{parts}_low": float(low), f"micro_{parts}_high": float(high)}
        figures |= {f"predicted_{parts}": float(ahead.speedup), f"padding_{parts}": float(ahead.padding or 0)}
        figures["padding"] = float(ahead.padding_unbalanced or 0)
    return figures


if __name__ == "__main__":
    main()
