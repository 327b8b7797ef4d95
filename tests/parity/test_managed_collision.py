"""Managed collisions under "freescale" against plain TorchRec and DDP: bitwise the same, with evictions."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers import plain_managed
from tests.helpers.managed_tables import IDS, MANAGED, ROWS, ManagedBatches, ManagedNet, ManagedRecommender
from tests.helpers.recommender import trainer

STEPS = 14


class Seeded(ManagedRecommender):
    """The strategy keeps random draws of its own out of training, the loop by hand does not: both seed after set-up."""

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)


def _with_freescale(optimizer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Seeded(optimizer)
    fit = trainer(strategy=FreeScaleStrategy(dedup=False), devices=int(os.environ["WORLD_SIZE"]))
    fit.fit(module, ManagedBatches(int(os.environ["RANK"]), STEPS))
    saved = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {
        "losses": module.losses,
        "remapped": module.net.remapped,
        "weights": saved["state_dict"],
        "optimizer": saved["optimizer_states"][0],
    }


def _by_hand(optimizer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return plain_managed.train(ManagedNet(), optimizer, ManagedBatches(int(os.environ["RANK"]), STEPS))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("sgd", marks=pytest.mark.slow), "adagrad", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)],
)
def test_bitwise_equal(optimizer: str, ranks: int) -> None:
    mine, plain = (run_distributed(how, ranks, optimizer) for how in (_with_freescale, _by_hand))
    for rank in range(ranks):
        assert mine[rank]["losses"] == plain[rank]["losses"]
        assert mine[rank]["remapped"] == plain[rank]["remapped"]
    assert len(set(mine[0]["losses"])) == STEPS, "the loss must move, or equality means nothing"
    assert plain[0]["weights"].keys() == {name.removeprefix("net.") for name in mine[0]["weights"]}
    for name, weight in plain[0]["weights"].items():
        assert torch.equal(mine[0]["weights"][f"net.{name}"], weight), name
    tables = {f"{name.split('.')[-2]}.momentum1": index for index, (name, _) in enumerate(ManagedNet().named_parameters())}
    assert len(plain[0]["states"]) == (0 if optimizer == "sgd" else 3)
    for name, momentum in plain[0]["states"].items():
        assert torch.equal(mine[0]["optimizer"]["state"][tables[name]]["sum"].flatten(), momentum.flatten())
    _must_have_evicted(plain[0]["weights"])


def _must_have_evicted(weights: dict[str, torch.Tensor]) -> None:
    seen = torch.cat([b["features"]["history"].values() for r in range(2) for b in ManagedBatches(r, STEPS).batches]).unique()
    assert len(seen) > 3 * ROWS["item"], "most ids must find no row"
    assert int(seen.max()) > ROWS["item"]
    raw = weights[f"{MANAGED}.item._mch_sorted_raw_ids"]
    kept = raw[raw < IDS]
    assert len(kept) > ROWS["item"] // 2
    first = torch.cat([ManagedBatches(r, 1).batches[0]["features"]["history"].values() for r in range(2)])
    assert not torch.isin(first * 1237 % IDS, kept).all(), "ids of the first step must have lost their rows"
