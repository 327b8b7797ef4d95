"""A run that resumes on three or more ranks adds dense gradients up in the order of the run before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.checkpoint.bucket_order import lay_out_buckets, noting_order
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, StopAt, collate, trainer


class InAnotherOrder(Recommender):
    """Uses its layers in another order than it has them, so that DDP lays its buckets out anew after the first step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.last, self.first, self.wide = nn.Linear(64, 1), nn.Linear(1, 16), nn.Linear(16, 64)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        beside = self.last(self.wide(self.first(batch["label"][:, None]).relu()).relu())
        return loss + (beside - batch["label"][:, None]).square().mean()


ORDERS: dict[str, dict[str, Any]] = {
    "three": {"ranks": 3},
    "four": {"ranks": 4},
    "window": {"accumulate_grad_batches": 2, "stop_after": 3},
    "micro_batches": {"micro_batches": 2},
    "split": {"split_backward": True},
    "no_overlap": {"overlap": False},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.001},
}
"""Runs whose dense gradients are added up over three ranks, or as many as it says."""


def _fit_in_another_order(
    ranks: int = 3,
    accumulate_grad_batches: int = 1,
    micro_batches: int = 1,
    stop_after: int | None = None,
    path: str = "",
    resume: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model, data = InAnotherOrder("sgd"), Samples(72)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, micro_batches=micro_batches, balance=REPEATS)
    stop = [StopAt(stop_after, path)] if stop_after is not None else []
    strategy = FreeScaleStrategy(**options)
    fit = trainer(
        devices=ranks, max_epochs=2, callbacks=stop, strategy=strategy, accumulate_grad_batches=accumulate_grad_batches
    )
    fit.fit(model, loader, ckpt_path=resume)
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {"losses": model.losses, "weights": state["state_dict"]}


@pytest.mark.parametrize("run", [pytest.param(run, marks=[pytest.mark.slow] if run != "three" else []) for run in ORDERS])
def test_resume_is_bitwise_where_the_order_of_sums_matters(run: str, tmp_path: Path) -> None:
    """With three ranks and more, gloo adds an element's parts up in an order that depends on its place in the bucket."""
    path, options = str(tmp_path / "half.ckpt"), {"ranks": 3, **ORDERS[run]}
    stop_after = options.pop("stop_after", 4)
    whole = run_distributed(_fit_in_another_order, options["ranks"], **options)
    first = run_distributed(_fit_in_another_order, options["ranks"], stop_after=stop_after, path=path, **options)
    second = run_distributed(_fit_in_another_order, options["ranks"], resume=path, **options)
    for before, after, straight in zip(first, second, whole):
        assert before["losses"] + after["losses"] == straight["losses"]
    torch.testing.assert_close(second[0]["weights"], whole[0]["weights"], rtol=0, atol=0)


def _noted(hooked: bool, **options: Any) -> tuple[list[str], bool, bool, Any]:
    """Of two backwards the order that is noted; whether buckets are laid out by it, and by that of another module."""
    net = nn.ModuleDict({"used_last": nn.Linear(2, 1), "used_first": nn.Linear(1, 2)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return net["used_last"](net["used_first"](x)).sum()

    model, order = DistributedDataParallel(Model(), **options), []
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    with model.no_sync(), noting_order(model, order):
        model(torch.ones(1, 1)).backward()
    assert order == [], "nothing is reduced"
    for _ in range(2):
        loss = model(torch.ones(1, 1))
        with noting_order(model, order):
            loss.backward()
    model.zero_grad()
    laid_out = lay_out_buckets(model, order), lay_out_buckets(model, ["another.weight"])
    return order, *laid_out, net["used_first"].weight.grad


def test_the_first_backward_that_is_reduced_is_noted() -> None:
    order, laid_out, by_another, gradient = run_distributed(_noted, 2, hooked=False)[0]
    assert [name.split(".")[1] for name in order] == ["used_last"] * 2 + ["used_first"] * 2
    assert laid_out and not by_another and gradient is None


@pytest.mark.parametrize(
    "options", [{"hooked": True}, {"hooked": False, "find_unused_parameters": True}], ids=["hook", "unused"]
)
def test_nothing_is_noted_where_buckets_stay_or_a_hook_may_count(options: dict[str, Any]) -> None:
    assert run_distributed(_noted, 2, **options)[0][:3] == ([], False, False)
