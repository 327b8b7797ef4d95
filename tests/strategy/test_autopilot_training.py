"""The autopilot in real fits, in which steps sleep as long as their settings say, outside of compute."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.data import BalanceOptions
from lightning_freescale.embeddings.overlap import WeightGradientsLast
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import Recommender, Samples, collate, trainer
from tests.strategy.test_balance_monitor import Kept

Seconds = Callable[[bool, int], float]
HELPS: Seconds = lambda split, parts: 0.0 if split else 0.06  # noqa: E731 (a parameter)
HARMS: Seconds = lambda split, parts: 0.06 if split else 0.0  # noqa: E731 (a parameter)


class Sleeper(Recommender):
    """Notes every step's settings, and sleeps after it."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__("adagrad")
        self.seconds, self.dropout = seconds, 0.2
        self.seen: list[tuple[bool, int]] = []
        self._parts = 0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self._split = any(isinstance(mode, WeightGradientsLast) for mode in _get_current_function_mode_stack())
        self._parts += 1
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((self._split, self._parts))
        self._parts = 0
        time.sleep(self.seconds(*self.seen[-1]))


def _data(micro_batches: Any = 1) -> FreeScaleDataModule:
    samples = Samples(1600)
    return FreeScaleDataModule(samples, samples.lengths, 4, micro_batches=micro_batches, collate_fn=collate)


