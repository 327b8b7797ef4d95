"""What the strategy does with the plan: agree on it, log its worth, calibrate it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.balance import BalancedSampler, BalanceReport, CostModel, predict
from lightning_freescale.balance.calibration import imbalance_by_true_costs
from lightning_freescale.data import BalanceOptions
from lightning_freescale.strategy import balance_monitor
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.test_resume import StopAt
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, trainer


class Kept(Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def of(self, prefix: str) -> list[dict[str, float]]:
        return [m for _, m in self.metrics if any(name.startswith(prefix) for name in m)]


def _fit_with(lengths_of_rank: bool) -> None:
    data = Samples(16)
    lengths = data.lengths + (int(os.environ["RANK"]) if lengths_of_rank else 0)
    trainer(devices=2).fit(Recommender(), FreeScaleDataModule(data, lengths, 2, collate_fn=collate))


def test_ranks_that_plan_differently_are_stopped_before_the_first_step() -> None:
    run_distributed(_fit_with, 2, False)
    with pytest.raises(RankFailed, match=r"ranks plan epoch 0 differently: ranks \[1\] do not agree.*same lengths"):
        run_distributed(_fit_with, 2, True)


def _logged() -> tuple[list[dict[str, float]], list[dict[str, float]], float]:
    data, logger = Samples(40), Kept()
    module = FreeScaleDataModule(data, data.lengths, 2, collate_fn=collate, balance=REPEATS)
    trainer(devices=2, max_epochs=2, logger=logger, log_every_n_steps=5).fit(Recommender(), module)
    return (
        logger.of("freescale/imbalance/step"),
        logger.of("freescale/imbalance/epoch"),
        module.sampler(0, 2).report(1).balanced,
    )


def test_balance_is_logged_per_step_and_epoch() -> None:
    (steps, epochs, after), (nothing, *_) = run_distributed(_logged, 2)
    assert len(steps) == 4 and len(epochs) == 2, "20 steps, every fifth is logged"
    assert nothing == []
    names = {"unbalanced", "balanced", "lower_bound", "gap", "dominated", "tokens_imbalance", "tokens_unbalanced"}
    assert {name.rsplit("/")[-1] for name in epochs[0]} == names == {name.rsplit("/")[-1] for name in steps[0]}
    assert epochs[1]["freescale/imbalance/epoch/balanced"] == pytest.approx(after)
    assert epochs[1]["freescale/imbalance/epoch/unbalanced"] > after


def _advised(drop_last: bool, limit: float | None = None) -> list[tuple[BalanceReport, BalanceReport]]:
    """What each advice was asked about, and what is predicted with what it was given."""
    asked: list[tuple[BalanceReport, BalanceReport]] = []

    def advise(costs: Any, ranks: int, batch_size: int, report: BalanceReport, lengths: Any, **options: Any) -> None:
        asked.append((report, predict(costs, ranks, batch_size, steps=report.steps, **options)))

    balance_monitor.advise = advise  # type: ignore[assignment]  # this process ends with the test
    data = Samples(43)
    groups = None if limit is None else np.arange(43) // 2
    options = BalanceOptions(assignment_mode="free", max_tokens_per_rank=limit, keep_together=groups)
    given: dict[str, Any] = {"collate_fn": collate, "seed": 5, "drop_last": drop_last, "balance": limit is None or options}
    trainer(devices=2, max_epochs=1).fit(Recommender(), FreeScaleDataModule(data, data.lengths, 2, **given))
    return asked


@pytest.mark.parametrize("drop_last", [False, True])
def test_advice_is_on_the_epochs_own_steps(drop_last: bool) -> None:
    ((told, predicted),), nothing = run_distributed(_advised, 2, drop_last)
    assert nothing == [] and told.steps == (10 if drop_last else 11)
    assert (predicted.steps, predicted.lower_bound, predicted.unbalanced) == (
        told.steps,
        pytest.approx(told.lower_bound),
        pytest.approx(told.unbalanced),
    )


def test_advice_is_on_plans_within_the_limits_in_use() -> None:
    limit = float(Samples(43).lengths.max() * 3)
    ((told, predicted),), _ = run_distributed(_advised, 2, True, limit)
    assert told.tokens_fullest is not None and predicted.tokens_fullest == pytest.approx(told.tokens_fullest)
    assert predicted.balanced == pytest.approx(told.balanced)


class OwnData(L.LightningDataModule):
    """A user's own data module around the sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.train = Samples()

    def calibrate(self) -> None:
        """Something else altogether."""

    def train_dataloader(self) -> DataLoader:
        samples, rank = Bulk(40), self.trainer.global_rank
        sampler = BalancedSampler(samples.lengths, 2, num_replicas=self.trainer.world_size, rank=rank)
        return DataLoader(samples, batch_size=None, sampler=sampler, collate_fn=collate)


class Bulk(Samples):
    """Takes lists of indices."""

    def __getitem__(self, indices: Any) -> Any:
        return [super(Bulk, self).__getitem__(index) for index in indices]


