"""Folders that are written while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.checkpoint import sharded_folder
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, trainer

WRITE = sharded_folder.write_pieces


class SaveAt(L.Callback):
    """Saves once, without stopping; notes which steps came while that was being written."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self.meanwhile: list[int] = []
        self.may_write = threading.Event()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
        elif trainer.global_step > self.step and not self.path.exists():
            self.meanwhile.append(trainer.global_step)
        if trainer.global_step == self.step + 3:
            self.may_write.set()


def _fit(
    callbacks: list[L.Callback], path: Path | None = None, async_save: bool = True
) -> tuple[L.Trainer, list[float], dict[str, Any]]:
    torch.manual_seed(0)
    data, module = Samples(72), Recommender("rowwise_adagrad")
    strategy = FreeScaleStrategy(checkpoint="sharded", async_save=async_save)
    kept = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    fit = trainer(devices=2, max_epochs=2, callbacks=callbacks, strategy=strategy, enable_checkpointing=kept)
    fit.fit(module, FreeScaleDataModule(data, data.lengths, 6, collate_fn=collate, balance=REPEATS), ckpt_path=path)
    return fit, module.losses, fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]


def _save_slowly(path: Path) -> tuple[list[float], list[int]]:
    saving = SaveAt(4, path)

    def slowly(*args: Any) -> None:
        assert saving.may_write.wait(60)
        WRITE(*args)

    sharded_folder.write_pieces = slowly
    _, losses, _ = _fit([saving])
    assert path.is_dir(), "a fit ends when what it saves is whole"
    return losses, saving.meanwhile


def _resume(path: Path) -> tuple[list[float], dict[str, Any]]:
    return _fit([], path)[1:]


def test_steps_go_on_meanwhile_and_are_not_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    first = run_distributed(_save_slowly, 2, path)
    second = run_distributed(_resume, 2, path)
    for (losses, meanwhile), (after, _) in zip(first, second):
        assert meanwhile[:2] == [5, 6]
        assert losses[4:] == after


def _save_often(folder: Path, fails_from: int) -> str:
    calls = 0

    def fails(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= fails_from:
            raise OSError(28, "No space left on device")
        WRITE(*args)

    sharded_folder.write_pieces = fails
    try:
        _fit([ModelCheckpoint(folder, every_n_train_steps=4)])
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def test_of_those_that_are_replaced_the_last_stays(tmp_path: Path) -> None:
    assert run_distributed(_save_often, 2, tmp_path, 99) == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=1-step=12.ckpt"]


def test_one_that_cannot_be_written_is_told_and_the_one_before_stays(tmp_path: Path) -> None:
    told = run_distributed(_save_often, 2, tmp_path, 3)
    assert all("No space left" in error for error in told)
    assert [path.name for path in tmp_path.glob("[!.]*.ckpt")] == ["epoch=1-step=8.ckpt"]


def test_a_single_file_is_not_written_in_the_background() -> None:
    with pytest.raises(ValueError, match=r"async_save=True.*pass checkpoint='sharded'"):
        FreeScaleStrategy(async_save=True)
    with pytest.raises(ValueError, match=r"checkpoint='both'.*'single' or 'sharded'"):
        FreeScaleStrategy(checkpoint="both")  # type: ignore[arg-type]


def _fail(path: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                raise ValueError("the needle")

    _fit([SaveAt(4, path), Fails()])


@pytest.mark.usefixtures("patient")
def test_an_error_of_training_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="the needle"):
        run_distributed(_fail, 2, tmp_path / "a.ckpt", timeout=60)
