"""Rows are pooled bit by bit as in the unsharded module, and the bytes that TorchRec would send are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor

from lightning_freescale.embeddings.overlap.module_forward import BagOutput, without_weights
from lightning_freescale.embeddings.overlap.report import BagTraffic
from tests.helpers.bags import COLUMNS, KEYS, SUM, TABLES, WEIGHTED, configs, jagged, layouts_of

DIM, ROWS = 8, 400


@pytest.mark.parametrize(
    ("row_wise", "rank", "expected"), [(False, 0, [0, 3, 0, 0]), (False, 2, [6, 3, 0, 0]), (True, 1, [9, 0, 9, 9])]
)
def test_who_would_send_pooled_rows(row_wise: bool, rank: int, expected: list[int]) -> None:
    """Return a layout on four ranks; the first table has two features, so ranks 0 and 1 own the whole tables."""
    tables = {"first": (ROWS, DIM, ["a", "b"], SUM), "second": (ROWS, DIM, ["c"], SUM)}
    _, (layout,) = layouts_of(EmbeddingBagCollection(tables=configs(tables)), 4, row_wise)
    features = KeyedJaggedTensor(["c", "unused", "a", "b"], torch.arange(12), lengths=torch.ones(12, dtype=torch.int32))
    assert BagTraffic(layout, rank, DIM).pooled_rows(features).tolist() == expected


def _pooled(module: EmbeddingBagCollection, features: KeyedJaggedTensor) -> KeyedTensor:
    """Return the output of the engine once all rows have arrived."""
    collection, layouts = layouts_of(module, 2)
    tables = [[module.embedding_bags[table.name].weight for table in layout.tables] for layout in layouts]
    rows = [
        torch.cat([weights[index][features[feature].values()] for feature, index in layout.features])
        for layout, weights in zip(layouts, tables)
    ]
    return BagOutput(collection, layouts)(features, rows)


def _assert_same(module: EmbeddingBagCollection, features: KeyedJaggedTensor, weights: Tensor | None = None) -> None:
    """Compare values bit by bit, and gradients up to the order of summation."""
    found = []
    for pooled in (module(features), _pooled(module, features)):
        assert [*pooled.keys()] == [*module(features).keys()]
        scale = torch.linspace(-1, 1, pooled.values().numel()).view_as(pooled.values())
        (pooled.values() * scale).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        if weights is not None:
            gradients["weights"], weights.grad = weights.grad.clone(), None
        module.zero_grad()
        found.append((pooled, gradients))
    (expected, wanted), (mine, gradients) = found
    assert mine.length_per_key() == expected.length_per_key()
    assert torch.equal(mine.values(), expected.values()) and mine.values().is_contiguous()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keys", [KEYS, ["clicked", "bought", "category", "word", "brand", "tag"], [*KEYS, "price"]])
def test_widths_ways_of_pooling_and_columns(keys: list[str]) -> None:
    module = EmbeddingBagCollection(tables=configs(TABLES))
    assert list(module(jagged(keys, 3, torch.Generator())).keys()) == COLUMNS
    for seed in range(4):
        _assert_same(module, jagged(keys, 7, torch.Generator().manual_seed(seed), longest=9))


def test_weights_and_their_gradients() -> None:
    module = EmbeddingBagCollection(tables=configs(WEIGHTED), is_weighted=True)
    for keys in (["price", "place"], ["place", "tag", "price"]):
        features = jagged(keys, 7, torch.Generator().manual_seed(1), weighted=True, longest=9)
        weights = features.weights().clone().requires_grad_()
        given = KeyedJaggedTensor(keys, features.values(), weights, features.lengths())
        _assert_same(module, given, weights)


def test_weights_that_the_collection_has_no_use_for() -> None:
    features = jagged(KEYS, 7, torch.Generator().manual_seed(1), weighted=True)
    _assert_same(EmbeddingBagCollection(tables=configs(TABLES)), features)


def test_without_ids() -> None:
    lengths = torch.zeros(len(KEYS) * 3, dtype=torch.int32)
    _assert_same(
        EmbeddingBagCollection(tables=configs(TABLES)), KeyedJaggedTensor(KEYS, torch.empty(0).long(), lengths=lengths)
    )


def _deduplicated(weighted: bool) -> KeyedJaggedTensor:
    """Use fewer bags than samples, with another number for each feature."""
    draw, keys = torch.Generator().manual_seed(3), ["price", "place"]
    bags = [2, 3]
    lengths = torch.tensor([2, 0, 1, 3, 1])
    values = torch.randint(0, 10, (7,), generator=draw)
    inverse = torch.stack([torch.randint(0, count, (4,), generator=draw) for count in bags])
    weights = torch.rand(7, generator=draw) if weighted else None
    strides: Any = [[count] for count in bags]
    return KeyedJaggedTensor(keys, values, weights, lengths, stride_per_key_per_rank=strides, inverse_indices=(keys, inverse))


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_that_samples_share(weighted: bool) -> None:
    _assert_same(EmbeddingBagCollection(tables=configs(WEIGHTED), is_weighted=weighted), _deduplicated(weighted))


@pytest.mark.parametrize("features", [_deduplicated(True), jagged(KEYS, 5, torch.Generator(), weighted=True)])
def test_ids_without_their_weights(features: KeyedJaggedTensor) -> None:
    alone = without_weights(features)
    assert alone.weights_or_none() is None and features.weights_or_none() is not None
    assert alone.values() is features.values() and alone.keys() == features.keys()
    assert alone.stride_per_key() == features.stride_per_key() and torch.equal(alone.lengths(), features.lengths())
    assert without_weights(alone) is alone
