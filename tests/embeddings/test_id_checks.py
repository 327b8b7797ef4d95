"""Checks of ids beyond a table."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.id_checks import LookupChecks
from tests.helpers.pretended_gpu import GPU, PretendedGPU
from tests.helpers.recommender import tables


def test_on_a_gpu_ids_are_checked_there_and_the_host_does_not_wait() -> None:
    """Check on a simulated GPU, where the assertion raises at once."""
    ((collection, _),) = find_collections(nn.ModuleDict({"tables": EmbeddingCollection(tables=tables())}))
    checks, gpu = LookupChecks(collection, {}), PretendedGPU()
    features = KeyedJaggedTensor(
        keys=["history", "other", "category"],
        values=torch.tensor([49, 50, 10**9, -1, 12, 13]),
        lengths=torch.tensor([2, 0, 1, 0, 1, 2]),
    )
    assert LookupChecks(collection, {}).in_range(features).tolist() == [True, False, True, False, True, False]
    with gpu.active():
        for category, sound in ((12, True), (13, False)):
            values, lengths = torch.tensor([49, category], device=GPU), torch.tensor([1, 1], device=GPU)
            features = KeyedJaggedTensor(keys=["history", "category"], values=values, lengths=lengths)
            if sound:
                checks.check_ids(features)
            else:
                with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
                    checks.check_ids(features)
    assert not gpu.waits
