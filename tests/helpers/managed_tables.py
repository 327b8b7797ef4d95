"""A recommender whose ids are managed: far more of them than rows, most of them rare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.helpers.recommender import CATEGORIES, Recommender

DIM, IDS, BATCH = 8, 4000, 4
CPU = torch.device("cpu")
ROWS = {"item": 32, "user": 20}
MANAGED = "items._managed_collision_collection._managed_collision_modules"


def spread(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Popular ids are small; without this the first rank would get them all."""
    return ids * 1237 % size


def managed_tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(name="item", num_embeddings=32, embedding_dim=DIM, feature_names=["history", "candidate"]),
        EmbeddingConfig(name="user", num_embeddings=20, embedding_dim=DIM, feature_names=["user"]),
    ]


def managed_collection(configs: list[EmbeddingConfig] | None = None) -> ManagedCollisionEmbeddingCollection:
    """Zero-collision hashing with two eviction policies that act at different steps."""
    configs = configs or managed_tables()
    policies: dict[str, Any] = {"item": (DistanceLFU_EvictionPolicy(), 2), "user": (LRU_EvictionPolicy(), 3)}
    modules: dict[str, Any] = {}
    for config in configs:
        policy, interval = policies.get(config.name, policies["item"])
        modules[config.name] = MCHManagedCollisionModule(
            config.num_embeddings,
            CPU,
            eviction_policy=policy,
            eviction_interval=interval,
            input_hash_size=IDS,
            input_hash_func=spread,
        )
    collection = ManagedCollisionCollection(modules, configs)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=configs), collection, return_remapped_features=True)


class ManagedNet(nn.Module):
    """History, candidate and user are managed, the category is not."""

    def __init__(self) -> None:
        super().__init__()
        self.items = managed_collection()
        category = EmbeddingConfig(name="cat", num_embeddings=CATEGORIES, embedding_dim=DIM, feature_names=["category"])
        self.categories = EmbeddingCollection(tables=[category])
        self.hidden = nn.Sequential(nn.Linear(3 * DIM, DIM, bias=False), nn.Tanh(), nn.Linear(DIM, DIM, bias=False))
        self.remapped: list[list[int]] = []

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found, remapped = self.items(features.permute([2, 0, 1]))  # not in the order of the tables
        category = self.categories(features.permute([3]))["category"].values()
        pooled = torch.segment_reduce(found["history"].values(), "mean", lengths=found["history"].lengths().long(), initial=0.0)
        hidden = self.hidden(torch.cat([pooled, found["user"].values(), category], dim=1))
        self.remapped.append(remapped["history"].values().tolist())
        return (hidden * found["candidate"].values()).sum(dim=1)


class ManagedRecommender(Recommender):
    kind = ManagedNet

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.losses.append(nn.functional.mse_loss(self.net(batch["features"]), batch["label"]).item())


class TwoRates(ManagedRecommender):
    """Each table in a parameter group of its own, so that TorchRec orders them in its own way."""

    def configure_optimizers(self) -> Any:
        tables = dict(self.net.items._embedding_module.embeddings.named_parameters())
        rest = [p for p in self.parameters() if all(p is not table for table in tables.values())]
        groups = [{"params": [table], "lr": rate} for table, rate in zip(tables.values(), (0.3, 0.1))]
        return RowWiseAdagrad([*groups, {"params": rest}], lr=0.1)


class ManagedBatches:
    """Fixed batches, one list per rank, of ids whose frequencies follow Zipf's law and drift from step to step.

    After a resume they go on where the checkpoint was saved, as those of a data module would.
    """

    def __init__(self, rank: int, steps: int) -> None:
        self.draw = torch.Generator().manual_seed(300 + rank)
        self.batches = [self._batch(step) for step in range(steps)]
        self.done = 0

    def _ids(self, count: int, drift: int) -> torch.Tensor:
        return ((IDS ** torch.rand(count, generator=self.draw)).long() + drift) % IDS

    def _batch(self, step: int) -> dict[str, Any]:
        lengths = torch.randint(1, 9, (BATCH,), generator=self.draw)
        history = self._ids(int(lengths.sum()), 3 * step)
        candidates, users = self._ids(BATCH, 3 * step), self._ids(BATCH, 5 * step)
        categories = torch.randint(0, CATEGORIES, (BATCH,), generator=self.draw)
        ones = torch.ones(3 * BATCH, dtype=torch.int64)
        features = KeyedJaggedTensor(
            keys=["history", "candidate", "user", "category"],
            values=torch.cat([history, candidates, users, categories]),
            lengths=torch.cat([lengths, ones]).int(),
        )
        return {"features": features, "label": torch.rand(BATCH, generator=self.draw)}

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first, self.done = self.done % len(self.batches), self.done % len(self.batches)
        for batch in self.batches[first:]:
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]
