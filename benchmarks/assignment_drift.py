"""How far two runs drift apart that differ only in which rank computes which sample of a step.

The gradients are the same but for the order of summation; training amplifies rounding. The reference model without dropout and
with the same negatives in every batch, two gloo ranks, as drawn against balanced; the figures are relative differences of the
loss over the global batch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import demo
import harness
import lightning as L
import torch
import torch.distributed as dist
from hstu import CollateWithNegatives, HSTURecommender
from overhead import COST

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.testing import run_distributed


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    drawn, balanced = (run_distributed(_losses, 2, balance, options.steps, timeout=600)[0] for balance in (False, True))
    drift = [abs(a - b) / a for a, b in zip(drawn, balanced)]
    figures = {f"drift_within_{step}": max(drift[:step]) for step in (1, 10, 20, 40) if step <= options.steps}
    for name, value in figures.items():
        print(f"{name.replace('_', ' ')} steps: {value:.0e}")
    harness.finish(figures, options)


class _Losses(L.Callback):
    """The loss over the global batch of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].detach() * trainer.train_dataloader.sampler.loss_weight(batch_idx)
        dist.all_reduce(loss)
        self.losses.append(float(loss) / trainer.world_size)


class _SameNegatives(CollateWithNegatives):
    """Else they would depend on which samples share a rank."""

    def draw(self, items: torch.Tensor) -> torch.Tensor:
        return super().draw(torch.zeros(1))


def _losses(balance: bool, steps: int) -> list[float]:
    demo.quiet()
    L.seed_everything(0, verbose=False)
    data = FreeScaleDataModule.from_interactions(demo.RATINGS, **demo.COLUMNS, batch_size=16, cost=COST, balance=balance)
    data.collate_fn = _SameNegatives(data.histories.num_items)
    losses = _Losses()
    trainer = L.Trainer(
        strategy="freescale",
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(HSTURecommender(data.histories.num_items, dropout=0.0), data)
    return losses.losses


if __name__ == "__main__":
    main()
