"""A plain LightningModule without embedding collections, whose steps take a known time, and what its reports say of that."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_freescale import BubbleProfiler
from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.reporting.report import BubbleReport

DELAY = 0.2
"""Seconds; long beside all that a step takes by itself."""


class Rows(Dataset):
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


def profiler(folder: str | Path | None, warmup_steps: int = 1, **options: Any) -> BubbleProfiler:
    """A quiet one that exchanges often."""
    callback = BubbleProfiler(folder, **{"every_n_steps": 4, "verbose": False, **options})
    callback.options = replace(callback.options, warmup_steps=warmup_steps)
    return callback


def fit(module: L.LightningModule, callbacks: list[L.Callback], steps: int = 14, devices: int = 2, **options: Any) -> L.Trainer:
    """One epoch of ``steps`` batches per rank under ``"ddp"``, perhaps from ``ckpt_path`` on, or of other ``rows``."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"strategy": "ddp", "accelerator": "cpu", "devices": devices, "max_epochs": 1, **quiet, **options}
    resumed_from = given.pop("ckpt_path", None)
    rows = given.pop("rows", Rows(2 * steps * devices)), given.pop("validation_rows", Rows(4))
    trainer = L.Trainer(**given, callbacks=callbacks)
    trainer.fit(module, *(DataLoader(each, batch_size=2) for each in rows), ckpt_path=resumed_from)
    return trainer


def profiled(folder: str | Path, module: L.LightningModule, profiling: dict[str, Any] | None = None, **options: Any) -> Any:
    callback = profiler(folder, **(profiling or {}))
    fit(module, [callback], **options)
    return callback.report


def medians(report: BubbleReport, name: str) -> list[float]:
    """Of a part of the steps, in seconds, for each rank."""
    return np.median(column(report.breakdown, name), axis=0).tolist()


def delayed(report: BubbleReport, **parts: tuple[float, ...]) -> list[str]:
    """Parts whose medians are not as many ``DELAY`` as given for each rank: 0.8 to 1.5 of them, or below 0.3 for none."""
    wrong = []
    for name, expected in parts.items():
        found = [seconds / DELAY for seconds in medians(report, name)]
        for rank, (times, delays) in enumerate(zip(expected, found, strict=True)):
            if not (0.8 * times < delays < 1.5 * times if times else delays < 0.3):
                wrong.append(f"{name} of rank {rank}: {delays:.2f} delays, not {times}")
    return wrong


def named(report: BubbleReport, name: str) -> Any:
    return next(figures for figures in report.exchanges if figures.name == name)
