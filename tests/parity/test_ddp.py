"""The same unmodified module under "ddp", unsharded, and under "freescale"; balanced and not."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import Case, CountingModel, compared
from tests.helpers.recommender import OPTIMIZERS, Recommender, Samples, collate, trainer


class Draws(CountingModel):
    """Draws random numbers while it trains, as dropout does."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses[-1] = float(torch.rand(()))
        return loss


def _starts_elsewhere() -> CountingModel:
    """Every rank draws weights of its own: DDP trains with those of the first."""
    torch.manual_seed(int(os.environ["RANK"]))
    return CountingModel("sgd")


CASES = {
    **{name: Case(partial(CountingModel, name)) for name in OPTIMIZERS},
    "other weights on every rank": Case(_starts_elsewhere),
    "random numbers": Case(partial(Draws, "sgd")),
}


def test_same_numbers_as_ddp() -> None:
    found = compared(2, CASES, "ddp", "freescale", losses=(1e-5, 1e-12), weights=(1e-4, 1e-6), states=(1e-4, 1e-6), moves=1.5)
    assert found == []


# -- shared out among ranks and micro-batches, a step has the gradient of its whole batch


class TargetMean(Recommender):
    """A loss that means over targets: every sample has as many as its history is long."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        error = (self.net(batch["features"]) - batch["label"]) ** 2
        targets = batch["features"]["history"].lengths()
        return (error * targets).sum() / targets.sum()


class Sum(Recommender):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return ((self.net(batch["features"]) - batch["label"]) ** 2).sum() / 16


REDUCTIONS = {"sample_mean": Recommender, "target_mean": TargetMean, "sum": Sum}


def _train(
    reduction: str, samples: int, batch_size: int = 1, window: int = 1, steps: int = 1, **options: Any
) -> dict[str, Any]:
    """Weights after some SGD steps, which differ from the initial ones by the gradients alone; and the samples of all steps."""
    torch.manual_seed(0)
    module, data = REDUCTIONS[reduction]("sgd"), Samples(samples)
    loader = FreeScaleDataModule(data, data.lengths, batch_size, collate_fn=collate, loss_reduction=reduction, **options)
    devices = int(os.environ["WORLD_SIZE"])
    fit = trainer(strategy="freescale", max_steps=steps, devices=devices, accumulate_grad_batches=window)
    fit.fit(module, loader)
    sampler = fit.train_dataloader.sampler
    return {
        "weights": fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"],
        "batches": [sorted(sampler.global_batch(0, step).tolist()) for step in range(len(sampler))],
        "uneven": any(max(counts) > min(counts) + 1 for counts in map(sampler.counts, range(len(sampler)))),
        "steps": fit.global_step,
    }


def _balanced(reduction: str, samples: int = 16, **options: Any) -> tuple[Any, Any]:
    return partial(_train, reduction, samples, 8, **options), partial(_train, reduction, samples, samples)


def _windows(reduction: str, balance: bool) -> tuple[Any, Any]:
    return partial(_train, reduction, 32, 4, 4, balance=balance), partial(_train, reduction, 32, 32)


SHARED_OUT = {
    "balanced": _balanced("sample_mean", balance=True),
    "dealt": _balanced("sample_mean", balance=False),
    "balanced, unequal counts": _balanced("sample_mean", 15, balance=True),
    "dealt, unequal counts": _balanced("sample_mean", 15, balance=False),
    "slack": _balanced("sample_mean", balance=BalanceOptions(assignment_mode="slack")),
    "free": _balanced("target_mean", balance=BalanceOptions(assignment_mode="free")),
    **{f"window, {reduction}": _windows(reduction, True) for reduction in ("sample_mean", "sum")},
    **{f"as drawn, {reduction}": _windows(reduction, False) for reduction in REDUCTIONS},
}


def _run_all(which: int) -> dict[str, Any]:
    return {name: pair[which]() for name, pair in SHARED_OUT.items()}


def _differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return not all(torch.allclose(weight, other[name], rtol=1e-6, atol=1e-7) for name, weight in one.items())


def test_a_step_has_the_gradient_of_its_whole_batch_on_one_rank() -> None:
    """Also where the ranks cannot share samples equally, and where the mean of micro-batches' means would be another."""
    mine, whole = run_distributed(_run_all, 2, 0)[0], run_distributed(_run_all, 1, 1)[0]
    whole["window, sum"] = mine["as drawn, sum"]  # sums are means over ranks
    expected = [name for name in SHARED_OUT if name not in ("as drawn, sum", "as drawn, target_mean")]
    assert [name for name in expected if _differ(mine[name]["weights"], whole[name]["weights"])] == []
    torch.manual_seed(0)
    initial = Recommender("sgd").state_dict()
    assert not any(torch.equal(weight, initial[name]) for name, weight in mine["balanced"]["weights"].items())
    assert _differ(mine["as drawn, target_mean"]["weights"], whole["as drawn, target_mean"]["weights"])
    for reduction in ("sample_mean", "sum"):
        assert mine[f"window, {reduction}"]["batches"] != mine[f"as drawn, {reduction}"]["batches"], "nothing was shared out"


def _budgeted() -> dict[str, dict[str, Any]]:
    return {reduction: _train(reduction, 64, steps=-1, batch_tokens=90) for reduction in REDUCTIONS}


def _whole_batches(batches: dict[str, list[list[int]]]) -> dict[str, dict[str, Tensor]]:
    """Weights after the same global batches, each on one rank at once, under "ddp"."""
    found = {}
    for reduction, kind in REDUCTIONS.items():
        torch.manual_seed(0)
        module, data = kind("sgd"), Samples(64)
        whole: Any = [collate([data[index] for index in batch]) for batch in batches[reduction]]
        trainer(strategy="ddp", devices=1).fit(module, DataLoader(whole, batch_size=None))
        found[reduction] = module.state_dict()
    return found


def test_steps_cut_by_tokens_have_the_gradient_of_the_whole() -> None:
    first, second = run_distributed(_budgeted, 2)
    (whole,) = run_distributed(_whole_batches, 1, {name: mine["batches"] for name, mine in first.items()})
    for reduction, mine in first.items():
        assert mine["uneven"], "equal counts need no weights"
        assert mine["steps"] == second[reduction]["steps"] == len(mine["batches"]) > 4
        assert sorted(index for batch in mine["batches"] for index in batch) == list(range(64))
        assert not _differ(mine["weights"], whole[reduction]), reduction
