"""A SIGTERM to any of the ranks stops all of them at the same step, so that a checkpoint can be saved there."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.checkpoint import sharded_folder
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, trainer

EPOCHS = 3


class Evicted(Recommender):
    """Some ranks send themselves a SIGTERM in a hook, the ``at``-th time it is called."""

    def __init__(self, ranks: Collection[int], hook: str = "training_step", at: int = 3) -> None:
        super().__init__()
        self.ranks, self.hook, self.left = ranks, hook, at
        self.validated = 0

    def _signal(self, hook: str) -> None:
        if hook == self.hook and self.global_rank in self.ranks:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self._signal("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._signal("on_before_optimizer_step")

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated += 1
        self._signal("validation_step")
        super().validation_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self._signal("on_train_end")


def _fit(
    module: Recommender,
    path: Path | None = None,
    overlap: bool = True,
    resume: bool = False,
    saving: dict[str, Any] | None = None,
    **options: Any,
) -> bool:
    """Return whether a SIGTERM has stopped training."""
    data = Samples(64)
    datamodule = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, val_dataset=Samples(64), balance=REPEATS)
    callbacks: list[L.Callback] = [] if path is None else [OnExceptionCheckpoint(path)]
    run = trainer(
        strategy=FreeScaleStrategy(overlap=overlap, **(saving or {})),
        devices=int(os.environ["WORLD_SIZE"]),
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        **{"max_epochs": EPOCHS, "limit_val_batches": 0, **options},
    )
    L.seed_everything(7, verbose=False)
    try:
        run.fit(module, datamodule, ckpt_path=path / "on_exception.ckpt" if path is not None and resume else None)
    except SIGTERMException as stopped:
        assert run.received_sigterm
        assert re.fullmatch(r"rank \d was told to stop, by SIGTERM: all ranks stop here", str(stopped.code)), "not status 0"
        return True
    return False


def _stop_and_resume(path: Path, ranks: Collection[int], hook: str, overlap: bool) -> tuple[bool, list[float], list[float]]:
    stopped, resumed = Evicted(ranks, hook), Recommender()
    ended = _fit(stopped, path, overlap)
    _fit(resumed, path, overlap, resume=True)
    return ended, stopped.losses, resumed.losses


def _losses(overlap: bool) -> list[float]:
    module = Recommender()
    assert not _fit(module, overlap=overlap)
    return module.losses


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("size", "ranks", "hook", "overlap"),
    [
        (2, [0], "training_step", True),
        (2, [1], "training_step", True),
        (2, [1], "on_before_optimizer_step", True),
        pytest.param(2, [0, 1], "training_step", True, marks=pytest.mark.slow),
        pytest.param(2, [1], "training_step", False, marks=pytest.mark.slow),
        (3, [1], "training_step", True),
        pytest.param(3, [0], "training_step", False, marks=pytest.mark.slow),
        pytest.param(3, [0, 1, 2], "on_before_optimizer_step", False, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_stop_at_one_step_and_the_run_goes_on_from_there(
    size: int, ranks: list[int], hook: str, overlap: bool, tmp_path: Path
) -> None:
    whole = run_distributed(_losses, size, overlap, timeout=100)
    seen = run_distributed(_stop_and_resume, size, tmp_path, ranks, hook, overlap, timeout=100)
    (steps,) = {len(stopped) for _, stopped, _ in seen}
    assert steps <= 3 + 2, "at the next step, or where a rank has been ahead"
    for (ended, stopped, resumed), losses in zip(seen, whole):
        assert ended
        assert stopped + resumed == losses


def _stop(ranks: Collection[int], hook: str, **options: Any) -> tuple[bool, int, int]:
    module = Evicted(ranks, hook, at=2)
    return _fit(module, **options), len(module.losses), module.validated


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("hook", ["sanity checking", "validation_step"])
def test_validation_stops_too(hook: str) -> None:
    sanity = {"num_sanity_val_steps": 10 if hook == "sanity checking" else 0}
    seen = run_distributed(_stop, 2, [1], "validation_step", limit_val_batches=8, timeout=100, **sanity)
    assert seen[0] == seen[1]
    stopped, steps, validated = seen[0]
    assert stopped and validated < 8
    assert steps == 0 if hook == "sanity checking" else steps > 0


@pytest.mark.usefixtures("patient")
def test_a_signal_after_the_last_step_is_heard_as_well() -> None:
    data_steps = EPOCHS * 8
    seen = run_distributed(lambda: _fit(Evicted([1], "training_step", at=data_steps)), 2, timeout=100)
    assert seen == [True, True]


def _saves(path: Path) -> list[str]:
    data = Samples(64)
    datamodule = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS)
    callbacks = [ModelCheckpoint(path, filename="{step}", save_on_exception=True)]
    run = trainer(devices=2, callbacks=callbacks, max_epochs=EPOCHS, enable_checkpointing=True)
    with pytest.raises(SIGTERMException):
        run.fit(Evicted([1]), datamodule)
    return [str(run.global_step), *sorted(path.name for path in path.iterdir())]


@pytest.mark.usefixtures("patient")
def test_a_model_checkpoint_that_saves_on_exceptions_saves_the_last_state(tmp_path: Path) -> None:
    for step, *files in run_distributed(_saves, 2, tmp_path, timeout=100):
        assert files == [f"step={step}.ckpt"]


def _save_in_background(path: Path) -> bool:
    write = sharded_folder.write

    def slowly(*args: Any) -> None:
        time.sleep(1.0)
        write(*args)

    sharded_folder.write = slowly
    assert _fit(Evicted([1]), path, saving={"checkpoint": "sharded", "async_save": True})
    return (path / "on_exception.ckpt").exists()


@pytest.mark.usefixtures("patient")
def test_what_is_saved_in_the_background_is_whole_when_the_run_ends(tmp_path: Path) -> None:
    assert run_distributed(_save_in_background, 2, tmp_path, timeout=100) == [True, True]


def _broadcasts() -> int:
    calls, broadcast = [0], torch.distributed.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return broadcast(tensor, *args, **kwargs)

    torch.distributed.broadcast = counted
    _fit(Recommender())
    return calls[0]


def test_training_makes_no_broadcast_for_it() -> None:
    assert run_distributed(_broadcasts, 2) == [0, 0]
