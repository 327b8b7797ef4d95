"""A sharded EmbeddingBagCollection returns what the unsharded one does, column for column."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import run_distributed

FEATURES = ["a", "b", "shared"]
TABLES = {"first": (50, 8, ["a"]), "second": (50, 4, ["b", "shared"]), "third": (50, 16, ["shared"])}


class OverAllColumns(nn.Module):
    """A layer reads all columns, by their place."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
            for name, (rows, dim, features) in TABLES.items()
        ]
        self.bags = EmbeddingBagCollection(tables=configs)
        self.layer = nn.Linear(sum(dim * len(features) for _, dim, features in TABLES.values()), 1)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[list[str], torch.Tensor]:
        found = self.bags(ids)
        return found.keys(), self.layer(found.values())


def _both() -> tuple[bool, torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Whether the names are the same, both scores, and rows after an update: those of the module and of the shards."""
    torch.manual_seed(0)
    plain = OverAllColumns()
    model = copy.deepcopy(plain)
    sharding = TableSharding(model, torch.device("cpu"))
    sgd = TableOptimizer(torch.optim.SGD, {"lr": 1.0}, group=0)
    tables = sharding.shard(
        group=dist.new_group(), local_world_size=dist.get_world_size(), optimizers=dict.fromkeys(sharding.parameters, sgd)
    )
    ids = KeyedJaggedTensor(keys=FEATURES, values=torch.arange(12) % 50, lengths=torch.full((6,), 2))  # the same on all ranks
    (names, expected), (keys, scores) = plain(ids), model(ids)
    expected.sum().backward()
    scores.sum().backward()
    bags = plain.bags.embedding_bags
    wanted = {name: (bags[name].weight - bags[name].weight.grad).detach() for name in TABLES}
    rows = [(shard.weight.clone(), wanted[shard.table.name][shard.rows]) for shard in tables.shards()]
    return keys == names, expected.detach(), scores.detach(), rows


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_columns_are_in_the_order_of_the_tables(ranks: int) -> None:
    for same_names, expected, scores, rows in run_distributed(_both, ranks):
        assert same_names
        torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
        for shard, wanted in rows:
            torch.testing.assert_close(shard, wanted, rtol=1e-6, atol=1e-6)