def _fit(
    seconds: Seconds, target: float | None, micro_batches: Any = 1, steps: int = 110, **options: Any
) -> tuple[Sleeper, L.Trainer, str]:
    told, room = io.StringIO(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.StreamHandler(told)
    room.addHandler(handler)
    torch.manual_seed(0)
    module = options.pop("make", Sleeper)(seconds)
    ckpt_path = options.pop("ckpt_path", None)
    strategy = FreeScaleStrategy(target_bubble_reduction=target, **options.pop("strategy", {}))
    fitting = trainer(devices=2, strategy=strategy, max_epochs=4, max_steps=steps, **options)
    fitting.fit(module, datamodule=_data(micro_batches), ckpt_path=ckpt_path)
    room.removeHandler(handler)
    return module, fitting, told.getvalue()


def _found(*args: Any, **options: Any) -> dict[str, Any]:
    logger = Kept()
    module, fitting, told = _fit(*args, logger=logger, **options)
    settings = fitting.strategy.chosen_settings
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {
        "seen": module.seen,
        "losses": module.losses,
        "weights": state["state_dict"],
        "kept": settings.get("kept"),
        "frozen": settings.get("frozen"),
        "told": told,
        "logged": logger.of("freescale/autopilot"),
    }


def test_what_helps_is_chosen_and_changes_no_bits() -> None:
    chosen = run_distributed(_found, 2, HELPS, 0.1)
    for found in chosen:
        assert found["kept"] == {"split_backward": True}
        assert found["frozen"]
        assert {split for split, _ in found["seen"][:60]} == {False, True}, "they took turns"
        assert set(found["seen"][-10:]) == {(True, 1)}
    assert chosen[0]["seen"] == chosen[1]["seen"], "all ranks alike in every step"
    told, logged = chosen[0]["told"], chosen[0]["logged"]
    assert "FreeScaleStrategy(target_bubble_reduction=0.1): chooses split_backward from False, True. Not micro_batches" in told
    assert "split_backward=True from step " in told and "the bubble was " in told
    assert "Final, as the target is met: split_backward=True" in told
    assert logged[-1]["freescale/autopilot/reduction"] >= 0.1
    assert logged[0]["freescale/autopilot/bubble_after"] < logged[0]["freescale/autopilot/bubble_before"]
    for found, plain in zip(chosen, run_distributed(_found, 2, lambda split, parts: 0.0, None)):
        assert found["losses"] == plain["losses"]
        assert_same(found["weights"], plain["weights"])
        assert not any(split for split, _ in plain["seen"]), "nothing is tried that nobody has asked for"
        assert plain["kept"] is None and plain["logged"] == []


def test_what_harms_is_tried_once_and_refused() -> None:
    for found in run_distributed(_found, 2, HARMS, 0.9):
        assert found["kept"] == {"split_backward": False}
        assert found["frozen"]
        tried = [step for step, (split, _) in enumerate(found["seen"]) if split]
        assert tried and max(tried) < 60


def test_micro_batches_are_chosen_where_they_may_be() -> None:
    seconds: Seconds = lambda split, parts: {1: 0.08, 2: 0.0, 4: 0.05}[parts]  # noqa: E731
    ranks = run_distributed(_found, 2, seconds, 0.99, "auto", steps=280)
    assert ranks[0]["seen"] == ranks[1]["seen"]
    for found in ranks:
        assert found["kept"]["micro_batches"] == 2
        assert found["frozen"]
        assert {parts for _, parts in found["seen"][-10:]} == {2}
        assert {parts for _, parts in found["seen"]} == {1, 2, 4}
        assert {parts for _, parts in found["seen"][:40]} == {1}, "one setting after the other"


def _resumed(folder: str) -> list[Any]:
    keep = lambda: [ModelCheckpoint(folder, every_n_train_steps=60, save_top_k=-1, filename="{step}")]  # noqa: E731
    whole, *_ = _fit(HELPS, 0.1, callbacks=keep(), enable_checkpointing=True, steps=180)
    resumed = []
    for step in (60, 120):
        module, fitting, _ = _fit(HELPS, 0.1, ckpt_path=f"{folder}/step={step}.ckpt", steps=180)
        resumed.append((step, module.seen, module.losses, fitting.strategy.chosen_settings["kept"]))
    return [whole.seen, whole.losses, resumed]


def test_a_run_that_resumes_goes_on_bitwise(tmp_path: Any) -> None:
    for _, losses, resumed in run_distributed(_resumed, 2, str(tmp_path)):
        for step, seen, again, kept in resumed:
            assert again == losses[step:]
            assert kept == {"split_backward": True}
            assert seen[0] == (True, 1), "what was kept goes on"
        assert set(resumed[1][1]) == {(True, 1)}, "what was final is not tried again"


class AsksForTheLoader(Sleeper):
    """In ``configure_optimizers``, which comes before a checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def _goes_on(folder: str, make: Any, frozen: bool) -> Any:
    """Resume from the checkpoint of a run that has kept both settings, and has or has not come to its end."""
    seconds: Seconds = lambda split, parts: 0.0  # noqa: E731
    keep, path = [ModelCheckpoint(folder, every_n_train_steps=2, filename="kept")], f"{folder}/kept.ckpt"
    module, fitting, _ = _fit(seconds, 0.5, "auto", steps=2, make=make, callbacks=keep, enable_checkpointing=True)
    if fitting.is_global_zero:
        saved = torch.load(path, weights_only=False)
        kept = {"split_backward": True, "micro_batches": 2}
        saved["freescale"]["autopilot"] |= {"kept": kept, "untried": [], "remaining": 0.4, "frozen": frozen}
        saved["FreeScaleDataModule"]["micro_batches"] = 2 if frozen else None
        torch.save(saved, path)
    dist.barrier()
    module, fitting, _ = _fit(seconds, 0.5, "auto", steps=40, make=make, ckpt_path=path)
    return module.seen, fitting.strategy.chosen_settings


@pytest.mark.parametrize("make", [Sleeper, AsksForTheLoader])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_that_resumes_has_what_was_kept(tmp_path: Any, make: Any, frozen: bool) -> None:
    for seen, settings in run_distributed(_goes_on, 2, str(tmp_path), make, frozen):
        assert set(seen[:4]) == {(True, 2)}
        assert set(seen) == ({(True, 2)} if frozen else {(True, 2), (False, 1)}), "against the beginning"
        assert settings["start"] == {"split_backward": False, "micro_batches": 1}


def _beside_calibration() -> Any:
    samples = Samples(1600)
    balance = BalanceOptions(calibrate=True)
    data = FreeScaleDataModule(samples, samples.lengths, 4, balance=balance, collate_fn=collate)
    logger, module = Kept(), Sleeper(HELPS)
    strategy = FreeScaleStrategy(target_bubble_reduction=0.1)
    fitting = trainer(devices=2, strategy=strategy, max_epochs=1, max_steps=110, logger=logger)
    fitting.fit(module, datamodule=data)
    return strategy.chosen_settings["kept"], len(logger.of("freescale/calibration")), strategy.timeline.enabled


def test_beside_calibration() -> None:
    (kept, fits, recording), (other, *_) = run_distributed(_beside_calibration, 2)
    assert kept == other == {"split_backward": True}
    assert fits >= 3, "it goes on when the autopilot has ended"
    assert not recording


def _profiled(folder: str) -> Any:
    profiler = BubbleProfiler(folder, every_n_steps=20, warmup_steps=1, verbose=False)
    _, fitting, _ = _fit(HELPS, 0.1, callbacks=[profiler])
    steps = None if profiler.report is None else len(profiler.report.steps)
    return fitting.strategy.chosen_settings["kept"], steps, fitting.strategy.timeline.enabled


def test_beside_a_profiler(tmp_path: Any) -> None:
    ranks = run_distributed(_profiled, 2, str(tmp_path))
    assert [kept for kept, *_ in ranks] == [{"split_backward": True}] * 2
    assert ranks[0][1] > 90
    assert [enabled for *_, enabled in ranks] == [False, False]


class Plain(L.LightningModule):
    """Has no embedding collection."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _nothing_to_choose() -> list[str]:
    *_, without = _fit(HELPS, 0.1, "auto", steps=3, strategy={"overlap": False})
    told, room = io.StringIO(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    room.addHandler(logging.StreamHandler(told))
    strategy = FreeScaleStrategy(target_bubble_reduction=0.1)
    trainer(devices=2, strategy=strategy, max_epochs=1).fit(Plain(), DataLoader(torch.ones(32, 4), batch_size=4))
    return [without, told.getvalue()]


def test_it_says_where_there_is_nothing_to_choose() -> None:
    without, plain = run_distributed(_nothing_to_choose, 2)[0]
    asked = "FreeScaleStrategy(target_bubble_reduction=0.1): there is nothing to choose from, because "
    assert asked + "FreeScaleStrategy(overlap=False) hides no exchange" in without
    assert asked + "the module has no embedding collection" in plain


@pytest.mark.parametrize("target", [0, -0.5, 1.5, 90])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match=rf"target_bubble_reduction={target}\): pass the share of the bubble"):
        FreeScaleStrategy(target_bubble_reduction=target)


def _alone() -> Any:
    _, fitting, told = _fit(HARMS, 0.9, steps=20)
    return fitting.strategy.chosen_settings["frozen"], told


def test_it_says_where_training_ends_before_the_choice() -> None:
    frozen, told = run_distributed(_alone, 2)[0]
    assert not frozen
    assert "training has ended before all was tried; split_backward=False so far" in told
