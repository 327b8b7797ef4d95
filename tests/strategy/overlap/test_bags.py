"""Bags have the results of the unsharded module under "ddp"."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_freescale.testing import run_distributed
from tests.helpers.bags import SUM, BagModel, Batch, bag_loader, configs
from tests.helpers.overlap_training import EPOCHS, GIVEN, KNOWN, STEPS, Case, departures, fit_all

EXCHANGES = 4  # sequences, bags of two widths, weighted bags
AHEAD = tuple(EXCHANGES * count for count in KNOWN)
DDP, UNUSED = "ddp_find_unused_parameters_true", {"find_unused_parameters": True}
CLOSE = {"losses": (2e-6, 1e-7), "weights": (2e-6, 1e-6), "states": (2e-6, 1e-6), "moves": 1.2}


def bags(make: Any, ahead: Any = AHEAD, overlap: Any = None, validation: Any = None, notice: str = "", **options: Any) -> Case:
    return Case(make, lambda: bag_loader(STEPS), options, overlap or {}, validation, ahead=ahead, notice=notice)


class Twice(BagModel):
    def scores(self, batch: Batch) -> Tensor:
        ids = batch["bags"]
        others = KeyedJaggedTensor(ids.keys(), ids.values() * 5 % 3, lengths=ids.lengths())
        return super().scores(batch) + self.bags(others).values().mean(dim=1)


class OnSomeRanks(BagModel):
    """Looks up weighted bags in every step on the first rank, and in every second one on the others."""

    calls = 0

    def scores(self, batch: Batch) -> Tensor:
        self.calls += 1
        looked_up = self.calls % 2 == 0 or self.global_rank == 0
        return self.net(batch["features"]) + (self.weighted(batch["weighted"]).values().mean(dim=1) if looked_up else 0)


class LearnsWeights(BagModel):
    def __init__(self) -> None:
        super().__init__("adagrad")
        self.weight_of = nn.Embedding(20, 1)

    def scores(self, batch: Batch) -> Tensor:
        ids = batch["weighted"]
        weights = self.weight_of(ids.values()).squeeze(1).exp()
        weighted = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
        return super().scores({**batch, "weighted": weighted})


class Computes(BagModel):
    def scores(self, batch: Batch) -> Tensor:
        return super().scores({**batch, **computed(batch)})


def computed(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    bags, weighted = batch["bags"], batch["weighted"]
    return {
        "bags": KeyedJaggedTensor(bags.keys(), bags.values() * 2 % 3, lengths=bags.lengths()),
        "weighted": KeyedJaggedTensor(weighted.keys(), weighted.values() * 3 % 10, weighted.weights() * 2, weighted.lengths()),
    }


BY_VALUE = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2}
IN_TIER_2 = [(2, False), (4, True)]
OPTIMIZERS = {name: bags(partial(BagModel, name)) for name in ("sgd", "adagrad", "rowwise_adagrad")}
OTHERS = {
    "by norm": bags(partial(BagModel, "rowwise_adagrad"), gradient_clip_val=0.05),
    "windows by value": bags(BagModel, overlap={"dedup": False}, **BY_VALUE),
    "validation": bags(partial(BagModel, "rowwise_adagrad"), validation=lambda: bag_loader(2, salt=7), val_check_interval=2),
    "twice": bags(Twice, None, notice="'bags'"),
    "on some ranks": bags(OnSomeRanks, None),
    "weights that are learned": bags(LearnsWeights),  # weights need not be known ahead
    "a function": bags(Computes, (3 * GIVEN[0] + KNOWN[0], 3 * GIVEN[1] + KNOWN[1], 0), {"ids_of": computed}),
}


@pytest.mark.parametrize(("ranks", "dedup"), [(2, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in IN_TIER_2)])
def test_as_under_ddp(ranks: int, dedup: bool) -> None:
    results = run_distributed(fit_all, ranks, OPTIMIZERS, DDP, {**UNUSED, "dedup": dedup})
    assert departures(OPTIMIZERS, results, **CLOSE) == []
    for runs in results:
        for _, run in runs.values():
            assert run.statistics["non_colliding_bytes"] > 0
            assert run.statistics["steps"] == STEPS * EPOCHS, "for any number of exchanges in a step"


def test_in_all_ways_as_under_ddp() -> None:
    results = run_distributed(fit_all, 2, OTHERS, DDP, UNUSED)
    assert departures(OTHERS, results, **CLOSE) == []
    clipped, plain = (results[0][name][0].weights for name in ("by norm", "validation"))
    assert all((plain[name] - clipped[name]).abs().max() > 1e-4 for name in plain if "bags" in name), "nothing was clipped"


# -- bags whose rows are more bytes than the pooled bags


class WeightsForNothing(BagModel):
    """Passes weights to the unweighted collection, which ignores them."""

    def scores(self, batch: Batch) -> Tensor:
        ids = batch["bags"]
        weighted = KeyedJaggedTensor(ids.keys(), ids.values(), ids.values().float(), ids.lengths())
        return super().scores({**batch, "bags": weighted})


class LearnsLongWeights(BagModel):
    """Weights long bags by a layer's values of their ids."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.weighted = EmbeddingBagCollection(tables=configs({"word": (30, 8, ["word"], SUM)}), is_weighted=True)
        self.weight_of = nn.Embedding(30, 1)

    def scores(self, batch: Batch) -> Tensor:
        ids = batch["bags"]
        weights = self.weight_of(ids.values() % 30).squeeze(1).exp()
        weighted = self.weighted(KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths()))
        return self.net(batch["features"]) + torch.tanh(weighted.values()).mean(dim=1)


def long_bags(make: Any, **options: Any) -> Case:
    return Case(make, lambda: bag_loader(12, longest=60, samples=2), options, {}, lambda: bag_loader(2))


LONG = {
    "adagrad": long_bags(BagModel),
    "windows": long_bags(BagModel, accumulate_grad_batches=2),
    "weights that are learned": long_bags(LearnsLongWeights),
    "weights without use": long_bags(WeightsForNothing),
}


def test_long_bags_as_under_ddp() -> None:
    results = run_distributed(fit_all, 2, LONG, DDP, UNUSED)
    assert departures(LONG, results, **CLOSE) == []
