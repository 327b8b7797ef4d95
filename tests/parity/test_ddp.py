"""The same unmodified module under "ddp", unsharded, and under "freescale"; balanced and not."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import Recommender, Samples, collate, fixed_loader, trainer

WORLD = {"devices": 2}


def _losses(strategy: str, optimizer: str) -> list[float]:
    torch.manual_seed(0)
    module = Recommender(optimizer)
    trainer(strategy=strategy, **WORLD).fit(module, fixed_loader(int(os.environ["RANK"]), 20))
    return module.losses


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("sgd", marks=pytest.mark.slow), "adagrad", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)],
)
def test_same_losses_as_ddp(optimizer: str) -> None:
    ddp = run_distributed(_losses, 2, "ddp", optimizer)
    mine = run_distributed(_losses, 2, "freescale", optimizer)
    for rank in range(2):
        assert mine[rank] == pytest.approx(ddp[rank], rel=1e-5)
    assert max(ddp[0]) / min(ddp[0]) > 1.5, "the loss must move, or equality means nothing"


def _losses_of_other_starts(strategy: str) -> list[float]:
    """Every rank draws weights of its own: DDP trains with those of the first."""
    torch.manual_seed(int(os.environ["RANK"]))
    module = Recommender("sgd")
    trainer(strategy=strategy, **WORLD).fit(module, fixed_loader(int(os.environ["RANK"]), 6))
    return module.losses


def test_ranks_begin_with_the_weights_of_the_first() -> None:
    ddp, mine = (run_distributed(_losses_of_other_starts, 2, strategy) for strategy in ("ddp", "freescale"))
    for rank in range(2):
        assert mine[rank] == pytest.approx(ddp[rank], rel=1e-5)


def _after_one_step(strategy: str, samples: int, batch_size: int, **options: Any) -> dict[str, torch.Tensor]:
    """Weights after one SGD step: they differ from the initial ones by the gradient alone."""
    torch.manual_seed(0)
    module, data = Recommender("sgd"), Samples(samples)
    loader = FreeScaleDataModule(data, data.lengths, batch_size, collate_fn=collate, **options)
    fit = trainer(strategy=strategy, max_steps=1, **WORLD)
    fit.fit(module, loader)
    return fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]


@pytest.mark.parametrize("samples", [16, 15])
def test_balancing_keeps_the_gradient(samples: int) -> None:
    """Also for a global batch that the ranks cannot share equally, against one rank that computes it alone."""
    balanced, dealt = (
        run_distributed(_after_one_step, 2, "freescale", samples, 8, balance=balance)[0] for balance in (True, False)
    )
    alone = run_distributed(_alone, 1, samples)[0]
    torch.manual_seed(0)
    initial = Recommender("sgd").state_dict()
    for name, weight in balanced.items():
        torch.testing.assert_close(weight, dealt[name], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weight, alone[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(weight, initial[name])


@cache
def _plain(loss_reduction: str) -> dict[str, torch.Tensor]:
    return run_distributed(_after_one_step, 2, "freescale", 16, 8, loss_reduction=loss_reduction, balance=True)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"assignment_mode": "slack"},
        {"assignment_mode": "free"},
        {"rank_speeds": [1.0, 0.4], "assignment_mode": "free"},
    ],
)
@pytest.mark.parametrize("loss_reduction", ["sample_mean", "target_mean"])
def test_unequal_counts_keep_the_gradient(options: dict[str, Any], loss_reduction: str) -> None:
    plain = _plain(loss_reduction)
    balance = BalanceOptions(**options)
    unequal = run_distributed(_after_one_step, 2, "freescale", 16, 8, loss_reduction=loss_reduction, balance=balance)[0]
    if loss_reduction == "target_mean":  # the test module means over samples, which target_mean then weighs by their lengths
        assert any(not torch.equal(weight, unequal[name]) for name, weight in plain.items())
        return
    for name, weight in plain.items():
        torch.testing.assert_close(weight, unequal[name], rtol=1e-6, atol=1e-7)


def _alone(samples: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module, data = Recommender("sgd"), Samples(samples)
    loader = FreeScaleDataModule(data, data.lengths, samples, collate_fn=collate)
    fit = trainer(strategy="freescale", max_steps=1, devices=1)
    fit.fit(module, loader)
    return fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]


class Draws(Recommender):
    """Draws random numbers while it trains, as dropout does."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses[-1] = float(torch.rand(()))
        return loss


def _draws(strategy: str) -> list[float]:
    torch.manual_seed(0)
    module = Draws("sgd")
    trainer(strategy=strategy, **WORLD).fit(module, fixed_loader(int(os.environ["RANK"]), 3))
    return module.losses


