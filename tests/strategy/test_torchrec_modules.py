"""TorchRec's modules around collections, and subclasses of collections."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from lightning_freescale.testing import run_distributed
from tests.helpers.bags import SUM, BagModel, configs, jagged
from tests.helpers.overlap_training import EPOCHS, STEPS, Case, CountingModel, departures, fit_all
from tests.helpers.recommender import RankBatches

CLOSE = {"losses": (1e-6, 1e-12), "weights": (1e-6, 1e-6), "states": (1e-6, 1e-6)}
LONGEST = 3


def _tables(name: str, rows: int = 20, feature: str = "price") -> Any:
    return configs({name: (rows, 4, [feature], SUM)})


class Own(EmbeddingBagCollection):
    """Changes only how it is built."""

    def __init__(self, name: str) -> None:
        super().__init__(tables=_tables(name))
        self.width = 4


class Values(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, found: Any) -> Tensor:
        return self.linear(found.values())


class Around(CountingModel):
    """Pools bags in modules around collections."""

    def __init__(self) -> None:
        super().__init__()
        weighted = EmbeddingBagCollection(tables=_tables("near") + _tables("far", 10, "place"), is_weighted=True)
        positions = PositionWeightedModuleCollection({"price": LONGEST, "place": LONGEST})
        self.processed = FeatureProcessedEmbeddingBagCollection(weighted, positions)
        again = EmbeddingBagCollection(tables=_tables("again"), is_weighted=True)
        self.one = FeatureProcessedEmbeddingBagCollection(again, {"price": PositionWeightedModule(LONGEST)})
        self.tower = EmbeddingTower(EmbeddingBagCollection(tables=_tables("high")), Values())
        others = [EmbeddingTower(EmbeddingBagCollection(tables=_tables(name)), Values()) for name in ("left", "right")]
        self.towers, self.own = EmbeddingTowerCollection(others), Own("own")
        self.over = nn.Linear(8 + 4 + 4 + 8 + self.own.width, 1, bias=False)

    def scores(self, batch: dict[str, Any]) -> Tensor:
        bags = batch["bags"]
        found = [self.processed(bags).values(), self.one(bags).values(), self.tower(bags), self.towers(bags)]
        hidden = torch.cat([*found, self.own(bags).values()], dim=1)
        assert hidden.shape[1] == 24 + self.own.width
        return self.net(batch["features"]) + self.over(torch.tanh(hidden)).squeeze(1)

    training_step, configure_optimizers = BagModel.training_step, BagModel.configure_optimizers


def _loader() -> DataLoader:
    rank = int(os.environ["RANK"])
    batches = enumerate(RankBatches(rank, STEPS, 5).batches, 1000 * rank)
    draws = [(batch, torch.Generator().manual_seed(seed)) for seed, batch in batches]
    return DataLoader([{**batch, "bags": jagged(["price", "place"], 5, draw, longest=LONGEST)} for batch, draw in draws], None)


KNOWN, FIRST = 6, EPOCHS + 1
"""Collections whose ids are found in the batch, and lookups without a prediction of each of them."""
AHEAD = KNOWN * (STEPS * EPOCHS - FIRST), KNOWN * FIRST + STEPS * EPOCHS, 0
CASES = {"around": Case(Around, _loader, ahead=AHEAD, notice="'one._embedding_bag_collection'")}
"""The dict of processors copies the ids, so one collection is not predicted."""


def test_collections_inside_modules_train_as_with_ddp() -> None:
    ranks = run_distributed(fit_all, 2, CASES, "ddp", {})
    assert departures(CASES, ranks, **CLOSE) == []
    initial, (_, run) = Around().state_dict(), ranks[0]["around"]
    positions = [key for key in run.weights if "position_weight" in key]
    assert run.weights.keys() == initial.keys() and len(positions) == 3
    assert not any(torch.equal(run.weights[key], initial[key]) for key in positions)
    _check_quantized(run.weights)


def _check_quantized(weights: dict[str, Tensor]) -> None:
    """Check that TorchRec quantizes the plain module with the weights of a checkpoint, to 255 steps per row."""
    model = Around()
    model.load_state_dict(weights)
    features = KeyedJaggedTensor(["price"], torch.arange(6, 12), lengths=torch.tensor([2, 0, 3, 1]))
    served = nn.ModuleDict({"bags": nn.ModuleDict({"tower": model.tower.embedding, "one": model.one})}).eval()
    step = max(float(weight.max() - weight.min()) for weight in served.parameters()) / 255
    expected = {name: module(features).values().detach() for name, module in served["bags"].items()}
    for name, module in quantize_inference_model(served)["bags"].items():
        assert type(module).__module__.startswith("torchrec.quant.")
        torch.testing.assert_close(module(features).values(), expected[name], rtol=0, atol=LONGEST * step)
