"""Losses over all items of a table in shard=: as with the whole weight under "ddp", however the model computes them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.catalogue_models import CLOSE, SHARD, STYLES, NextItem, case, loader
from tests.helpers.overlap_training import compared, fit


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "sgd"), (2, "adagrad"), (3, "adam")])
def test_losses_weights_and_states_are_those_of_ddp(ranks: int, optimizer: str) -> None:
    cases = {style: case(style, optimizer) for style in STYLES}
    assert compared(ranks, cases, "ddp", SHARD, **CLOSE) == []


class Gradients(NextItem):
    """Keeps the gradients of one step; on one rank no position counts."""

    def __init__(self, style: str) -> None:
        super().__init__(style)
        nn.init.normal_(self.item_emb.weight, std=0.01)  # the table's gradient is read from its change
        self.found: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        states, targets = self.states(batch["items"][:, :-1]), batch["items"][:, 1:]
        self.kept = states.detach().requires_grad_()
        loss = self.style(self, self.kept, targets if self.global_rank != 1 else torch.zeros_like(targets))
        self.losses.append(loss.item())
        return loss + 0.0 * (states.sum() + self.bias.sum())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.bias.grad is not None and self.kept.grad is not None
        self.found |= {"bias": self.bias.grad.clone(), "states": self.kept.grad.clone()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _gradients(style: str, way: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Gradients(style)
    before = model.item_emb.weight.detach().clone()
    run = fit(model, loader(), strategy="ddp" if way == "ddp" else FreeScaleStrategy(shard=["item_emb"]), max_steps=1)
    table = {"table": before - run.weights["item_emb.weight"]} if int(os.environ["RANK"]) == 0 else {}
    return {**model.found, **table}


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_of_one_step(ranks: int) -> None:
    styles = ("linear", "second", "sliced", "twice")
    for rank, found in enumerate(run_distributed(lambda: [[_gradients(s, w) for w in ("ddp", "")] for s in styles], ranks)):
        for style, (ddp, mine) in zip(styles, found):
            for name, expected in ddp.items():
                largest = float(expected.abs().max())
                assert largest > 0 or (rank == 1 and name == "states"), (style, name)
                assert float((mine[name] - expected).abs().max()) <= 1e-6 * largest, (style, name, rank)