def test_random_state_is_that_of_ddp() -> None:
    assert run_distributed(_draws, 2, "freescale") == run_distributed(_draws, 2, "ddp")


class TargetMean(Recommender):
    """A loss that means over targets: every sample has as many as its history is long."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        error = (self.net(batch["features"]) - batch["label"]) ** 2
        targets = batch["features"]["history"].lengths()
        return (error * targets).sum() / targets.sum()


class Sum(Recommender):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return ((self.net(batch["features"]) - batch["label"]) ** 2).sum() / 16


def _after_one_window(kind: type[Recommender], batches: int, batch_size: int, devices: int, **options: Any) -> dict[str, Any]:
    """Weights after one optimizer step over 32 samples, and which samples the rank had in each batch."""
    torch.manual_seed(0)
    module, data = kind("sgd"), Samples(32)
    loader = FreeScaleDataModule(data, data.lengths, batch_size, collate_fn=collate, **options)
    fit = trainer(strategy="freescale", max_steps=1, devices=devices, accumulate_grad_batches=batches)
    fit.fit(module, loader)
    sampler = fit.train_dataloader.sampler
    order = [sampler.global_batch(0, step).tolist() for step in range(len(sampler))]
    return {"weights": fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"], "order": order}


@pytest.mark.parametrize(("kind", "reduction"), [(Recommender, "sample_mean"), (TargetMean, "target_mean"), (Sum, "sum")])
def test_a_window_has_the_gradient_of_one_batch(kind: type[Recommender], reduction: str) -> None:
    """Whichever micro-batch a sample is computed in, also where the mean of micro-batches' means would be another."""
    told = run_distributed(_after_one_window, 2, kind, 4, 4, 2, loss_reduction=reduction, balance=BalanceOptions(window=True))[
        0
    ]
    as_drawn = run_distributed(
        _after_one_window, 2, kind, 4, 4, 2, loss_reduction=reduction, balance=BalanceOptions(window=False)
    )[0]
    assert [sorted(batch) for batch in told["order"]] != [sorted(batch) for batch in as_drawn["order"]], (
        "nothing was shared out"
    )
    whole = (
        as_drawn if reduction == "sum" else run_distributed(_after_one_window, 1, kind, 1, 32, 1, loss_reduction=reduction)[0]
    )
    for name, weight in told["weights"].items():
        torch.testing.assert_close(weight, whole["weights"][name], rtol=1e-6, atol=1e-7)


def _budgeted(kind: type[Recommender], reduction: str) -> dict[str, Any]:
    """Weights after an epoch of steps cut by tokens, and how many samples each rank had."""
    torch.manual_seed(0)
    module, data = kind("sgd"), Samples(64)
    loader = FreeScaleDataModule(data, data.lengths, batch_tokens=90, collate_fn=collate, loss_reduction=reduction)
    fit = trainer(strategy="freescale", **WORLD)
    fit.fit(module, loader)
    sampler = fit.train_dataloader.sampler
    steps = range(len(sampler))
    told = {"counts": [sampler.counts(step) for step in steps], "steps": fit.global_step}
    told["batches"] = [sampler.global_batch(0, step).tolist() for step in steps]
    return {"weights": fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"], **told}


def _whole_batches(kind: type[Recommender], batches: list[list[int]]) -> dict[str, torch.Tensor]:
    """Weights after the same global batches, each on one rank at once, under "ddp"."""
    torch.manual_seed(0)
    module, data = kind("sgd"), Samples(64)
    fit = trainer(strategy="ddp", devices=1)
    whole = DataLoader([collate([data[index] for index in batch]) for batch in batches], batch_size=None)  # type: ignore[arg-type]
    fit.fit(module, whole)
    return module.state_dict()


@pytest.mark.parametrize(("kind", "reduction"), [(Recommender, "sample_mean"), (TargetMean, "target_mean"), (Sum, "sum")])
def test_steps_cut_by_tokens_have_the_gradient_of_the_whole(kind: type[Recommender], reduction: str) -> None:
    ranks = run_distributed(_budgeted, 2, kind, reduction)
    assert any(max(counts) > min(counts) + 1 for counts in ranks[0]["counts"]), "equal counts need no weights"
    assert ranks[0]["steps"] == ranks[1]["steps"] == len(ranks[0]["batches"]) > 4
    assert sorted(index for batch in ranks[0]["batches"] for index in batch) == list(range(64))
    whole = run_distributed(_whole_batches, 1, kind, ranks[0]["batches"])[0]
    for name, weight in ranks[0]["weights"].items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-6, atol=1e-7)
