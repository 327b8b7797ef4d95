"""Costs that are fitted to measured compute times: when, on which ranks, and what a checkpoint keeps of it."""

from __future__ import annotations

import os
import re
import time
import warnings
from dataclasses import astuple
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.balance import BalanceReport, CostModel, predict
from lightning_freescale.balance.calibration import Calibration
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.data import BalanceOptions
from lightning_freescale.data.map_style import Refit
from lightning_freescale.strategy import balance_monitor
from lightning_freescale.strategy.tuning.cost_calibrator import ComputeTimes, PredictedAndMeasured, SlowRanks
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import StopAt, trainer
from tests.strategy.test_balance_monitor import Kept, LogsAll

STEPS, BATCH = 20, 8
TRUE = CostModel(linear=1e-4, quadratic=1e-8)
BASE = 5e-3


class Lengths(Dataset):
    def __init__(self, ranks: int = 2) -> None:
        self.lengths = np.random.RandomState(3).lognormal(4, 1.2, STEPS * BATCH * ranks).astype(int) + 2

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(self.lengths[index])])


class Timed(L.LightningModule):
    """Says of each step how long it took: as long as its samples take by the true costs, on one rank perhaps longer."""

    def __init__(self, slow_rank: int | None = None) -> None:
        super().__init__()
        self.layer, self.slow_rank = nn.Linear(1, 1), slow_rank
        self.seconds: list[float] = []
        self.seen: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch[:, 0].int().tolist())
        noise = 1 + 0.01 * np.sin(7.0 * sum(self.seen[-1]))
        noise *= 1.5 if self.global_rank == self.slow_rank else 1.0
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
        sampler = trainer.train_dataloader.sampler
        self.costs.append(sampler.costs.copy())
        self.recorded.append(trainer.strategy.timeline.enabled)


