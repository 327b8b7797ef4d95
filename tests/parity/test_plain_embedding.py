"""A module of plain nn.Embeddings under "ddp", and sharded under "freescale"."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import PLAIN, Case, assert_same, continued, departures, fit_all
from tests.helpers.plain_embeddings import ITEMS, KEYS, KIND_DIM, KINDS, LENGTH, SHARDED, PlainModel, plain_loader
from tests.helpers.recommender import DIM

STEPS, EPOCHS = 8, 2
SHARD = {"shard": SHARDED}
CLOSE = {"losses": (1e-5, 1e-12), "weights": (1e-5, 1e-6), "states": (1e-5, 1e-6)}


class LooksUpSlices(PlainModel):
    """A slice of the items, and a kind whose gradients are sparse under "ddp"."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.kind_emb = torch.nn.Embedding(KINDS, KIND_DIM, sparse=True)

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return super().scores({**batch, "items": batch["items"][:, :-1]})


class WithAdam(PlainModel):
    """Looks up every row in every step, because torch's Adam moves all rows."""

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        items = torch.cat([batch["items"], (torch.arange(54) % ITEMS).view(9, LENGTH)])
        found = super().scores({"items": items, "kind": torch.cat([batch["kind"], torch.arange(9) % KINDS])})
        return found[:-9] + found[-9:].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02, betas=(0.8, 0.95), eps=1e-6)


class SharesWeight(PlainModel):
    """Two embeddings look up one weight, and both are called in a step."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.last_emb = torch.nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.last_emb.weight = self.encoder.item_emb.weight

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return super().scores(batch) + self.last_emb(batch["items"][:, -1]).sum(dim=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)

    def on_train_end(self) -> None:
        super().on_train_end()
        if isinstance(self.trainer.strategy, FreeScaleStrategy):
            first, second = map(self.trainer.strategy.full_weight, ("encoder.item_emb", "last_emb"))
            assert torch.equal(first, second) and self.last_emb is self.encoder.item_emb


def case(make: Any, ahead: Any = None, **options: Any) -> Case:
    return Case(make, lambda: plain_loader(STEPS), options, ahead=ahead, notice=None)


CASES = {name: case(partial(PlainModel, name)) for name in ("sgd", "adagrad")}


@pytest.mark.parametrize("world", [1, 2])
def test_same_as_ddp(world: int) -> None:
    ranks = run_distributed(fit_all, world, CASES, "ddp", SHARD, {**SHARD, **PLAIN}, {**SHARD, "dedup": False})
    assert departures(CASES, ranks, **CLOSE, moves=1.5) == []
    initial = PlainModel().state_dict()
    for runs in ranks:
        for _, dedup, plain, bitwise in runs.values():
            assert bitwise.losses == plain.losses
            # both tables' ids stand in the batch: known but for the first of each epoch, and the second of all
            assert dedup.looked_ahead() == (2 * (STEPS * EPOCHS - EPOCHS - 1), 2 * (EPOCHS + 1), 0)
    for ddp, *sharded in ranks[0].values():
        assert not any(torch.equal(ddp.weights[key], initial[key]) for key in KEYS)
        assert not any(mine.weights[KEYS[0]][0].any() for mine in sharded), "the padding row is never updated"
        assert_same(sharded[2].weights, sharded[1].weights)


OTHERS = {
    "shares a weight": case(SharesWeight, max_epochs=1),
    "slices": case(LooksUpSlices, (2 * (STEPS - 2), 2 * 2, 0), max_epochs=1),
    "adam": case(WithAdam, max_epochs=1),
    "windows": case(PlainModel, accumulate_grad_batches=2, max_epochs=1),
    "bf16-mixed": case(PlainModel, precision="bf16-mixed", max_epochs=1),
}


def test_other_ways_of_use() -> None:
    assert departures(OTHERS, run_distributed(fit_all, 2, OTHERS, "ddp", SHARD), **CLOSE) == []


def _resumed(path: Path) -> dict[str, list[Any]]:
    sharing, options = case(SharesWeight), {"shard": ["last_emb", "kind_emb"]}
    ways = {"resumed": (options, options), "to ddp": (options, "ddp"), "from ddp": ("ddp", options)}
    return {name: continued(sharing, str(path / name), STEPS, *way) for name, way in ways.items()}


def test_a_checkpoint_has_a_shared_weight_by_both_names(tmp_path: Path) -> None:
    ranks = run_distributed(_resumed, 2, tmp_path)
    assert departures({name: case(SharesWeight) for name in ranks[0]}, ranks, **CLOSE) == []
    names = KEYS[0], "last_emb.weight"
    for name in ranks[0]:
        saved = torch.load(tmp_path / name)["state_dict"]
        assert saved.keys() == SharesWeight().state_dict().keys()
        assert torch.equal(*(saved[each] for each in names))
