"""Losses of other kinds in micro-batches: sums, means over targets, and parts without a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.micro_batch_training import SIZE, Model, run
from tests.helpers.overlap_training import CountingModel, assert_same


class Sums(CountingModel):
    """The loss is a sum."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        predicted = self.net(batch["features"])
        loss = 0.01 * nn.functional.mse_loss(predicted, batch["label"], reduction="sum")
        error = (predicted - batch["label"]).abs().mean().detach()
        self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("error", error, on_step=True, on_epoch=True)
        return {"loss": loss, "error": error}


def _summed() -> list[dict[str, Any]]:
    options = {"loss_reduction": "sum", "balance": BalanceOptions(assignment_mode="free")}
    return [run(parts, FreeScaleStrategy(), lambda: Sums("sgd"), data_options=options) for parts in (1, 3)]


def test_a_loss_that_is_a_sum_and_means_beside_it() -> None:
    for rank, (whole, divided) in enumerate(run_distributed(_summed, 2)):
        for mine, other in zip(divided["ended"], whole["ended"], strict=True):
            assert mine[2:4] == pytest.approx(other[2:4], rel=2e-5)
            assert mine[4] == pytest.approx(other[4], rel=2e-5) and {"loss_step", "error_step"} <= mine[4].keys()
        assert divided["epoch"] == pytest.approx(whole["epoch"], rel=2e-5)
        if rank == 0:
            assert_same(divided["weights"], whole["weights"], rtol=1e-6, atol=1e-6)


class LearnsFromSome(CountingModel):
    """The loss is the mean over the targets; every other sample has one."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        has_target = batch["index"] % 2 == 0
        off = self.net(batch["features"])[has_target] - batch["label"][has_target]
        self.log("loss", off.square().mean(), on_step=True)
        return {"loss": off.square().mean(), "error": off.abs().mean().detach()}


def _learns_from_some() -> list[dict[str, Any]]:
    options = {"loss_reduction": "target_mean", "target_counts": torch.arange(SIZE) % 2 == 0, "drop_last": True}
    make, fit = lambda: LearnsFromSome("sgd"), {"limit_train_batches": 4, "max_epochs": 1}
    return [run(parts, FreeScaleStrategy(), make, data_options=options, **fit) for parts in (1, 8)]


def test_no_part_is_without_a_target() -> None:
    for rank, (whole, divided) in enumerate(run_distributed(_learns_from_some, 2)):
        losses = [ended[2] for ended in divided["ended"]]
        assert losses == pytest.approx([ended[2] for ended in whole["ended"]], rel=2e-5) and len(losses) == 4
        assert divided["statistics"]["predicted_lookups"] > whole["statistics"]["predicted_lookups"], "it was cut"
        if rank == 0:
            assert_same(divided["weights"], whole["weights"], rtol=1e-6, atol=1e-6)


class SkipsParts(Model):
    """Returns no loss for some parts: the first, the last, one between, all of a step; or one of 0 instead."""

    def __init__(self, zero: bool, ranks: tuple[int, ...] = (0,), steps: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        super().__init__("adagrad")
        self.zero, self.ranks, self.steps = zero, ranks, steps

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        part = sum(seen[:2] == self.seen[-1][:2] for seen in self.seen) - 1
        parts = {1: [0], 2: [2], 3: [1], 4: [0, 1, 2]}
        skipped = batch_idx in self.steps and self.global_rank in self.ranks and part in parts[batch_idx]
        if skipped and self.zero:
            return {**output, "loss": 0 * output["loss"]}
        return None if skipped else output


def _skips(zero: bool) -> dict[str, Any]:
    return run(3, FreeScaleStrategy(), lambda: SkipsParts(zero))


def test_a_part_without_a_loss_counts_0_on_one_rank() -> None:
    (skipped,), (zero,) = (run_distributed(_skips, 1, zero) for zero in (False, True))
    assert skipped["seen"] == zero["seen"]
    assert_same(skipped["weights"], zero["weights"], rtol=1e-6, atol=1e-7)
    whole_steps = [ended for ended in zip(skipped["ended"], zero["ended"]) if ended[0][1] != 4]
    assert [mine[2] for mine, _ in whole_steps] == pytest.approx([other[2] for _, other in whole_steps], rel=1e-6)


def _skips_on_one_rank(parts: int, step: int) -> None:
    run(parts, FreeScaleStrategy(), lambda: SkipsParts(False, (1,), (step,)))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("parts", "step", "message"),
    [
        (3, 1, "training_step returned None for micro-batch 1 of 3, which on several ranks"),
        (3, 2, "training_step returned None for micro-batch 3 of 3, which on several ranks"),
        (1, 1, "RuntimeError: Skipping the `training_step`"),
    ],
)
def test_a_part_without_a_loss_is_refused_on_several_ranks(parts: int, step: int, message: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_distributed(_skips_on_one_rank, 2, parts, step, timeout=60)
    text = str(failure.value)
    assert message in text.partition("rank 1: ")[2]
    assert parts == 1 or "use FreeScaleDataModule(micro_batches=1)" in text
    assert text.startswith("rank 0: ") and "did not finish" not in text, "the other rank ends as well"
