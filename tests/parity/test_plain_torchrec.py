"""Strategy "freescale" against hand-written loops of plain TorchRec and DDP: bitwise the same, managed collisions as well."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

from lightning_freescale.testing import run_distributed
from tests.helpers import plain_managed, plain_torchrec
from tests.helpers.managed_tables import IDS, MANAGED, ROWS, ManagedBatches, ManagedNet, ManagedRecommender
from tests.helpers.overlap_training import PLAIN, Case, CountingModel, Run, my_loader
from tests.helpers.recommender import OPTIMIZERS, Net, RankBatches

STEPS, MANAGED_STEPS = 20, 14


def _both(optimizer: str) -> tuple[dict[str, Any], list[Run]]:
    case = Case(partial(CountingModel, optimizer), lambda: my_loader(STEPS), {"max_epochs": 1})
    runs = [case.fit(way) for way in ({"dedup": False}, PLAIN)]
    torch.manual_seed(0)
    return plain_torchrec.train(Net(), optimizer, RankBatches(int(os.environ["RANK"]), STEPS)), runs


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bitwise_equal(optimizer: str, ranks: int) -> None:
    results = run_distributed(_both, ranks, optimizer)
    for plain, runs in results:
        assert all(run.losses == plain["losses"] for run in runs)
        assert len(set(plain["losses"])) == STEPS, "the loss must move, or equality means nothing"
    plain, runs = results[0]
    for run in runs:
        for name, weight in plain["weights"].items():
            assert torch.equal(run.weights[f"net.{name}"], weight), name
        for index, table in enumerate(("item", "cat")):
            state, momentum = run.states[0]["state"].get(index, {}), plain["states"].get(f"{table}.momentum1")
            assert ("sum" in state) == (optimizer != "sgd")
            assert momentum is None or torch.equal(state["sum"].flatten(), momentum.flatten())


# -- managed collisions, with evictions


class Seeded(ManagedRecommender):
    """The strategy keeps random draws of its own out of training, the loop by hand does not: both seed after set-up."""

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)
        self.statistics = {"remapped": self.net.remapped}


def _managed(optimizer: str) -> tuple[Run, dict[str, Any]]:
    data = ManagedBatches(int(os.environ["RANK"]), MANAGED_STEPS)
    run = Case(partial(Seeded, optimizer), lambda: data, {"max_epochs": 1}).fit({"dedup": False})
    torch.manual_seed(0)
    return run, plain_managed.train(ManagedNet(), optimizer, data)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("sgd", marks=pytest.mark.slow), "adagrad", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)],
)
def test_managed_collisions_are_bitwise_equal(optimizer: str, ranks: int) -> None:
    results = run_distributed(_managed, ranks, optimizer)
    for run, by_hand in results:
        assert (run.losses, run.statistics["remapped"]) == (by_hand["losses"], by_hand["remapped"])
    mine, plain = results[0]
    assert len(set(mine.losses)) == MANAGED_STEPS, "the loss must move, or equality means nothing"
    assert plain["weights"].keys() == {name.removeprefix("net.") for name in mine.weights}
    for name, weight in plain["weights"].items():
        assert torch.equal(mine.weights[f"net.{name}"], weight), name
    tables = {f"{name.split('.')[-2]}.momentum1": index for index, (name, _) in enumerate(ManagedNet().named_parameters())}
    assert len(plain["states"]) == (0 if optimizer == "sgd" else 3)
    for name, momentum in plain["states"].items():
        assert torch.equal(mine.states[0]["state"][tables[name]]["sum"].flatten(), momentum.flatten())
    seen = torch.cat([b["features"]["history"].values() for r in range(2) for b in ManagedBatches(r, MANAGED_STEPS).batches])
    raw = plain["weights"][f"{MANAGED}.item._mch_sorted_raw_ids"]
    first = torch.cat([ManagedBatches(r, 1).batches[0]["features"]["history"].values() for r in range(2)])
    assert len(seen.unique()) > 3 * ROWS["item"], "most ids must find no row"
    assert not torch.isin(first * 1237 % IDS, raw[raw < IDS]).all(), "ids of the first step must have lost their rows"
