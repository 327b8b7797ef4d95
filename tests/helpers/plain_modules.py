"""A plain LightningModule without embedding collections, whose steps take as long as they are told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_freescale import BubbleProfiler
from lightning_freescale.profiling.reporting.report import BubbleReport


class Rows(Dataset):
    """Samples of four numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


class Plain(L.LightningModule):
    """``seconds`` of forward on rank 1, ``validation`` seconds of every validation batch."""

    def __init__(self, seconds: float = 0.0, validation: float = 0.0) -> None:
        super().__init__()
        self.layer, self.seconds, self.validation = nn.Linear(4, 1), seconds, validation

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            time.sleep(self.seconds)
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(self.validation)
        self.log("val", self.layer(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def profiler(folder: str | Path, **options: Any) -> BubbleProfiler:
    """A quiet one that exchanges often."""
    return BubbleProfiler(folder, **{"every_n_steps": 4, "warmup_steps": 1, "verbose": False, **options})


def fit(module: L.LightningModule, callbacks: list[L.Callback], steps: int = 14, devices: int = 2, **options: Any) -> L.Trainer:
    """One epoch of ``steps`` batches per rank under ``"ddp"``, perhaps from ``ckpt_path`` on."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"strategy": "ddp", "accelerator": "cpu", "devices": devices, "max_epochs": 1, **quiet, **options}
    resumed_from = given.pop("ckpt_path", None)
    trainer = L.Trainer(**given, callbacks=callbacks)
    loaders = (DataLoader(Rows(2 * steps * devices), batch_size=2), DataLoader(Rows(4), batch_size=2))
    trainer.fit(module, *loaders, ckpt_path=resumed_from)
    return trainer


def named(report: BubbleReport, name: str) -> Any:
    """Figures of the exchanges of a name."""
    return next(figures for figures in report.exchanges if figures.name == name)
