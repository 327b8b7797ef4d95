"""What an nn.Embedding's call returns when a collection has looked the ids up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor

from lightning_freescale.embeddings.plain_embedding import EmbeddingIds, as_collection, rows_of_ids

WEIGHT = torch.arange(20.0).view(5, 4)


def _look_up(ids: Tensor, weight: Tensor, padding_idx: int | None, whole: bool = False) -> Tensor:
    features = EmbeddingIds("emb", ids)
    values = weight[features.values().clone()]
    found = {"emb": JaggedTensor(values=values if whole else values[: len(values)], lengths=features.lengths())}
    return rows_of_ids(found, "emb", ids, padding_idx)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 2)])
def test_ids_of_any_shape_are_one_sample(shape: tuple[int, ...]) -> None:
    ids = torch.ones(shape, dtype=torch.int32)
    features = EmbeddingIds("emb", ids)
    assert features.keys() == ["emb"] and features.stride() == 1
    assert features.lengths().tolist() == features.length_per_key() == [ids.numel()]
    assert features.offset_per_key() == [0, ids.numel()] and features.offsets().tolist() == [0, ids.numel()]
    assert features.ids is ids and features.values().shape == (ids.numel(),)
    assert torch.equal(_look_up(ids, WEIGHT, None), WEIGHT[ids.long()])


@pytest.mark.parametrize("whole", [False, True])
def test_the_result_may_be_changed_and_the_padding_row_has_no_gradient(whole: bool) -> None:
    ids, weight = torch.tensor([[1, 2], [1, 4]]), WEIGHT.clone().requires_grad_()
    found = _look_up(ids, weight, 1, whole)
    found *= 2
    found[0, 0] = float("inf") * found[0, 0]
    ids.zero_()
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0] * 4, [0.0] * 4, [2.0] * 4, [0.0] * 4, [2.0] * 4]
    trained = torch.ones(4, requires_grad=True)
    with torch.no_grad():  # no view: what is trained may be added in place
        found = _look_up(torch.tensor([[1, 2]]), weight, 1, whole)
        assert torch.equal(found[0], WEIGHT[[1, 2]])
    found += trained
    found.sum().backward()
    assert trained.grad is not None and trained.grad.tolist() == [2.0] * 4
    _look_up(torch.tensor([[1, 2]]), weight, 1, whole).detach_()


@pytest.mark.parametrize("path", ["items", "keys", "type", "training", "net.items"])
def test_an_embedding_may_have_any_name(path: str) -> None:
    collection = as_collection(path, nn.Embedding(5, 4, device="meta"))
    assert collection.embedding_configs()[0].feature_names == [path]


def test_a_change_of_the_result_does_not_reach_what_torchrec_has_returned() -> None:
    ids = torch.tensor([1, 2])
    whole = WEIGHT[ids]
    jagged = JaggedTensor(values=whole[:2], lengths=torch.tensor([2]))
    rows_of_ids({"emb": jagged}, "emb", ids, None).zero_()
    assert torch.equal(whole, WEIGHT[ids])
