"""Costs that are fitted without being asked for: when, on which ranks, and what a checkpoint keeps of it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.balance import BalanceReport, CostModel, predict
from lightning_freescale.balance.calibration import Calibration
from lightning_freescale.data import BalanceOptions
from lightning_freescale.data.map_style import Refit
from lightning_freescale.strategy import balance_monitor
from lightning_freescale.strategy.compute_times import ComputeTimes
from lightning_freescale.strategy.cost_calibrator import PredictedAndMeasured
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import StopAt, trainer
from tests.strategy.test_balance_monitor import Kept

STEPS, BATCH = 20, 8
TRUE = CostModel(linear=1e-4, quadratic=1e-8)
BASE = 5e-3


class Lengths(Dataset):
    """Samples that are nothing but their number and length."""

    def __init__(self, ranks: int = 2) -> None:
        self.lengths = np.random.RandomState(3).lognormal(4, 1.2, STEPS * BATCH * ranks).astype(int) + 2

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(self.lengths[index])])


class Timed(L.LightningModule):
    """Says of each step how long it took: as long as its samples take by the true costs, whatever the clock says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seconds: list[float] = []
        self.seen: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch[:, 0].int().tolist())
        noise = 1 + 0.01 * np.sin(7.0 * sum(self.seen[-1]))
        self.seconds.append(float((BASE + TRUE(batch[:, 1].numpy()).sum()) * noise))
        return self.layer(batch[:, 1:] / 1000).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Planned(L.Callback):
    """Keeps the costs by which each epoch is planned, and whether steps are still recorded."""

    def __init__(self) -> None:
        self.costs: list[np.ndarray] = []
        self.recorded: list[bool] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.costs.append(trainer.train_dataloader.sampler.costs.copy())
        self.recorded.append(trainer.strategy.timeline.enabled)


