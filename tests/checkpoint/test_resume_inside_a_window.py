"""A run that resumes where gradients are being accumulated: they are in no checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.testing import run_distributed
from tests.checkpoint.test_resume import Seen
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import Samples, collate, trainer


class SaveAfterBatches(L.Callback):
    """Saves after some batches of the first epoch."""

    def __init__(self, path: str, after: tuple[int, ...]) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx + 1 in self.after:
            trainer.save_checkpoint(f"{self.path}{batch_idx + 1}", weights_only=batch_idx == 0)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.path}_epoch")


class CutShort(Seen):
    """Its epochs end after 5 batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def _accumulate(
    path: str, after: tuple[int, ...] = (), resume: Any = None, make: type[Seen] = Seen
) -> tuple[list[float], dict[str, Any], list[str]]:
    """Losses, weights and what is said of a run with windows of 3 batches; 8 batches an epoch."""
    torch.manual_seed(0 if resume is None else 7)
    module, data = make("adagrad"), Samples(64)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate)
    fit = trainer(devices=2, max_epochs=2, accumulate_grad_batches=3, callbacks=[SaveAfterBatches(path, after)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(module, loader, ckpt_path=None if resume is None else f"{path}{resume}")
    told = [str(one.message) for one in caught if "holds no gradients" in str(one.message)]
    return module.losses, fit.strategy.lightning_module_state_dict(), told


def _resume_accumulating(path: str) -> list[tuple[list[float], dict[str, Any], list[str]]]:
    whole = _accumulate(path, (1, 4, 5, 6, 8))
    return [whole, _accumulate(path, resume=6), _accumulate(path, resume=5)]


def test_resume_inside_a_window(tmp_path: Path) -> None:
    """Gradients are in no checkpoint, which is said once when it is written; after an optimizer step a resume is bitwise."""
    ranks = run_distributed(_resume_accumulating, 2, str(tmp_path / "batch"))
    for whole, exact, inside in ranks:
        assert exact[0] == whole[0][6:]
        assert inside[0][:1] == whole[0][5:6] and inside[0][1:] != whole[0][6:], "the step after batch 6 lacks 4 and 5"
    assert [len(whole[2]) for whole, *_ in ranks] == [1, 0]
    assert "Trainer(accumulate_grad_batches=3)" in ranks[0][0][2][0]
    assert_same(ranks[0][1][1], ranks[0][0][1])


def _save_between_windows(path: str) -> list[list[str]]:
    return [_accumulate(path, (1, 3, 6, 8))[2], _accumulate(path, make=CutShort)[2]]


def test_checkpoints_that_lack_no_gradients_say_nothing(tmp_path: Path) -> None:
    """Weights alone, after an optimizer step, and where the epoch ends and Lightning forgets what was accumulated."""
    assert run_distributed(_save_between_windows, 2, str(tmp_path / "batch")) == [[[], []]] * 2
