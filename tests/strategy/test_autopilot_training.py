"""The autopilot in fits, by a clock on which a step takes as long as its settings say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.overrides import _get_current_function_mode_stack

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.callbacks.workload import settings_of
from lightning_freescale.embeddings.overlap import WeightGradientsLast
from lightning_freescale.strategy.tuning import autopilot, cost_calibrator, setting_trial
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_modules import AsksEarly
from tests.helpers.overlap_training import CountingModel, assert_same
from tests.helpers.plain_modules import profiler
from tests.helpers.recommender import Samples, collate, trainer
from tests.strategy.test_autopilot import Clock
from tests.strategy.test_balance_monitor import Kept, LogsAll

Seconds = Callable[[bool, int], float]
HELPS: Seconds = lambda split, parts: 1.0 if split else 2.0  # noqa: E731 (a parameter)


class Timed(CountingModel):
    """Keeps every step's settings, and takes as long as they say."""

    def __init__(self, seconds: Seconds, clock: Clock) -> None:
        super().__init__("adagrad")
        self.seconds, self.clock, self.dropout = seconds, clock, 0.2
        self.seen: list[tuple[bool, int]] = []
        self._parts = 0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self._split = any(isinstance(mode, WeightGradientsLast) for mode in _get_current_function_mode_stack())
        self._parts += 1
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((self._split, self._parts))
        self._parts = 0
        self.clock.now += self.seconds(*self.seen[-1])


class AsksForTheLoader(AsksEarly, Timed):
    """In ``configure_optimizers``, which comes before a checkpoint is read."""


def _fit(
    seconds: Seconds,
    target: float | None = 0.1,
    micro_batches: Any = 1,
    steps: int = 40,
    make: type[Timed] = Timed,
    ckpt_path: str | None = None,
    overlap: bool = True,
    **options: Any,
) -> tuple[Timed, L.Trainer]:
    """Fit with a trial of four steps for each candidate, on the ranks of ``run_distributed``."""
    clock = Clock()
    autopilot.clock_for, setting_trial.MEASURED = lambda device: clock, 4
    samples = Samples(480)
    given: dict[str, Any] = {"micro_batches": micro_batches, "collate_fn": collate}
    torch.manual_seed(0)
    module = make(seconds, clock)
    strategy = FreeScaleStrategy(target_bubble_reduction=target, overlap=overlap)
    fitting = trainer(devices=2, strategy=strategy, max_epochs=4, max_steps=steps, **options)
    fitting.fit(module, FreeScaleDataModule(samples, samples.lengths, 4, **given), ckpt_path=ckpt_path)
    return module, fitting


class Outcome(L.Callback):
    """Keeps what the report says about the settings after training."""

    settings: dict[str, Any]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.settings = settings_of(trainer)


def _found(*args: Any, **options: Any) -> dict[str, Any]:
    logger, outcome = Kept(), Outcome()
    module, fitting = _fit(*args, logger=logger, callbacks=[LogsAll(), outcome], **options)
    settings = fitting.strategy.chosen_settings
    return {
        "seen": module.seen,
        "losses": module.losses,
        "weights": fitting._checkpoint_connector.dump_checkpoint(weights_only=False)["state_dict"],
        "kept": settings.get("kept"),
        "frozen": settings.get("frozen"),
        "logged": logger.of("freescale/autopilot"),
        "options": outcome.settings["options"],
        "rejected": outcome.settings["rejected"],
    }


def test_what_helps_is_chosen_and_changes_no_bits(caplog: pytest.LogCaptureFixture) -> None:
    def both() -> Any:
        with caplog.at_level(logging.INFO):
            return _found(HELPS), caplog.text, _found(HELPS, None)

    ranks = run_distributed(both, 2)
    for chosen, _, plain in ranks:
        assert chosen["kept"] == {"split_backward": True} and chosen["frozen"]
        assert {split for split, _ in chosen["seen"][:25]} == {False, True}, "they took turns"
        assert set(chosen["seen"][-10:]) == {(True, 1)}
        assert chosen["losses"] == plain["losses"]
        assert_same(chosen["weights"], plain["weights"])
        assert set(plain["seen"]) == {(False, 1)} and plain["kept"] is None and plain["logged"] == []
        in_both = {"cost": "auto", "lengths": True}
        assert chosen["options"] == {"split_backward": True, "target_bubble_reduction": 0.1, **in_both}
        assert chosen["rejected"].pop("split_backward") == [False] and plain["options"] == in_both
        assert chosen["rejected"] == plain["rejected"]
    (chosen, text, _), (other, *_) = ranks
    assert chosen["seen"] == other["seen"], "all ranks alike in every step"
    assert "chooses split_backward from False, True" in text and "split_backward=True from step" in text
    last = chosen["logged"][-1]
    assert last["freescale/autopilot/reduction"] >= 0.1
    assert last["freescale/autopilot/bubble_after"] < last["freescale/autopilot/bubble_before"]