def _fit(epochs: int = 2, stop: int = 0, path: str = "", resume: str = "", **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module, planned, logger = Timed(), Planned(), Kept()
    ComputeTimes.seconds = lambda self, step: module.seconds[step]  # type: ignore[method-assign]
    samples = Lengths()
    data = FreeScaleDataModule(samples, samples.lengths, **{"batch_size": BATCH, **options})
    fit = trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=epochs,
        callbacks=[planned, *([StopAt(stop, path)] if stop else [])],
        logger=logger,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(module, data, ckpt_path=resume or None)
    return {
        "costs": planned.costs,
        "recorded": planned.recorded,
        "seen": module.seen,
        "refits": data.train.refits,
        "final": data.train.costs_are_final,
        "logged": logger.of("freescale/calibration"),
        "epochs": logger.of("freescale/imbalance/epoch"),
        "warnings": [str(each.message) for each in caught],
    }


def test_the_default_is_planned_by_the_fit_from_the_next_epoch_on() -> None:
    first, second = run_distributed(_fit, 2, 3)
    lengths = Lengths().lengths
    assert first["costs"][0] == pytest.approx(CostModel()(lengths)), "the first epoch goes by the analytic model"
    assert all((mine == theirs).all() for mine, theirs in zip(first["costs"], second["costs"])), "the ranks agree to the bit"
    assert first["costs"][0].sum() == pytest.approx(first["costs"][1].sum()), "in the units that others compare"
    ratio = first["costs"][1] / TRUE(lengths)
    weighty = lengths > 50
    assert np.ptp(ratio[weighty]) < 0.1 * ratio[weighty].mean()
    last = first["logged"][-1]
    apart = last["freescale/calibration/imbalance_measured"] - last["freescale/calibration/imbalance_predicted"]
    assert abs(apart) < 0.03
    told = first["epochs"][-1]["freescale/imbalance/epoch/balanced"]
    assert abs(told - last["freescale/calibration/imbalance_measured"]) < 0.03, "what is told counts what no sample explains"
    assert second["logged"] == []


def _advised(path: str) -> list[tuple[BalanceReport, BalanceReport, float]]:
    """What each advice was asked about, what is predicted with what it was given, and the base that it was given."""
    asked: list[tuple[BalanceReport, BalanceReport, float]] = []

    def advise(costs: Any, ranks: int, batch_size: int, report: BalanceReport, lengths: Any, **options: Any) -> None:
        asked.append((report, predict(costs, ranks, batch_size, steps=report.steps, **options), options.get("base", 0.0)))

    balance_monitor.advise = advise  # type: ignore[assignment]  # this process ends with the test
    _fit(3, balance=BalanceOptions(rank_speeds=[1.0, 0.7], calibrate=True))
    _fit(3, STEPS, path)
    _fit(3, resume=path)
    return asked


def test_advice_is_on_what_the_epoch_was_planned_by(tmp_path: Path) -> None:
    """Although the next one goes by fitted costs already; and it knows what a checkpoint's fit knows."""
    (first, _, resumed), nothing = run_distributed(_advised, 2, str(tmp_path / "end.ckpt"))
    told, predicted, _ = first
    assert nothing == [] and told.steps == STEPS
    assert predicted.lower_bound == pytest.approx(told.lower_bound)
    assert predicted.unbalanced == pytest.approx(told.unbalanced, rel=1e-2), "every fifth step was as drawn"
    assert resumed[0].lower_bound == pytest.approx(resumed[1].lower_bound, rel=1e-2)
    assert first[2] == 0 < resumed[2]


def test_plans_that_nobody_measures() -> None:
    """An explicit cost, and calibrate=False: every epoch by the same costs, and nothing is recorded."""

    def both() -> list[dict[str, Any]]:
        return [_fit(balance=BalanceOptions(calibrate=False)), _fit(cost=CostModel()), _fit(balance=False), _fit()]

    off, explicit, drawn, default = run_distributed(both, 2)[0]
    for run in (off, explicit, drawn):
        assert run["refits"] == {} == {} and run["recorded"] == [False, False] and run["logged"] == []
        assert (run["costs"][0] == run["costs"][1]).all()
    assert off["seen"] == explicit["seen"]
    assert default["seen"][:STEPS] == off["seen"][:STEPS], "up to the end of epoch 0 the default is the same to the bit"
    assert default["seen"][STEPS:] != off["seen"][STEPS:]


def test_samples_of_a_step_stay_whatever_is_fitted() -> None:
    def both(**options: Any) -> list[dict[str, Any]]:
        return [_fit(balance=BalanceOptions(calibrate=on, **options)) for on in (None, False)]

    for options in ({}, {"outlier_window": 5}):
        ranks = run_distributed(both, 2, **options)
        fitted, given = ([sorted(a + b) for a, b in zip(ranks[0][run]["seen"], ranks[1][run]["seen"])] for run in (0, 1))
        assert ranks[0][0]["refits"] and fitted == given


def test_one_rank_measures_nothing() -> None:
    (alone,) = run_distributed(_fit, 1)
    assert alone["refits"] == {} and alone["recorded"] == [False, False]
    (asked,) = run_distributed(_fit, 1, balance=BalanceOptions(calibrate=True))
    assert asked["refits"] == {} and asked["recorded"] == [False, False]
    told = [each for each in asked["warnings"] if "calibrate=True) measures nothing on a single rank" in each]
    assert len(told) == 1 and not any("calibrate" in each for each in alone["warnings"])


def test_measuring_ends_when_the_fit_improves_no_more() -> None:
    def twice() -> list[dict[str, Any]]:
        return [_fit(8), _fit(1)]

    whole, again = run_distributed(twice, 2)[0]
    assert whole["final"] and whole["recorded"][0] and not whole["recorded"][-1]
    assert (whole["costs"][-1] == whole["costs"][-2]).all()
    assert not again["final"] and again["costs"][0] == pytest.approx(CostModel()(Lengths().lengths)), "a fit of its own"


def _goes_on(path: str, stop: int, ranks_differ: bool = False, **options: Any) -> dict[str, Any]:
    if ranks_differ:
        return _fit(3, resume=path, **options)
    _fit(3, stop, path)
    return _fit(3, resume=path, **options)


def test_a_resumed_run_plans_by_the_checkpoints_fit(tmp_path: Path) -> None:
    whole = run_distributed(_fit, 2, 3)
    stop = STEPS + 4
    for mine, uninterrupted in zip(run_distributed(_goes_on, 2, str(tmp_path / "mid.ckpt"), stop), whole):
        assert mine["seen"][: STEPS - 4] == uninterrupted["seen"][stop : 2 * STEPS], "the rest of the epoch, to the bit"
        assert (mine["costs"][0] == uninterrupted["costs"][1]).all()
        if len(uninterrupted["refits"]) == 1 or all(
            refit.model == uninterrupted["refits"][1].model for refit in uninterrupted["refits"].values()
        ):
            assert (mine["costs"][1] == uninterrupted["costs"][2]).all(), "and on, where no new fit has come"


def test_a_fit_that_is_final_stays_so_after_a_resume(tmp_path: Path) -> None:
    path = str(tmp_path / "late.ckpt")

    def goes_on() -> tuple[dict[str, Any], dict[str, Any]]:
        return _fit(8, 7 * STEPS + 3, path), _fit(8, resume=path)

    for stopped, resumed in run_distributed(goes_on, 2):
        assert stopped["final"] and resumed["final"] and resumed["recorded"] == [False]
        assert (resumed["costs"][0] == stopped["costs"][-1]).all()
    (alone,) = run_distributed(_fit, 1, 9, resume=path)
    assert not alone["final"], "other ranks may be slower, or faster"
    assert (alone["costs"][0] == stopped["costs"][-1]).all(), "what a sample costs goes for any number of ranks"


def test_an_explicit_cost_goes_before_the_checkpoints_fit(tmp_path: Path) -> None:
    path, cost = str(tmp_path / "mid.ckpt"), CostModel(linear=1.0, quadratic=0.0)
    resumed = run_distributed(_goes_on, 2, path, STEPS + 4, cost=cost)[0]
    assert resumed["costs"][0] == pytest.approx(cost(Lengths().lengths))
    assert any("the checkpoint's costs were fitted to compute times" in each for each in resumed["warnings"])
    again = run_distributed(_goes_on, 2, path, 0, True, balance=BalanceOptions(calibrate=False))[0]
    assert not np.allclose(again["costs"][0], CostModel()(Lengths().lengths)), "nothing is measured, but the fit stays"
    assert again["recorded"] == [False, False]


def test_between_two_batches_of_an_optimizer_step_the_costs_must_be_the_same() -> None:
    """They say which of the batches has a sample: it would be lost, or come twice."""

    def data(**options: Any) -> Any:
        return FreeScaleDataModule(Lengths(), Lengths().lengths, BATCH, **options).train

    before, after = data(), data()
    sampler = before.resumed_sampler(0, 2, 0, accumulated=2)
    before.replan(1, Refit(TRUE, BASE))
    sampler.set_epoch(1)
    state = before.state_dict(1, 3, 2)
    after.load_state_dict(state, 0, 2)
    goes_on = after.resumed_sampler(0, 2, 1, accumulated=2)
    for step in range(3, STEPS):
        assert (goes_on.global_batch(1, step) == sampler.global_batch(1, step)).all()
    assert after.base_in(1) == before.base_in(1) > 0 == after.base_in(0)
    with pytest.raises(ValueError, match=r"between two batches of an optimizer step with costs=.*lost or repeated"):
        data(cost=CostModel()).load_state_dict(state, 0, 2)


def _fails() -> dict[str, Any]:
    def fail(*args: Any) -> None:
        raise ArithmeticError("no fit today")

    Calibration.add_window = fail  # type: ignore[assignment, method-assign]
    return _fit()


def test_a_fit_that_fails_does_not_end_training() -> None:
    first, second = run_distributed(_fails, 2)
    assert len(first["seen"]) == 2 * STEPS and first["refits"] == second["refits"] == {}
    assert any("calibration failed on rank 0" in each and "no fit today" in each for each in first["warnings"])
    assert first["recorded"][-1] is False


def test_what_is_told_of_predicted_and_measured() -> None:
    found, seconds = PredictedAndMeasured(), np.array([[2.0, 1.0], [1.0, 1.0]])
    found.add_steps(1, np.ones((2, 2)), seconds)
    assert (found.predicted, found.measured) == (pytest.approx(1.0), pytest.approx(3 / 2.5))
    assert "imbalance 1.000 predicted, 1.200 measured in 2 steps of epoch 1" in found.tell(0.0)
    assert "they part by 0.200" in found.tell(0.0)
    assert "part" not in found.tell(0.3), "single times scatter by as much"
    found.add_steps(2, np.array([[2.0, 1.0]]), np.array([[2.0, 1.0]]))
    assert found.steps == 1 and "part" not in found.tell(0.0), "an epoch of its own"
    found.add_steps(2, np.array([[3.0, 1.0]]), np.array([[1.0, 1.0]]))
    assert "they part by -" in found.tell(0.3)
