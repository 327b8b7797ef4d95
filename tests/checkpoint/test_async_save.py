"""Folders that are written in the background during training."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.checkpoint import sharded_folder
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.fits import Fitted, Large, SaveAt, fit

WRITE = sharded_folder.write_pieces
ASYNC = {"checkpoint": "async"}


class Meanwhile(L.Callback):
    """A model that records the steps before a folder exists, which may be written after step 7."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[int] = []
        self.may_write = threading.Event()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step > 4 and not self.path.exists():
            self.steps.append(trainer.global_step)
        if trainer.global_step == 7:
            self.may_write.set()


class SavesInVain(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            with pytest.raises(ValueError, match="unknown"):
                trainer.save_checkpoint("unknown://a.ckpt")


def _save_slowly(path: Path) -> tuple[Fitted, list[int]]:
    meanwhile = Meanwhile(path)

    def slowly(*args: Any, **options: Any) -> Any:
        assert meanwhile.may_write.wait(60)
        return WRITE(*args, **options)

    sharded_folder.write_pieces = slowly
    found = fit(Large, strategy=ASYNC, callbacks=[SavesInVain(), SaveAt(path, 4), meanwhile])
    assert path.is_dir(), "a fit ends when what it saves is whole"
    return found, meanwhile.steps


def test_steps_go_on_meanwhile_and_are_not_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    whole = run_distributed(_save_slowly, 2, path)
    resumed = run_distributed(fit, 2, Large, resume=path, strategy=ASYNC)
    for (straight, meanwhile), after in zip(whole, resumed):
        assert meanwhile[:2] == [5, 6]
        assert straight.losses[4:] == after.losses


def test_steps_of_one_process_go_on_meanwhile_after_a_save_has_failed(tmp_path: Path) -> None:
    ((_, meanwhile),) = run_distributed(_save_slowly, 1, tmp_path / "a.ckpt")
    assert meanwhile[:2] == [5, 6]


def _save_often(folder: Path, fails_from: int) -> str:
    calls = 0

    def fails(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= fails_from:
            raise OSError(28, "No space left on device")
        return WRITE(*args, **options)

    sharded_folder.write_pieces = fails
    try:
        fit(strategy=ASYNC, callbacks=[ModelCheckpoint(folder, every_n_train_steps=4)])
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def test_the_last_whole_one_stays(tmp_path: Path) -> None:
    """Check folders that replace each other. The third cannot be written, which ends the fit."""
    well, full = tmp_path / "well", tmp_path / "full"
    assert run_distributed(_save_often, 2, well, 99) == ["", ""]
    assert [path.name for path in well.iterdir()] == ["epoch=1-step=12.ckpt"]
    assert all("No space left" in error for error in run_distributed(_save_often, 2, full, 3))
    assert [path.name for path in full.iterdir()] == ["epoch=1-step=8.ckpt"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint='both'"):
        FreeScaleStrategy(checkpoint="both")


class Fails(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 5:
            raise ValueError("the needle")


@pytest.mark.usefixtures("patient")
def test_an_error_of_training_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="the needle"):
        run_distributed(fit, 2, strategy=ASYNC, callbacks=[SaveAt(tmp_path / "a.ckpt", 4), Fails()], timeout=60)


def _save_on_exception(folder: Path) -> bool:
    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(1.0)
        return WRITE(*args, **options)

    sharded_folder.write_pieces = slowly
    with pytest.raises(ValueError, match="the needle"):
        fit(strategy=ASYNC, callbacks=[OnExceptionCheckpoint(folder), Fails()])
    return (folder / "on_exception.ckpt").exists()


@pytest.mark.slow
def test_what_is_saved_because_of_an_error_is_whole_when_the_fit_ends(tmp_path: Path) -> None:
    assert run_distributed(_save_on_exception, 2, tmp_path) == [True, True]


def _remove_in_vain(path: Path) -> str:
    def refuse() -> None:
        raise PermissionError(f"{path} cannot be removed")

    class Removes(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 6 and trainer.is_global_zero:
                trainer.strategy.files.remove(refuse)

    found = fit(Large, strategy=ASYNC, callbacks=[SaveAt(path, 5), Removes()])
    return "".join(found.warned)


def test_a_failed_removal_after_a_save_is_reported(tmp_path: Path) -> None:
    first, second = run_distributed(_remove_in_vain, 2, tmp_path / "a.ckpt")
    assert "cannot be removed" in first and "cannot be removed" not in second
