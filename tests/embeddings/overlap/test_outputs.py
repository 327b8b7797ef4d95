"""The result looks like that of the unsharded collection."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import run_distributed


def _collection() -> EmbeddingCollection:
    """One feature that two tables look up, and one of its own; with the ids in the result."""
    configs = [
        EmbeddingConfig(name="one", num_embeddings=7, embedding_dim=4, feature_names=["both"]),
        EmbeddingConfig(name="two", num_embeddings=9, embedding_dim=4, feature_names=["own", "both"]),
    ]
    torch.manual_seed(0)
    return EmbeddingCollection(tables=configs, need_indices=True)


def _parts(found: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [part.values().tolist(), part.lengths().tolist(), part.weights().tolist()] for name, part in found.items()}


def _outputs() -> bool:
    whole = _collection()
    root = nn.ModuleDict({"tables": _collection()})
    sharding = TableSharding(root, torch.device("cpu"))
    tables = sharding.shard(group=dist.new_group(), local_world_size=2)
    engine = OverlapEngine(tables)
    ids = KeyedJaggedTensor(
        keys=["unused", "own", "both"], values=torch.tensor([99, 8, 3, 3, 6, 0]), lengths=torch.tensor([1, 0, 2, 1, 0, 2])
    )
    for predicted in (None, True):
        engine.begin_step({"tables": ids})
        assert engine.lookups() == {}
        expected, found = whole(ids), root["tables"](ids)
        assert _parts(found) == _parts(expected)
        (lookup,) = engine.lookups()["tables"]
        assert lookup.features is ids and lookup.predicted is predicted
        engine.end_backward()
    engine.drain()
    return True


def test_names_lengths_and_ids() -> None:
    assert all(run_distributed(_outputs, 2))