def _own_data() -> list[dict[str, float]]:
    logger = Kept()
    trainer(devices=2, logger=logger).fit(Recommender(), OwnData())
    return logger.of("freescale/imbalance/epoch")


@pytest.mark.slow
def test_a_sampler_in_the_users_own_data_module() -> None:
    assert len(run_distributed(_own_data, 2)[0]) == 1


class Lengths(Dataset):
    """Samples that are nothing but their length."""

    def __init__(self, size: int = 800) -> None:
        draw = torch.Generator().manual_seed(3)
        self.lengths = (-25 * torch.rand(size, generator=draw).log()).long() + 2

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.lengths[index].float()


class Sleeper(L.LightningModule):
    """Its step takes the square of its samples' lengths, on one rank perhaps longer."""

    def __init__(self, slow_rank: int | None = None) -> None:
        super().__init__()
        self.layer, self.slow_rank = nn.Linear(1, 1), slow_rank

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        factor = 1.5 if self.global_rank == self.slow_rank else 1.0
        time.sleep(factor * (4e-3 + 6e-6 * float((batch**2).sum())))  # far more than what a busy machine adds
        return self.layer(batch[:, None]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def _calibrated(profile: bool = False, slow: int | None = None, epochs: int = 2, **options: Any) -> dict[str, Any]:
    data, logger, reports = Lengths(), Kept(), []
    balance = BalanceOptions(calibrate=True, **options)
    module = FreeScaleDataModule(data, data.lengths, 8, cost=CostModel(linear=1.0, quadratic=0.0), balance=balance)

    class Planned(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            sampler = trainer.train_dataloader.sampler
            reports.append((sampler.costs.copy(), dict(sampler.options)))

    callbacks: list[L.Callback] = [Planned(), *([BubbleProfiler(mkdtemp(), verbose=False, trace_steps=0)] if profile else [])]
    fit = trainer(devices=2, max_epochs=epochs, logger=logger, callbacks=callbacks)
    fit.fit(Sleeper(slow), module)
    return {
        "plans": reports,
        "imbalance": logger.of("freescale/calibration/residual"),
        "lengths": data.lengths.numpy().astype(float),
        "refits": module.train.refits,
        "timeline": fit.strategy.timeline.enabled,
    }


@pytest.mark.slow
@pytest.mark.parametrize("profile", [False, True])
def test_a_wrong_cost_model_is_replaced_from_the_next_epoch_on(profile: bool) -> None:
    """50 steps an epoch; the plan starts by tokens, the time goes by their squares."""
    first, second = run_distributed(_calibrated, 2, profile)
    lengths = first["lengths"]
    (before, _), (after, _) = first["plans"]
    assert before == pytest.approx(lengths), "the first epoch is planned as given"
    assert (after == second["plans"][1][0]).all(), "the ranks agree to the bit"
    draw, true = np.random.RandomState(0), lengths**2
    batches = [draw.choice(len(true), 16, replace=False) for _ in range(100)]
    start, fitted, best = (
        imbalance_by_true_costs([(costs[batch], true[batch]) for batch in batches], 0.0, 2) for costs in (before, after, true)
    )
    assert fitted < best + 0.3 * (start - best), "nearly all of what the wrong model lost is won back"
    seen = first["imbalance"][0]
    assert seen["freescale/calibration/imbalance_current"] > 1.05 * seen["freescale/calibration/imbalance_fitted"]
    assert list(first["refits"]) == [1, 2]
    assert not first["timeline"]


def _interrupted(path: str, stop_at: int | None, batch_size: int) -> tuple[list[int], np.ndarray]:
    data = Lengths()
    balance = BalanceOptions(calibrate=True)
    module = FreeScaleDataModule(data, data.lengths, batch_size, cost=CostModel(quadratic=0.0), balance=balance)
    fit = trainer(devices=2, max_epochs=2, callbacks=[StopAt(stop_at, path)] if stop_at else [])
    fit.fit(Sleeper(), module, ckpt_path=None if stop_at else path)
    return sorted(module.train.refits), fit.train_dataloader.sampler.costs.copy()


@pytest.mark.slow
def test_calibration_goes_on_after_a_resume_with_other_steps(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    (refits, _), _ = run_distributed(_interrupted, 2, path, 30, 8)
    assert refits == [1]
    (again, costs), (_, others) = run_distributed(_interrupted, 2, path, None, 4)
    assert 1 in again
    lengths = Lengths().lengths.numpy().astype(float)
    assert (costs == others).all() and not np.allclose(costs, 320 * lengths), "the second epoch has the fitted costs"


@pytest.mark.slow
def test_a_slow_rank_gets_less_work_on_request() -> None:
    reported, rebalanced = (run_distributed(_calibrated, 2, slow=1, slow_ranks=how)[0] for how in ("report", "rebalance"))
    assert reported["plans"][1][1].get("rank_speeds") is None
    speeds = rebalanced["plans"][1][1]["rank_speeds"]
    assert speeds[0] == 1.0
    assert 0.5 < speeds[1] < 0.85, "2 / 3, but for what the machine does besides"
