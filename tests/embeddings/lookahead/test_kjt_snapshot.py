"""Whether the ids looked up are those submitted ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_snapshot import KJTSnapshot
from tests.helpers.jagged import KEYS, copy_of, make_features, same_features


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_same_contents(weighted: bool, offsets: bool) -> None:
    here = make_features(0, weighted, offsets)
    assert same_features(here, here)
    assert same_features(here, copy_of(here))
    assert same_features(here, make_features(0, weighted, not offsets))
    assert not same_features(here, make_features(1, weighted, offsets))
    assert not same_features(here, make_features(0, not weighted, offsets))


@pytest.mark.parametrize(
    "other",
    [
        lambda f: KeyedJaggedTensor(KEYS[::-1], f.values(), f.weights(), lengths=f.lengths()),
        lambda f: KeyedJaggedTensor([*KEYS, "more"], f.values(), f.weights(), lengths=f.lengths()),
        lambda f: KeyedJaggedTensor(KEYS, f.values().flip(0), f.weights(), lengths=f.lengths()),
        lambda f: KeyedJaggedTensor(KEYS, f.values().int(), f.weights(), lengths=f.lengths()),
        lambda f: KeyedJaggedTensor(KEYS, f.values(), f.weights() + 1, lengths=f.lengths()),
        lambda f: KeyedJaggedTensor(KEYS, f.values(), f.weights(), lengths=f.lengths().flip(0)),
        lambda f: KeyedJaggedTensor(KEYS, f.values(), f.weights(), lengths=f.lengths().view(2, 3)),
    ],
)
def test_one_difference_is_enough(other: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> None:
    features = make_features(0, weighted=True)
    assert not torch.equal(features.lengths(), features.lengths().flip(0))
    assert not same_features(features, other(features)) and not same_features(other(features), features)
    assert not KJTSnapshot(features).matches(other(features))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda tensor: tensor.numpy().__iadd__(1),
    "data": lambda tensor: tensor.data.add_(1),
    "in place": lambda tensor: tensor.add_(1),
}


@pytest.mark.parametrize("part", ["values", "weights", "lengths"])
@pytest.mark.parametrize("how", list(CHANGES))
def test_changed_contents_are_no_match(part: str, how: str) -> None:
    features = make_features(0, weighted=True)
    captured, before = KJTSnapshot(features), copy_of(features)
    CHANGES[how](getattr(features, part)())
    assert not captured.matches(features) and not captured.matches(copy_of(features))
    assert captured.matches(before), "what was captured, and is submitted, stays"
    assert same_features(captured.features, before)


def test_what_was_captured_has_the_sizes_of_every_feature() -> None:
    counts, inverse = [[2], [1]], (list(KEYS), torch.zeros(2, 2, dtype=torch.int64))
    lengths = torch.tensor([1, 2, 1])
    features = KeyedJaggedTensor(
        KEYS, torch.arange(4), lengths=lengths, stride_per_key_per_rank=counts, inverse_indices=inverse
    )
    captured = KJTSnapshot(features)
    assert captured.matches(features)
    assert captured.features.stride_per_key_per_rank() == counts
    assert captured.features["category"].values().tolist() == [3]
    features.inverse_indices()[1].numpy().__iadd__(1)
    assert not captured.matches(features)


def _kept(seed: int = 0, offsets: bool = False) -> KeyedJaggedTensor:
    """On a device without numpy views, where no copies are compared; as on CUDA."""
    return make_features(seed, weighted=True, offsets=offsets).to(torch.device("meta"))


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


@pytest.mark.parametrize("part", ["values", "weights", "lengths"])
def test_what_is_not_copied_may_not_be_changed(part: str) -> None:
    features, other = _kept(), _kept()
    captured = KJTSnapshot(features)
    assert captured.matches(features)
    getattr(features, part)().add_(0)
    assert not captured.matches(features) and not captured.matches(other)


def test_a_change_before_the_capture_does_not_matter() -> None:
    features = make_features()
    features.values().add_(1)
    assert KJTSnapshot(features).matches(features)


def test_what_was_captured_stays_when_the_object_is_given_other_tensors() -> None:
    features = make_features(0)
    captured, before = KJTSnapshot(features), copy_of(features)
    features._values = features.values() + 1
    assert not captured.matches(features) and captured.matches(before)


def test_lengths_that_are_computed_later_do_not_matter() -> None:
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
