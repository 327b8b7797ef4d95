"""Comparison of predicted ids with those that are looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.id_prediction import KJTSnapshot
from tests.helpers.jagged import KEYS, copy_of, make_features, same_features

PARTS = ("values", "lengths")


@pytest.mark.parametrize("offsets", [False, True])
def test_same_contents(offsets: bool) -> None:
    here = make_features(0, offsets=offsets)
    for same in (here, copy_of(here), make_features(0, offsets=not offsets)):
        assert same_features(here, same)
    assert not same_features(here, make_features(1, offsets=offsets))


def test_one_difference_is_enough() -> None:
    f = make_features(0)
    values, lengths = f.values(), f.lengths()
    assert not torch.equal(lengths, lengths.flip(0))
    others = {
        "order of keys": KeyedJaggedTensor(KEYS[::-1], values, lengths=lengths),
        "keys": KeyedJaggedTensor([*KEYS, "more"], values, lengths=lengths),
        "values": KeyedJaggedTensor(KEYS, values.flip(0), lengths=lengths),
        "type": KeyedJaggedTensor(KEYS, values.int(), lengths=lengths),
        "lengths": KeyedJaggedTensor(KEYS, values, lengths=lengths.flip(0)),
        "shape": KeyedJaggedTensor(KEYS, values, lengths=lengths.view(2, 3)),
    }
    assert [name for name, other in others.items() if same_features(f, other) or same_features(other, f)] == []


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda tensor: tensor.numpy().__iadd__(1),
    "data": lambda tensor: tensor.data.add_(1),
    "in place": lambda tensor: tensor.add_(1),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changed_contents_are_no_match(how: str) -> None:
    for part in PARTS:
        features = make_features(0)
        features.values().add_(1)  # a change before the capture does not matter
        captured, before = KJTSnapshot(features), copy_of(features)
        assert captured.matches(features)
        CHANGES[how](getattr(features, part)())
        assert not captured.matches(features) and not captured.matches(copy_of(features)), part
        assert captured.matches(before), "what was captured, and is submitted, stays"
        assert same_features(captured.features, before)


def test_what_was_captured_has_the_sizes_of_every_feature() -> None:
    counts, inverse = [[2], [1]], (list(KEYS), torch.zeros(2, 2, dtype=torch.int64))
    features = KeyedJaggedTensor(
        KEYS, torch.arange(4), lengths=torch.tensor([1, 2, 1]), stride_per_key_per_rank=counts, inverse_indices=inverse
    )
    captured = KJTSnapshot(features)
    assert captured.matches(features)
    assert captured.features.stride_per_key_per_rank() == counts
    assert captured.features["category"].values().tolist() == [3]
    features.inverse_indices()[1].numpy().__iadd__(1)
    assert not captured.matches(features)


def _kept(offsets: bool = False) -> KeyedJaggedTensor:
    """Return a snapshot on a device without NumPy views, where no copies are compared, as on CUDA."""
    return make_features(0, offsets=offsets).to(torch.device("meta"))


def test_shared_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = _kept(), _kept()

    def refuse(*args: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(torch, "equal", refuse)
    captured = KJTSnapshot(here)
    assert captured.features.values() is not here.values(), "who reads them later sees them as they were"
    assert captured.matches(here) and captured.matches(here.to(torch.device("meta")))
    by_offsets = _kept(offsets=True)
    with_lengths = by_offsets.to(torch.device("meta"))
    with_lengths.lengths()
    assert KJTSnapshot(by_offsets).matches(with_lengths)
    with pytest.raises(AssertionError):
        captured.matches(other)


@pytest.mark.parametrize("part", PARTS)
def test_what_is_not_copied_may_not_be_changed(part: str) -> None:
    features, other = _kept(), _kept()
    captured = KJTSnapshot(features)
    assert captured.matches(features)
    getattr(features, part)().add_(0)
    assert not captured.matches(features) and not captured.matches(other)


def test_what_becomes_of_the_object_does_not_matter() -> None:
    """Replace the tensors of the object, or compute its lengths later."""
    features = make_features(0)
    captured, before = KJTSnapshot(features), copy_of(features)
    features._values = features.values() + 1
    assert not captured.matches(features) and captured.matches(before)
    features = make_features(0, offsets=True)
    captured = KJTSnapshot(features)
    features.lengths(), features.to_dict()
    assert captured.matches(features) and captured.matches(make_features(0))


def test_what_torch_does_not_count_is_copied() -> None:
    with torch.inference_mode():
        features = _kept()
    captured = KJTSnapshot(features)
    assert captured.features is not features
    assert all(tensor is not features.values() for tensor in (captured.features.values(), captured.features.lengths()))
