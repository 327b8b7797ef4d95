"""Memory of a long run: many small steps with overlap and profiler, on gloo processes.

Every ``--every`` steps, each rank notes its private memory (RssAnon), threads, open files and Python objects. The increase per
thousand steps is the slope from the second note on. The figures are those of the worst rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import harness
import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.testing import run_distributed

NAMES = ("rss_mb", "threads", "files", "objects")
ROWS = 5000


class Histories(Dataset):
    """Random histories of up to eleven items."""

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(1, 12, (size,), generator=draw)
        self.items = torch.randint(0, ROWS, (size, 12), generator=draw)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a history."""
        return self.items[index, : self.lengths[index]]


def collate(samples: list[torch.Tensor]) -> KeyedJaggedTensor:
    """Return one feature, whose targets are the items themselves."""
    lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.int32)
    return KeyedJaggedTensor(keys=["f"], values=torch.cat(samples), lengths=lengths)


class Model(L.LightningModule):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])
        self.items, self.head = EmbeddingCollection(tables=[config]), nn.Linear(8, 1)

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> torch.Tensor:
        """Return a loss that moves rows and layer."""
        loss = self.head(self.items(batch)["f"].values()).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return Adagrad for all."""
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Notes(L.Callback):
    """Records the resources of the process at regular steps."""

    def __init__(self, every: int) -> None:
        self.every, self.noted = every, list[list[float]]()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Record the resources."""
        if trainer.global_step % self.every == 0:
            gc.collect()
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            own = int(status["RssAnon"].split()[0]) / 1024
            self.noted.append([own, threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects())])
            if trainer.is_global_zero:
                print(trainer.global_step, *(f"{value:.1f}" for value in self.noted[-1]), flush=True)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1000, help="steps between two notes (default: 1000)")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print("step", *NAMES)
    noted = np.array(run_distributed(_run, options.ranks, options, timeout=3600 * 4))
    after = noted[:, 1:] if noted.shape[1] > 2 else noted
    slopes = np.polyfit(np.arange(after.shape[1]), after.transpose(1, 0, 2).reshape(after.shape[1], -1), 1)[0]
    worst = slopes.reshape(options.ranks, len(NAMES)).max(axis=0)
    figures = {f"{name}_per_thousand_steps": float(value) * 1000 / options.every for name, value in zip(NAMES, worst)}
    print(", ".join(f"{name} {value:+.3f}" for name, value in figures.items()))
    for number in (1, 2, 5, 10, 20):
        if number <= noted.shape[1]:
            figures |= {f"{name}_after_{number}_notes": float(value) for name, value in zip(NAMES, noted[0, number - 1])}
    harness.finish(figures, options)


def _run(options: argparse.Namespace) -> list[list[float]]:
    data, notes = Histories(8 * options.ranks * 500), Notes(options.every)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy="freescale",
            accelerator="cpu",
            devices=options.ranks,
            max_steps=options.steps,
            max_epochs=-1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[notes, BubbleProfiler(folder, verbose=False)],
        )
        trainer.fit(Model(), FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate, loss_reduction="target_mean"))
    return notes.noted


if __name__ == "__main__":
    main()