def _fit(
    epochs: int = 2, stop: int = 0, path: str = "", resume: str = "", slow: int | None = None, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    module, planned, logger = Timed(slow), Planned(), Kept()
    ComputeTimes.later = lambda self, step: lambda: module.seconds[step]
    samples = Lengths()
    data = FreeScaleDataModule(samples, samples.lengths, **{"batch_size": BATCH, **options})
    fit = trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=epochs,
        callbacks=[LogsAll(), planned, *([StopAt(stop, path)] if stop else [])],
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
    ratio = (first["costs"][1] / TRUE(lengths))[lengths > 50]
    assert np.ptp(ratio) < 0.1 * ratio.mean()
    last = first["logged"][-1]
    measured = last["freescale/calibration/imbalance_measured"]
    assert abs(measured - last["freescale/calibration/imbalance_predicted"]) < 0.03
    assert abs(measured - first["epochs"][-1]["freescale/imbalance/epoch/balanced"]) < 0.03, "with what no sample explains"
    assert second["logged"] == []


def test_a_slow_rank_is_reported() -> None:
    warned = "\n".join(run_distributed(lambda: _fit(slow=1), 2)[0]["warnings"])
    found = re.findall(r"in two epochs, rank 1 took (\S+) times .* Is its device slow or shared\?", warned)
    assert [float(times) for times in found] == [pytest.approx(1.5, abs=0.05)]


@pytest.mark.parametrize(
    ("slow_in", "skipped"), [([0], []), ([1], []), ([0, 2], []), ([0, 3, 4], [1, 2]), ([1, 2], []), ([0, 1, 2, 3], [])]
)
def test_a_rank_is_slow_hardware_if_it_is_slow_in_two_consecutive_epochs(slow_in: list[int], skipped: list[int]) -> None:
    found, rng, reported, rows = SlowRanks(), np.random.default_rng(0), [], []
    for epoch in sorted({*range(5)} - {*skipped}):
        sums = sample_features(rng.integers(1, 100, (20, 2, 8))).sum(axis=2)
        seconds = (BASE + sums @ astuple(TRUE)) * (1 + 0.01 * rng.standard_normal((20, 2)))
        seconds[:, 1] *= 1.5 if epoch in slow_in else 1.0
        for window in (slice(0, 10), slice(10, 20)):
            rows.append((sums[window], seconds[window]))
            found.add_steps(epoch, *rows[-1])
            all_sums, all_seconds = (np.concatenate(values) for values in zip(*rows))
            fit = CostModel.fit(all_sums.reshape(-1, 4), all_seconds.ravel(), np.arange(all_seconds.size) % 2)
            reported += [(epoch, rank) for rank in found.newly_found(fit)]
    assert reported == [(epoch, 1) for epoch in slow_in if epoch - 1 in slow_in][:1]


def _advised(path: str) -> list[tuple[BalanceReport, BalanceReport, float]]:
    """Return what each advice was asked about, what is predicted with what it was given, and the base that it was given."""
    asked: list[tuple[BalanceReport, BalanceReport, float]] = []

    def advise(costs: Any, ranks: int, batch_size: int, report: BalanceReport, lengths: Any, **options: Any) -> None:
        asked.append((report, predict(costs, ranks, batch_size, steps=report.steps, **options), options.get("base", 0.0)))

    balance_monitor.advise = advise  # this process ends with the test
    _fit(2, STEPS, path, balance=BalanceOptions(assignment_mode="slack"))
    _fit(2, resume=path)
    return asked


def test_advice_is_on_what_the_epoch_was_planned_by(tmp_path: Path) -> None:
    """Although the next one goes by fitted costs already; and it knows what a checkpoint's fit knows."""
    (first, resumed), nothing = run_distributed(_advised, 2, str(tmp_path / "end.ckpt"))
    assert nothing == []
    for report, predicted, _ in (first, resumed):
        assert predicted.lower_bound == pytest.approx(report.lower_bound, rel=1e-2)
    report, predicted, base = first
    assert report.steps == STEPS and predicted.lower_bound == pytest.approx(report.lower_bound)
    assert predicted.unbalanced == pytest.approx(report.unbalanced)
    assert base == 0 < resumed[2]


def test_plans_that_are_not_measured() -> None:
    """Use an explicit cost, or no balance: all epochs have the same costs, and nothing is recorded."""

    def fits() -> list[dict[str, Any]]:
        return [_fit(balance=False), _fit(cost=CostModel()), _fit()]

    ranks = run_distributed(fits, 2)
    drawn, explicit, default = ranks[0]
    for run in (explicit, drawn):
        assert run["refits"] == {} and run["recorded"] == [False, False] and run["logged"] == []
        assert (run["costs"][0] == run["costs"][1]).all()
    assert default["seen"][:STEPS] == explicit["seen"][:STEPS], "up to the end of epoch 0 the default is the same to the bit"
    assert default["seen"][STEPS:] != explicit["seen"][STEPS:]
    assert default["refits"]
    of_steps = [[sorted(a + b) for a, b in zip(*(rank[run]["seen"] for rank in ranks))] for run in range(len(ranks[0]))]
    assert of_steps[2] == of_steps[1], "a fit does not change the samples of a step"


def test_one_rank_measures_nothing() -> None:
    (alone,) = run_distributed(_fit, 1)
    assert alone["refits"] == {} and alone["recorded"] == [False, False]


def test_a_resumed_run_plans_by_the_checkpoints_fit(tmp_path: Path) -> None:
    stop, path, cost = STEPS + 4, str(tmp_path / "mid.ckpt"), CostModel(linear=1.0, quadratic=0.0)

    def fits() -> list[dict[str, Any]]:
        whole, _ = _fit(3), _fit(3, stop, path)
        given: list[dict[str, Any]] = [{}, {"cost": cost}, {"batch_size": 4}]
        return [whole, *(_fit(3, resume=path, **each) for each in given)]

    ranks = run_distributed(fits, 2)
    for whole, resumed, explicit, other_steps in ranks:
        assert resumed["seen"][: STEPS - 4] == whole["seen"][stop : 2 * STEPS], "the rest of the epoch, to the bit"
        assert (resumed["costs"][0] == whole["costs"][1]).all()
        assert explicit["recorded"] == [False, False] != resumed["recorded"]
        assert (explicit["costs"][1] == explicit["costs"][0]).all()
        assert explicit["costs"][0] == pytest.approx(cost(Lengths().lengths))
        assert 1 in other_steps["refits"] and not np.allclose(other_steps["costs"][-1], CostModel()(Lengths().lengths))
    assert all((one == other).all() for one, other in zip(*(rank[3]["costs"] for rank in ranks))), "the ranks agree"
    assert any("costs of the checkpoint" in each for each in ranks[0][2]["warnings"])


def test_measuring_ends_when_the_fit_improves_no_more(tmp_path: Path) -> None:
    path = str(tmp_path / "late.ckpt")

    def fits() -> list[dict[str, Any]]:
        return [_fit(8, 7 * STEPS + 3, path), _fit(8, resume=path), _fit(1)]

    for stopped, resumed, again in run_distributed(fits, 2):
        assert stopped["final"] and stopped["recorded"][0] and not stopped["recorded"][-1]
        assert (stopped["costs"][-1] == stopped["costs"][-2]).all()
        assert resumed["final"] and resumed["recorded"] == [False]
        assert (resumed["costs"][0] == stopped["costs"][-1]).all()
        assert not again["final"] and again["costs"][0] == pytest.approx(CostModel()(Lengths().lengths)), "a fit of its own"
    (alone,) = run_distributed(_fit, 1, 9, resume=path)
    assert not alone["final"], "other ranks may be slower, or faster"
    assert (alone["costs"][0] == stopped["costs"][-1]).all(), "what a sample costs goes for any number of ranks"


def test_between_two_batches_of_an_optimizer_step_the_costs_must_be_the_same() -> None:
    """They decide which of the batches has a sample: it would be lost, or come twice."""

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
    with pytest.raises(ValueError, match="costs="):
        data(cost=CostModel()).load_state_dict(state, 0, 2)


def _fails() -> dict[str, Any]:
    def fail(*args: Any) -> None:
        raise ArithmeticError("no fit today")

    Calibration.add_window = fail
    return _fit()


def test_a_fit_that_fails_does_not_end_training() -> None:
    first, second = run_distributed(_fails, 2)
    assert len(first["seen"]) == 2 * STEPS and first["refits"] == second["refits"] == {}
    assert any("calibration failed on rank 0" in each and "no fit today" in each for each in first["warnings"])
    assert first["recorded"][-1] is False


def test_predicted_and_measured_imbalance() -> None:
    found, seconds = PredictedAndMeasured(), np.array([[2.0, 1.0], [1.0, 1.0]])
    found.add_steps(1, np.ones((2, 2)), seconds)
    assert (found.predicted, found.measured) == (pytest.approx(1.0), pytest.approx(3 / 2.5))
    assert all(fact in str(found) for fact in ("1.000 predicted", "1.200 measured", "2 steps of epoch 1"))
    found.add_steps(2, np.array([[2.0, 1.0]]), np.array([[2.0, 1.0]]))
    assert found.steps == 1 and found.predicted == found.measured, "an epoch of its own"


class Sleeper(Timed):
    """Its step takes the square of its samples' lengths."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(4e-3 + 6e-6 * float((batch[:, 1] ** 2).sum()))  # far more than what a busy machine adds
        return super().training_step(batch, batch_idx)


def _exponential_lengths() -> Lengths:
    """With them a plan by tokens is far from the best by squares."""
    samples, draw = Lengths(), torch.Generator().manual_seed(3)
    samples.lengths = (-25 * torch.rand(len(samples.lengths), generator=draw).log()).int().numpy() + 2
    return samples


def _by_the_clock(profile: bool) -> dict[str, Any]:
    samples, planned, logger = _exponential_lengths(), Planned(), Kept()
    callbacks = [LogsAll(), planned, *([BubbleProfiler(mkdtemp(), verbose=False, trace_steps=0)] if profile else [])]
    data = FreeScaleDataModule(samples, samples.lengths, BATCH)
    trainer(devices=2, max_epochs=2, logger=logger, callbacks=callbacks).fit(Sleeper(), data)
    return {"costs": planned.costs, "logged": logger.of("freescale/calibration")}


@pytest.mark.xdist_group("timing")
@pytest.mark.parametrize("profile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_wrong_cost_model_is_replaced(profile: bool) -> None:
    """The default cost grows nearly as the number of tokens, and the time as its square."""
    first, second = run_distributed(_by_the_clock, 2, profile)
    before, after = first["costs"]
    assert before == pytest.approx(CostModel()(_exponential_lengths().lengths)) and (after == second["costs"][1]).all()
    seen = first["logged"][0]
    assert seen["freescale/calibration/imbalance_current"] > 1.05 * seen["freescale/calibration/imbalance_fitted"]
