"""Checks of ids beyond a table."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.id_checks import LookupChecks
from tests.helpers.bags import WEIGHTED, configs
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


def test_weights_that_need_a_gradient_are_refused_where_torchrec_exchanges() -> None:
    bags = EmbeddingBagCollection(tables=configs(WEIGHTED), is_weighted=True)
    ((collection, _),) = find_collections(nn.ModuleDict({"bags": bags}))
    ids, lengths, weights = torch.tensor([3, 4]), torch.tensor([1, 1]), torch.ones(2, requires_grad=True)
    checks, features = LookupChecks(collection, {}), KeyedJaggedTensor(["price", "place"], ids, weights, lengths)
    with pytest.raises(ValueError, match=r"'bags': the weights .* gradient.* overlap='torchrec'"):
        checks(bags, (features,), {})
    with torch.no_grad():
        checks(bags, (features,), {})
