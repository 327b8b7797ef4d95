"""Corners of a run in which the profiler must not be in the way, nor tell what is not so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.data import BalanceOptions
from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, fit, named, profiler
from tests.helpers.recommender import Recommender, Samples, collate, trainer

DELAY = 0.2


def _folder_in_a_file(folder: str) -> tuple[str, bool]:
    original = dist.all_reduce
    Path(folder, "file").touch()
    with pytest.raises(OSError, match=r"dirpath=.*pass another one") as raised:
        fit(Plain(), [profiler(Path(folder, "file", "bubbles"))])
    return type(raised.value).__name__, dist.all_reduce is original


def test_a_folder_that_cannot_be_written_is_refused_by_all_ranks(tmp_path: Path) -> None:
    assert run_distributed(_folder_in_a_file, 2, str(tmp_path), timeout=60) == [("OSError", True)] * 2


class Vanishing(L.Callback):
    """The folder is gone when the report is to be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.is_global_zero:
            self.folder.rmdir()
            self.folder.touch()


@pytest.mark.slow
def test_a_disk_that_fails_later_is_a_warning(tmp_path: Path) -> None:
    def run() -> tuple[bool, int]:
        callback, folder = profiler(tmp_path / "bubbles"), tmp_path / "bubbles"
        if dist.get_rank():
            fit(Plain(), [callback, Vanishing(folder)])
        else:
            with pytest.warns(UserWarning, match="could not write its files"):
                fit(Plain(), [callback, Vanishing(folder)])
        return callback.report is not None, len(callback.files)

    assert run_distributed(run, 2) == [(True, 0), (False, 0)]


def _then_validation_fails(folder: str) -> bool:
    class Fails(Plain):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            raise ValueError("bad metric")

    module, callback = Fails(), profiler(folder)
    after = fit(module, [callback], limit_val_batches=0)
    after.limit_val_batches = 1
    with pytest.raises(ValueError, match="bad metric"):
        after.validate(module, DataLoader(torch.ones(4, 4), batch_size=2), verbose=False)
    return callback.report is not None


@pytest.mark.slow
def test_a_failure_after_the_fit_leaves_its_report(tmp_path: Path) -> None:
    assert run_distributed(_then_validation_fails, 2, str(tmp_path)) == [True, False]
    assert read(tmp_path / "report.json")["status"]["complete"]


def test_two_profilers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="several BubbleProfilers"):
        fit(Plain(), [profiler(tmp_path), profiler(tmp_path)], devices=1, strategy="auto")


def test_a_fit_without_a_step_leaves_everything_as_it_was(tmp_path: Path) -> None:
    callback = profiler(tmp_path)
    after = fit(Plain(), [callback], devices=1, strategy="auto", limit_train_batches=0)
    assert "training_step" not in vars(after.strategy)
    assert callback.report is None


class Normed(Plain):
    """With buffers, which DDP broadcasts before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(DELAY * (1 - self.global_rank))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(self.norm(batch)).square().mean()


def _normed(folder: str) -> Any:
    callback = profiler(folder)
    fit(Normed(), [callback], limit_val_batches=0)
    return callback.report


@pytest.mark.slow
def test_ddps_wait_for_buffers_is_not_compute(tmp_path: Path) -> None:
    report = run_distributed(_normed, 2, str(tmp_path))[0]
    waited, computed = (np.median(column(report.breakdown, name), axis=0) for name in ("straggler_wait", "compute"))
    assert 0.8 * DELAY < waited[1] < 1.5 * DELAY
    assert computed[1] < 0.5 * DELAY
    assert named(report, "buffers").per_step == 1


class SlowStart(IterableDataset):
    """Takes a while until the first sample comes."""

    def __iter__(self) -> Iterator[Tensor]:
        time.sleep(DELAY)
        yield from torch.ones(2, 4)


class Validates(Plain):
    """On data that start slowly; a rank comes late to what is logged."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(DELAY * self.global_rank)
        self.log("val", batch.mean(), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(SlowStart(), batch_size=2)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(32, 4), batch_size=2)


def _validates(folder: str) -> Any:
    callback = profiler(folder)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=2, val_check_interval=2, num_sanity_val_steps=0,
        callbacks=[callback], **quiet,
    ).fit(Validates())  # fmt: skip
    return callback.report


@pytest.mark.slow
def test_validation_is_out_of_steps_and_exchanges(tmp_path: Path) -> None:
    report = run_distributed(_validates, 2, str(tmp_path))[0]
    after = np.isin(report.steps, range(2, 16, 2))  # two epochs of 8 steps, validation after every second
    wall = column(report.breakdown, "wall")
    assert after.sum() == 7
    # the median, as a single step may be slow for reasons of the machine; with either delay in them, it would be DELAY more
    assert np.median(wall[after]) < np.median(wall[~after]) + DELAY / 2
    for name in ("straggler_wait", "transfer"):
        told = sum(getattr(figures, name) for figures in report.exchanges)
        assert told == pytest.approx(column(report.breakdown, name).mean(), rel=1e-6)


class Patched(L.Callback):
    """Whether collectives are on the timeline while a step runs."""

    def __init__(self) -> None:
        self.original, self.seen = dist.all_reduce, False

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen = dist.all_reduce is not self.original


def _calibrates() -> tuple[bool, bool]:
    data, patched = Samples(64), Patched()
    module = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=BalanceOptions(calibrate=True))
    trainer(devices=2, strategy=FreeScaleStrategy(overlap=False), callbacks=[patched]).fit(Recommender(), module)
    return patched.seen, dist.all_reduce is patched.original


@pytest.mark.slow
def test_calibration_alone_does_not_take_waits_for_compute() -> None:
    assert run_distributed(_calibrates, 2) == [(True, True)] * 2
