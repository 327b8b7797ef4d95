"""Loaders that reuse the memory of a batch: training gets each batch as it was fetched."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_freescale.training.lookahead_loader import LookaheadLoader

FILLED = "in the same memory"


def _array(buffers: int = 1) -> Iterator[Any]:
    held = [np.zeros(2, np.int64) for _ in range(buffers)]
    for number in range(6):
        held[number % buffers][:] = number
        yield held[number % buffers]


def _view() -> Iterator[Any]:
    for array in _array():
        yield {"ids": [torch.from_numpy(array)]}


def _same_dict() -> Iterator[Any]:
    batch: dict[str, Any] = {}
    for number in range(6):
        batch["ids"] = torch.tensor([number])
        yield batch


def _turns_to_arrays() -> Iterator[Any]:
    """Yield a batch whose ids turn from tensors into arrays of the same numbers."""
    batch: dict[str, Any] = {}
    for number in range(6):
        batch["ids"] = np.array([number // 2 * 2]) if number % 2 else torch.tensor([number])
        yield batch


def _counts_in_its_buffer() -> Iterator[Any]:
    array = np.zeros(1, np.int64)
    for _ in range(6):
        yield array
        array += 1


def _first(batch: Any) -> int:
    batch = batch["ids"] if isinstance(batch, dict) else batch
    return int(batch[0][0]) if isinstance(batch, list) else int(batch[0])


def _trained(loader: Any, prefetch: int = 0) -> tuple[list[int], list[int], list[str]]:
    """Return the trained and the next batches of a loop that fetches batches ahead, and its warnings."""
    loader = LookaheadLoader(loader)
    trained, upcoming, held = [], [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = iter(loader)
        for _ in range(prefetch):
            held.append(next(batches))
        for batch in batches:
            held.append(batch)
            following = loader.start_batch()
            trained.append(_first(held.pop(0)))
            upcoming.append(_first(following) if hasattr(following, "__getitem__") else -1)
    return trained, upcoming, [str(one.message) for one in caught]


@pytest.mark.parametrize("source", [_array, _view, _same_dict, _counts_in_its_buffer])
def test_every_batch_is_trained_on_as_it_was_fetched(source: Callable[[], Any]) -> None:
    trained, upcoming, said = _trained(source())
    assert trained == [0, 1, 2, 3, 4, 5] and upcoming == [1, 2, 3, 4, 5, -1]
    assert len(said) == 1 and FILLED in said[0]


def test_a_tensor_that_has_become_an_array_is_restored() -> None:
    with pytest.warns(UserWarning, match=FILLED):
        kinds = [type(batch["ids"]) for batch in LookaheadLoader(_turns_to_arrays())]
    assert kinds == [torch.Tensor, np.ndarray] * 3


def test_further_iterations_are_copied_from_the_start() -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return _array()

    loader = LookaheadLoader(Loader())
    with pytest.warns(UserWarning, match=FILLED):
        assert [_first(batch) for batch in loader] == [0, 1, 2, 3, 4, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [_first(batch) for batch in loader] == [0, 1, 2, 3, 4, 5]


def test_a_loop_that_fetches_ahead_itself() -> None:
    trained, _, said = _trained(_array(), prefetch=1)
    assert trained == [0, 1, 2, 3, 4] and len(said) == 1
    trained, _, said = _trained(_array(2))
    assert trained == [0, 1, 2, 3, 4, 5] and not said, "two buffers are enough for one batch ahead"
    with pytest.raises(RuntimeError, match="each fetch one batch ahead"):
        _trained(_array(2), prefetch=1)


def test_nothing_is_copied_that_need_not_be() -> None:
    given: list[Any] = [{"x": torch.tensor([number, float("nan")])} for number in range(3)]
    given += [{"names": np.array([object(), "a"]), "at": np.array(["NaT"], "datetime64[s]")}, np.array([1.0, float("nan")])]
    given += [{"cannot be copied": threading.Lock()}, torch.ones(2).to_sparse(), None, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in range(len(given)):
            handed_out = list(LookaheadLoader(given[first:]))
            assert all(one is other for one, other in zip(handed_out, given[first:]))


def test_what_training_writes_is_not_the_loaders() -> None:
    shared = torch.zeros(7)
    loader = LookaheadLoader([shared[number : number + 2] for number in range(6)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:
            batch += 1
    assert shared.tolist() == [1, 2, 2, 2, 2, 2, 1]
