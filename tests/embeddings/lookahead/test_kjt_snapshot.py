"""Whether the ids looked up are those submitted ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_snapshot import KJTSnapshot
from tests.helpers.jagged import KEYS, copy_of, make_features, rewrapped, same_features


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


def test_shared_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = make_features(0, weighted=True), copy_of(make_features(0, weighted=True))

    def refuse(*args: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(torch, "equal", refuse)
    assert same_features(here, rewrapped(here))
    assert KJTSnapshot(here).matches(here)
    by_offsets = make_features(0, offsets=True)
    with_lengths = rewrapped(by_offsets)
    with_lengths.lengths()
    assert same_features(by_offsets, with_lengths)
    with pytest.raises(AssertionError):
        same_features(here, other)


@pytest.mark.parametrize("part", ["values", "weights", "lengths"])
@pytest.mark.parametrize("passed", ["itself", "rewrapped", "copied before", "copied after"])
def test_a_change_in_place_is_no_match(part: str, passed: str) -> None:
    features = make_features(0, weighted=True)
    captured, before = KJTSnapshot(features), copy_of(features)
    assert captured.matches(features) and captured.matches(before)
    getattr(features, part)().add_(0)
    others = {
        "itself": features,
        "rewrapped": rewrapped(features),
        "copied before": before,
        "copied after": copy_of(features),
    }
    assert not captured.matches(others[passed])


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


def test_ids_whose_changes_torch_does_not_count_never_match() -> None:
    with torch.inference_mode():
        features = copy_of(make_features())
    assert not KJTSnapshot(features).matches(features)
