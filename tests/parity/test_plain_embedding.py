"""A module of plain nn.Embeddings under "ddp", and sharded under "freescale"."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import assert_same
from tests.helpers.plain_embeddings import KEYS, KINDS, SHARDED, PlainModel, plain_loader
from tests.helpers.recommender import DIM, trainer

STEPS, EPOCHS = 8, 2


@dataclass
class Fit:
    """What a fit leaves behind; weights and states are whole, on rank 0."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: Any
    statistics: dict[str, float]


def _fit(optimizer: str, strategy: Any) -> Fit:
    torch.manual_seed(0)
    module = PlainModel(optimizer)
    fitting = trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), max_epochs=EPOCHS)
    fitting.fit(module, plain_loader(STEPS))
    saved = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    return Fit(module.losses, saved["state_dict"], saved["optimizer_states"], module.statistics)


def _fits(optimizer: str) -> list[Fit]:
    ways: list[Callable[[], Any]] = [
        lambda: "ddp",
        lambda: FreeScaleStrategy(shard=SHARDED),
        lambda: FreeScaleStrategy(shard=SHARDED, overlap=False),
        lambda: FreeScaleStrategy(shard=SHARDED, dedup=False),
    ]
    return [_fit(optimizer, way()) for way in ways]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_same_as_ddp(optimizer: str, world: int) -> None:
    ranks = run_distributed(_fits, world, optimizer)
    for ddp, *sharded in ranks:
        for mine in sharded:
            assert mine.losses == pytest.approx(ddp.losses, rel=1e-5)
        assert max(ddp.losses) / min(ddp.losses) > 1.5, "the loss must move, or equality means nothing"
        plain, bitwise = sharded[1:]
        assert bitwise.losses == plain.losses
    ddp, *sharded = ranks[0]
    initial = PlainModel().state_dict()
    assert not any(torch.equal(ddp.weights[key], initial[key]) for key in KEYS)
    for mine in sharded:
        assert_same(mine.weights, ddp.weights, rtol=1e-5, atol=1e-6)
        assert_same(mine.states, ddp.states, rtol=1e-5, atol=1e-6)
        assert not mine.weights[KEYS[0]][0].any(), "the padding row is never updated"
    assert_same(sharded[2].weights, sharded[1].weights)
    # both tables' ids stand in the batch: known but for the first of each epoch, and the second of all
    statistics = sharded[0].statistics
    looked_ahead = [int(statistics[f"{how}predicted_lookups"]) for how in ("", "un", "mis")]
    assert looked_ahead == [2 * (STEPS * EPOCHS - EPOCHS - 1), 2 * (EPOCHS + 1), 0]


class LooksUpSlices(PlainModel):
    """A slice of the items, and a kind whose gradients are sparse under "ddp"."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.kind_emb = torch.nn.Embedding(KINDS, DIM, sparse=True)

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().scores({**batch, "items": batch["items"][:, :-1]})


class LooksUpTwice(PlainModel):
    """The items that went before and those that come after."""

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        after = self.encoder.item_emb(batch["items"][:, 1:]).mean(dim=1)
        return (super().scores({**batch, "items": batch["items"][:, :-1]})) + after.sum(dim=1)


class ComputesAgain(PlainModel):
    """The encoder once more in backward, in place of keeping what it has computed."""

    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        encoded = checkpoint(self.encoder, batch["items"], use_reentrant=False)
        return (encoded * self.kind_emb(batch["kind"])).sum(dim=1)


def _both(make: Callable[[], PlainModel], **options: Any) -> list[Fit]:
    fits = []
    for strategy in ("ddp", FreeScaleStrategy(shard=SHARDED)):
        torch.manual_seed(0)
        module = make()
        fitting = trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), **options)
        fitting.fit(module, plain_loader(STEPS))
        saved = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
        fits.append(Fit(module.losses, saved["state_dict"], saved["optimizer_states"], module.statistics))
    return fits


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (LooksUpSlices, {}),
        (LooksUpTwice, {}),
        (ComputesAgain, {}),
        pytest.param(PlainModel, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param(PlainModel, {"precision": "bf16-mixed"}, marks=pytest.mark.slow),
    ],
)
def test_other_ways_of_use(make: Callable[[], PlainModel], options: dict[str, Any]) -> None:
    ranks = run_distributed(_both, 2, make, **options)
    for ddp, mine in ranks:
        assert mine.losses == pytest.approx(ddp.losses, rel=1e-5)
    ddp, mine = ranks[0]
    assert_same(mine.weights, ddp.weights, rtol=1e-5, atol=1e-6)
    if make is LooksUpSlices:
        assert mine.statistics["predicted_lookups"] == 2 * (STEPS - 2)