def test_micro_batches_are_chosen_where_they_may_be() -> None:
    first, second = run_distributed(_found, 2, lambda split, parts: {1: 4.0, 2: 1.0, 4: 2.0}[parts], 0.99, "auto", steps=110)
    assert first["seen"] == second["seen"]
    assert first["kept"]["micro_batches"] == 2 and first["frozen"]
    assert first["options"].items() >= {"micro_batches": "auto", "target_bubble_reduction": 0.99}.items()
    equal_counts = {"assignment_mode": ["slack"]}
    assert first["rejected"] == {"split_backward": [True], "micro_batches": [1, 4], **equal_counts}
    assert {parts for _, parts in first["seen"][-10:]} == {2}
    assert {parts for _, parts in first["seen"]} == {1, 2, 4}
    assert {parts for _, parts in first["seen"][:15]} == {1}, "one setting after the other"


def _resumed(folder: str) -> list[Any]:
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=15, save_top_k=-1, filename="{step}")]
    whole, _ = _fit(HELPS, steps=50, callbacks=callbacks, enable_checkpointing=True)
    resumed = []
    for step in (15, 45):
        module, fitting = _fit(HELPS, steps=50, ckpt_path=f"{folder}/step={step}.ckpt")
        resumed.append((step, module.seen, module.losses, fitting.strategy.chosen_settings["kept"]))
    return [whole.losses, resumed]


def test_a_run_that_resumes_goes_on_bitwise(tmp_path: Any) -> None:
    for losses, resumed in run_distributed(_resumed, 2, str(tmp_path)):
        for step, seen, again, kept in resumed:
            assert again == losses[step:]
            assert kept == {"split_backward": True}
            assert seen[0] == (True, 1), "what was kept goes on"
        assert set(resumed[0][1]) == {(True, 1), (False, 1)}, "the last trial begins anew"
        assert set(resumed[1][1]) == {(True, 1)}, "what was final is not tried again"


def _goes_on(folder: str, make: Any, frozen: bool) -> Any:
    """Resume from the checkpoint of a run that has kept both settings, and has or has not come to its end."""
    seconds: Seconds = lambda split, parts: 1.0  # noqa: E731
    keep, path = [ModelCheckpoint(folder, every_n_train_steps=2, filename="kept")], f"{folder}/kept.ckpt"
    _, fitting = _fit(seconds, 0.5, "auto", steps=2, make=make, callbacks=keep, enable_checkpointing=True)
    if fitting.is_global_zero:
        saved = torch.load(path, weights_only=False)
        kept = {"split_backward": True, "micro_batches": 2}
        saved["freescale"]["autopilot"] |= {"kept": kept, "untried": [], "remaining": 0.4, "frozen": frozen}
        saved["FreeScaleDataModule"]["micro_batches"] = 2 if frozen else None
        torch.save(saved, path)
    dist.barrier()
    module, fitting = _fit(seconds, 0.5, "auto", steps=30, make=make, ckpt_path=path)
    return module.seen, fitting.strategy.chosen_settings


@pytest.mark.parametrize(("make", "frozen"), [(Timed, False), (AsksForTheLoader, True)])
def test_a_run_that_resumes_has_what_was_kept(tmp_path: Any, make: Any, frozen: bool) -> None:
    for seen, settings in run_distributed(_goes_on, 2, str(tmp_path), make, frozen):
        assert set(seen[:4]) == {(True, 2)}
        assert set(seen) == ({(True, 2)} if frozen else {(True, 2), (False, 1)}), "against the beginning"
        assert settings["start"] == {"split_backward": False, "micro_batches": 1}


def _beside_others(folder: str) -> Any:
    cost_calibrator.WINDOW = 12
    logger = Kept()
    _, calibrated = _fit(HELPS, logger=logger, callbacks=[LogsAll()])
    profiling = profiler(folder, every_n_steps=20)
    _, profiled = _fit(HELPS, callbacks=[profiling])
    chosen = [fitting.strategy.chosen_settings["kept"] for fitting in (calibrated, profiled)]
    recording = [fitting.strategy.timeline.enabled for fitting in (calibrated, profiled)]
    return chosen, recording, len(logger.of("freescale/calibration")), profiling.report and len(profiling.report.steps)


def test_beside_calibration_and_a_profiler(tmp_path: Any) -> None:
    ranks = run_distributed(_beside_others, 2, str(tmp_path))
    for chosen, recording, *_ in ranks:
        assert chosen == [{"split_backward": True}] * 2
        assert recording == [False, False]
    *_, fits, steps = ranks[0]
    assert fits >= 3, "calibration goes on when the autopilot has ended"
    assert steps > 30


def test_messages_where_nothing_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def fits() -> Any:
        texts = []
        _fit(HELPS, 0.1, "auto", steps=3, overlap=False)
        texts.append(caplog.text)
        caplog.clear()
        strategy = FreeScaleStrategy(target_bubble_reduction=0.1)
        trainer(devices=2, strategy=strategy, max_epochs=1).fit(BoringModel())
        texts.append(caplog.text)
        _, fitting = _fit(HELPS, 0.9, steps=8)
        return [*texts, caplog.text, fitting.strategy.chosen_settings["frozen"]]

    without_overlap, plain, short, frozen = run_distributed(fits, 2)[0]
    assert "nothing to choose from" in without_overlap and "overlap=False" in without_overlap
    assert "nothing to choose from" in plain and "no embedding collection" in plain
    assert "training has ended" in short and "split_backward=False" in short and not frozen
