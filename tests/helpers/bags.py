"""A module with bags of every kind and sequences, and its data."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.helpers.overlap_training import CountingModel
from tests.helpers.recommender import RankBatches

Batch = dict[str, Any]
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
TABLES = {
    "item": (40, 8, ["clicked", "bought"], SUM),
    "brand": (17, 4, ["brand", "bought"], SUM),
    "category": (13, 8, ["category"], MEAN),
    "tag": (3, 4, ["tag"], MEAN),
    "word": (30, 8, ["word"], SUM),
}
"""Rows, width, features and pooling: widths and ways of pooling alternate, and two tables share a feature."""
KEYS = ["tag", "clicked", "brand", "category", "bought", "word"]
"""The order of features in a lookup, which differs from that of the tables."""
COLUMNS = ["clicked", "bought@item", "brand", "bought@brand", "category", "tag", "word"]
WEIGHTED = {"price": (20, 8, ["price"], SUM), "place": (10, 8, ["place"], SUM)}
ROWS = {"clicked": 40, "bought": 17, "brand": 17, "category": 13, "tag": 3, "word": 30, "price": 20, "place": 10}


def configs(tables: dict[str, Any]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, pooling=pooling)
        for name, (rows, dim, features, pooling) in tables.items()
    ]


SETTINGS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-2}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-2}),
}
"""With a smaller eps, rounding becomes a step if gradients cancel."""


class BagModel(CountingModel):
    """Has sequences, bags of two widths, and weighted bags; a layer reads all columns, by their place."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.bags = EmbeddingBagCollection(tables=configs(TABLES))
        self.weighted = EmbeddingBagCollection(tables=configs(WEIGHTED), is_weighted=True)
        width = sum(dim * len(features) for _, dim, features, _ in (TABLES | WEIGHTED).values())
        self.over = nn.Sequential(nn.Linear(width, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))

    def scores(self, batch: Batch) -> Tensor:
        bags, weighted = self.bags(batch["bags"]), self.weighted(batch["weighted"])
        assert bags.keys() == COLUMNS and weighted.keys() == ["price", "place"]
        hidden = self.over(torch.tanh(torch.cat([bags.values(), weighted.values()], dim=1))).squeeze(1)
        return self.net(batch["features"]) + hidden + torch.tanh(bags["word"]).mean(dim=1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.scores(batch), batch["label"])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind, options = SETTINGS[self.optimizer]
        return kind(self.parameters(), **options)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.losses.append(nn.functional.mse_loss(self.scores(batch), batch["label"]).item())


def jagged(keys: list[str], samples: int, draw: torch.Generator, weighted: bool = False, longest: int = 2) -> KeyedJaggedTensor:
    """Return bags of none, one or a few ids. The rows of at most two ids are fewer bytes than the bags."""
    lengths = torch.tensor([0, 0, 1, 1, longest])[torch.randint(0, 5, (len(keys), samples), generator=draw)]
    ids = [torch.randint(0, ROWS[key], (int(each.sum()),), generator=draw) for key, each in zip(keys, lengths)]
    weights = torch.rand(int(lengths.sum()), generator=draw) + 0.5 if weighted else None
    return KeyedJaggedTensor(keys, torch.cat(ids), weights, lengths.view(-1))


def with_bags(batch: Batch, seed: int, longest: int = 2) -> Batch:
    draw, samples = torch.Generator().manual_seed(seed), len(batch["label"])
    bags, weighted = jagged(KEYS, samples, draw, longest=longest), jagged(["price", "place"], samples, draw, weighted=True)
    return {**batch, "bags": bags, "weighted": weighted}


def bag_loader(steps: int, longest: int = 2, salt: int = 0, samples: int = 5) -> DataLoader:
    """Return this rank's batches; each rank has one sample more than the one before."""
    rank = int(os.environ["RANK"])
    batches = enumerate(RankBatches(rank, steps, samples + rank).batches, 1000 * rank + salt)
    return DataLoader([with_bags(batch, seed, longest) for seed, batch in batches], batch_size=None)
