"""A module whose next step is run ahead of time, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.strategy.dry_run import DryRunResult, dry_run_ids

DIM = 4


def item_collection() -> EmbeddingCollection:
    config = EmbeddingConfig(name="item", num_embeddings=20, embedding_dim=DIM, feature_names=["clicked", "shown"])
    return EmbeddingCollection(tables=[config], need_indices=True)


def _bags() -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=dim, feature_names=features)
        for name, dim, features in [("user", 3, ["user", "shared"]), ("other", 5, ["shared"])]
    ]
    return EmbeddingBagCollection(tables=configs)


def example_batch(seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([2, 0, 1, 1])
    return {
        "ids": torch.randint(0, 20, (4,), generator=draw),
        "lengths": lengths,
        "users": KeyedJaggedTensor(["user", "shared"], torch.randint(0, 9, (4,), generator=draw), lengths=lengths),
        "dense": torch.rand(2, 3, generator=draw),
        "names": ["a", "b"],
    }


class Model(L.LightningModule):
    """Two lookups; everything before the second one is what a dry run executes."""

    def __init__(self, between: Callable[[Model, dict[str, Any]], Any] = lambda model, batch: None) -> None:
        super().__init__()
        self.items, self.bags, self.between = item_collection(), _bags(), between
        self.norm, self.metric, self.mean = nn.BatchNorm1d(3), torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        self.register_buffer("queue", torch.zeros(3))
        self.compiled = torch.compile(nn.BatchNorm1d(3), backend="eager")
        self.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.losses, self.counters, self.step, self.after = [0.5], {"steps": [1]}, 1, 0
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = np.random.default_rng(3)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        ids = torch.cat([batch["ids"][:2], batch["ids"][2:]])  # not in the batch
        found = self.items(KeyedJaggedTensor(["clicked", "shown"], ids, lengths=batch["lengths"]))
        self.between(self, batch)
        pooled = self.bags(features=batch["users"])
        self.after += 1
        self.losses.append(0.0)
        loss = found["clicked"].values().sum() + pooled.to_dict()["user"].sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def dry_run(model: Model, batch: dict[str, Any] | None = None, **options: Any) -> DryRunResult:
    return dry_run_ids(model, find_collections(model), (batch or example_batch(), 0), torch.device("cpu"), **options)
