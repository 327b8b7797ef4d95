"""A SIGTERM to any of the ranks stops all of them at the same step, so that a checkpoint can be saved there.

The exit status is 143 on every rank, and callbacks receive the rank and the cause.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.checkpoint import sharded_folder
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import REPEATS, ActsInHook, Recommender, Samples, collate, trainer
from tests.strategy.test_causes import ENDS, _errors

EPOCHS = 3


class Evicted(ActsInHook):
    """Some ranks send themselves a SIGTERM in a hook. Counts the batches of validation."""

    validated = 0

    def __init__(self, ranks: Collection[int], hook: str = "training_step", at: int = 3) -> None:
        super().__init__(hook, ranks, ENDS["is terminated"], at)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated += 1
        super().validation_step(batch, batch_idx)


def _fit(
    module: Recommender,
    path: Path | None = None,
    resume: bool = False,
    callback: Any = OnExceptionCheckpoint,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> bool:
    """Return whether a SIGTERM has stopped training."""
    data = Samples(64)
    datamodule = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, val_dataset=Samples(64), **REPEATS)
    heard: list[str] = []
    hearing = LambdaCallback(on_exception=lambda *given: heard.append(str(given[-1])))
    callbacks: list[L.Callback] = [hearing] if path is None else [hearing, callback(path)]
    run = trainer(
        strategy=FreeScaleStrategy(**(strategy or {})),
        devices=int(os.environ["WORLD_SIZE"]),
        callbacks=callbacks,
        enable_checkpointing=path is not None,
        **{"max_epochs": EPOCHS, "limit_val_batches": 0, **options},
    )
    L.seed_everything(7, verbose=False)
    try:
        run.fit(module, datamodule, ckpt_path=path / "on_exception.ckpt" if path is not None and resume else None)
    except SIGTERMException as stopped:
        assert run.received_sigterm
        assert stopped.code == 143
        assert re.fullmatch(r"rank \d received SIGTERM: all ranks stop here", str(stopped))
        assert heard == [str(stopped)]
        return True
    return False


def _stop_and_resume(path: Path, ranks: Collection[int], hook: str, overlap: bool) -> tuple[bool, list[float], Any, Any]:
    modules: list[Recommender] = []
    for make in (Recommender, lambda: Evicted(ranks, hook), Recommender):
        torch.manual_seed(0)
        modules.append(make())
    whole, stopped, resumed = modules
    options: dict[str, Any] = {"strategy": {"overlap": overlap}}
    broadcast, torch.distributed.broadcast = torch.distributed.broadcast, None  # Lightning's, before each batch, is left out
    assert not _fit(whole, **options)
    torch.distributed.broadcast = broadcast
    ended = _fit(stopped, path, **options)
    _fit(resumed, path, resume=True, **options)
    return ended, whole.losses, stopped.losses, resumed.losses


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("size", "ranks", "hook", "overlap"),
    [
        (2, [1], "on_before_optimizer_step", True),
        (3, [1], "training_step", False),
        pytest.param(2, [0], "training_step", True, marks=pytest.mark.slow),
        pytest.param(2, [0, 1], "training_step", True, marks=pytest.mark.slow),
        pytest.param(3, [0, 1, 2], "on_before_optimizer_step", False, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_stop_at_one_step_and_the_run_goes_on_from_there(
    size: int, ranks: list[int], hook: str, overlap: bool, tmp_path: Path
) -> None:
    found = run_distributed(_stop_and_resume, size, tmp_path, ranks, hook, overlap, timeout=100)
    (steps,) = {len(stopped) for _, _, stopped, _ in found}
    assert steps <= 3 + 2, "at the next step, or where a rank has been ahead"
    for ended, whole, stopped, resumed in found:
        assert ended
        assert stopped + resumed == whole


def _stop(path: Path) -> list[Any]:
    """Fit until a signal in several places, with several ways to save; return what came of each."""
    found: list[Any] = []
    for sanity_steps in (10, 0):
        module = Evicted([1], "validation_step", at=2)
        ended = _fit(module, limit_val_batches=8, num_sanity_val_steps=sanity_steps)
        found.append((ended, len(module.losses) > 0, module.validated < 8, module.validated))
    found.append(_fit(Evicted([1], at=EPOCHS * 8)))  # after the last step

    def checkpoint(folder: Path) -> ModelCheckpoint:
        return ModelCheckpoint(folder, filename="{step}", save_on_exception=True)

    module = Evicted([1])
    assert _fit(module, path, callback=checkpoint)
    found.append([path.name for path in path.iterdir()] == [f"step={len(module.losses)}.ckpt"])
    write = sharded_folder.write

    def slowly(*args: Any) -> None:
        time.sleep(1.0)
        write(*args)

    sharded_folder.write = slowly
    assert _fit(Evicted([1]), path, strategy={"checkpoint": "async"})
    found.append((path / "on_exception.ckpt").exists())
    return found


@pytest.mark.usefixtures("patient")
def test_validation_stops_too_and_what_is_saved_is_whole(tmp_path: Path) -> None:
    first, second = run_distributed(_stop, 2, tmp_path, timeout=100)
    sanity, validation, *others = first
    assert first == second
    assert sanity[:3] == (True, False, True) and validation[:3] == (True, True, True)
    last_step, model_checkpoint, in_background = others
    assert last_step, "a signal after the last step is heard as well"
    assert model_checkpoint and in_background


def _start(hook: str, ranks: Collection[int], how: str) -> tuple[type, Any, str]:
    """Return the type and exit status of the exception that ends the fit, and the text that callbacks receive."""
    heard, data = [], Samples(64)
    hearing = LambdaCallback(on_exception=lambda *given: heard.append(str(given[-1])))
    strategy = FreeScaleStrategy(timeout=timedelta(seconds=10))
    run = trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), callbacks=[hearing])
    with pytest.raises(BaseException) as ended:  # noqa: PT011 (which one is compared)
        run.fit(ActsInHook(hook, ranks, ENDS[how]), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return ended.type, getattr(ended.value, "code", None), heard[-1]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("size", "hook", "ranks", "how"),
    [
        (1, "configure_optimizers", [0], "is terminated"),
        (2, "setup", [1], "is terminated"),
        pytest.param(2, "setup", [0], "is terminated twice", marks=pytest.mark.slow),
        pytest.param(3, "configure_model", [0, 1], "is terminated", marks=pytest.mark.slow),
        pytest.param(2, "configure_optimizers", [1], "is terminated", marks=pytest.mark.slow),
        pytest.param(2, "on_fit_start", [0], "is terminated", marks=pytest.mark.slow),
    ],
)
def test_a_signal_before_training_ends_all_ranks_with_its_status(size: int, hook: str, ranks: list[int], how: str) -> None:
    for rank, (kind, code, text) in enumerate(run_distributed(_start, size, hook, ranks, how, init=False)):
        assert (kind, code) == (SIGTERMException, 143), text
        own, others = f"rank {rank} received SIGTERM", [f"rank {other} received SIGTERM" for other in ranks]
        assert own in text if rank in ranks else any(other in text for other in others)


def _save(path: Path, ranks: Collection[int], inside: bool) -> None:
    """Raise an error with the exit status and the text of the exception that ends a save in or after a fit.

    Inside, it is saved in ``on_fit_end``, where Lightning handles no signals any more.
    """
    data, module = Samples(64), ActsInHook("on_save_checkpoint", ranks, ENDS["is terminated"])
    module.on_save_checkpoint = lambda checkpoint: module.pass_by("on_save_checkpoint")
    saving = LambdaCallback(on_fit_end=lambda run, _: run.save_checkpoint(path))
    run = trainer(devices=int(os.environ["WORLD_SIZE"]), callbacks=[saving] if inside else [])
    try:
        run.fit(module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate))
        run.save_checkpoint(path)
    except SystemExit as ended:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        raise RuntimeError(f"ended with {ended.code}: {ended}") from None


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("size", "ranks", "inside"), [(1, [0], False), (2, [0], True), (2, [1], True), (3, [1], False)])
def test_a_signal_while_a_checkpoint_is_saved_after_training_ends_all_ranks_with_its_status(
    size: int, ranks: list[int], inside: bool, tmp_path: Path
) -> None:
    errors = _errors(size, tmp_path / "a.ckpt", ranks, inside, start=_save)
    assert errors.keys() == set(range(size))
    for error in errors.values():
        assert re.search(rf"ended with 143: .*rank {ranks[0]} received SIGTERM", error, re.DOTALL), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("hook", ["setup", pytest.param("configure_optimizers", marks=pytest.mark.slow)])
def test_callbacks_receive_rank_and_cause_of_a_failure_before_training(hook: str) -> None:
    (_, _, heard), own = run_distributed(_start, 2, hook, [1], "raises", init=False)
    assert own == (KeyError, None, "'the needle'")
    assert "rank 1 has failed first: KeyError: 'the needle'" in heard
