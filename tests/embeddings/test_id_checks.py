"""Ids beyond a table."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.id_checks import LookupChecks
from tests.helpers.recommender import tables


def test_the_device_side_check_finds_the_same_ids() -> None:
    root = nn.ModuleDict({"tables": EmbeddingCollection(tables=tables())})
    ((collection, _),) = find_collections(root)
    features = KeyedJaggedTensor(
        keys=["history", "other", "category"],
        values=torch.tensor([49, 50, 10**9, -1, 12, 13]),
        lengths=torch.tensor([2, 0, 1, 0, 1, 2]),
    )
    assert LookupChecks(collection, {}).in_range(features).tolist() == [True, False, True, False, True, False]
