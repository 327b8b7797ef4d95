"""IterableDatasets that are read by the number of a sample, and lengths given as a function."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import BalanceOptions
from lightning_freescale.data.iterable import IterableData
from lightning_freescale.data.map_style import MapStyleData

SIZE, RANKS = 41, 2
LENGTHS = np.random.RandomState(0).randint(1, 40, SIZE)


def _sample(number: int) -> dict[str, Any]:
    return {"number": number, "history": list(range(LENGTHS[number]))}


def _length(sample: dict[str, Any]) -> int:
    return len(sample["history"])


def _twice(sample: dict[str, Any]) -> int:
    return 2 * len(sample["history"])


class _OnTwoRanks(IterableDataset):
    """The common behaviour of litdata's and MosaicML's data sets: numbers reach all samples, len() counts those of one rank."""

    def __len__(self) -> int:
        return SIZE // RANKS

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert isinstance(index, int), "litdata takes no other number"
        return _sample(index)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it would shard by itself")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class _Lit(_OnTwoRanks):
    __module__, __qualname__ = "litdata.streaming.dataset", "StreamingDataset"
    region_of_interest = [(0, 20), (5, 26)]

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, Any]:
        raise AssertionError


class _Mosaic(_OnTwoRanks):
    __module__, __qualname__ = "streaming.base.dataset", "StreamingDataset"
    size = SIZE

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError


class _OfAUser(_Lit):
    """A subclass such as users write for a transform."""


@pytest.mark.parametrize("kind", [_Lit, _Mosaic, _OfAUser])
def test_the_whole_data_set_is_planned_and_evaluated(kind: type[_OnTwoRanks], caplog: pytest.LogCaptureFixture) -> None:
    for lengths in (_length, LENGTHS):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            data = FreeScaleDataModule(kind(), lengths, 4, collate_fn=list, num_workers=2)
        assert isinstance(data.train, MapStyleData)
        np.testing.assert_array_equal(data.train.lengths, LENGTHS)
        assert sorted(i for rank in range(RANKS) for batch in data.sampler(rank, RANKS) for i in batch) == list(range(SIZE))
        (warned,) = (record.getMessage() for record in caplog.records)
        assert kind.__name__ in warned and str(SIZE) in warned
    assert sorted(sample["number"] for batch in data.train_dataloader() for sample in batch) == list(range(SIZE))
    data = FreeScaleDataModule([1], [1], collate_fn=list, val_dataset=kind(), test_dataset=kind(), predict_dataset=kind())
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert [sample["number"] for batch in loader for sample in batch] == list(range(SIZE))


def test_arguments_are_those_of_a_map_style_data_set() -> None:
    options = {"balance": BalanceOptions(max_tokens_per_rank=10**6), "pin_memory": False}
    data = FreeScaleDataModule(_Lit(), torch.from_numpy(LENGTHS), 4, seed=3, collate_fn=list, micro_batches=2, **options)
    assert data.train.seed == 3
    assert len(list(data.train_dataloader())) == -(-SIZE // 4), "numbers of samples are plain ints"
    with pytest.raises(ValueError, match=rf"lengths.* \({SIZE // RANKS},\).* \[{SIZE}\]"):
        FreeScaleDataModule(_Lit(), LENGTHS[: SIZE // RANKS])


class _Counted(Dataset):
    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return _sample(index)


@pytest.mark.parametrize(
    ("options", "lengths", "weights", "costs"),
    [
        ({"lengths": _length}, LENGTHS, None, None),
        ({"lengths": _length, "loss_reduction": "target_mean"}, LENGTHS, LENGTHS, None),
        ({"lengths": _length, "loss_reduction": "target_mean", "target_counts": _twice}, LENGTHS, 2 * LENGTHS, None),
        ({"lengths": LENGTHS, "loss_reduction": "target_mean", "target_counts": _twice}, LENGTHS, 2 * LENGTHS, None),
        ({"lengths": _length, "cost": np.square}, LENGTHS, None, LENGTHS**2),
        ({"cost": _twice, "loss_reduction": "target_mean", "target_counts": _length}, None, LENGTHS, 2 * LENGTHS),
    ],
)
def test_functions_of_a_sample_read_a_map_style_data_set_once(
    options: dict[str, Any], lengths: Any, weights: Any, costs: Any
) -> None:
    dataset, limit = _Counted(), {"assignment_mode": "slack", "max_tokens_per_rank": 200 if "lengths" in options else None}
    data = FreeScaleDataModule(dataset, **{"batch_size": 4, "balance": BalanceOptions(**limit), **options})
    assert dataset.reads == list(range(SIZE))
    sampler = data.sampler(0, RANKS)
    assert (data.train.lengths is None) == (lengths is None)
    if lengths is not None:
        np.testing.assert_array_equal(data.train.lengths, lengths)
        assert max(lengths[part].sum() for part in sampler.plan(0, 0)) <= 200, "they are the tokens"
    if costs is not None:
        np.testing.assert_array_equal(data.train.costs, costs)
    np.testing.assert_array_equal(sampler.loss_weights, np.ones(SIZE) if weights is None else weights)


class _OwnNumbers(IterableDataset):
    """A data set whose numbers and length may be those of one rank."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        yield from range(3)

    def __getitem__(self, index: int) -> int:
        raise AssertionError


def test_any_other_iterable_data_set_is_a_stream() -> None:
    data = FreeScaleDataModule(_OwnNumbers(), float, 1, collate_fn=list, val_dataset=_OwnNumbers())
    assert isinstance(data.train, IterableData)
    assert sorted(sample for batch in data.train_dataloader() for sample in batch) == [0, 1, 2]
    with pytest.raises(ValueError, match="val_dataset=_OwnNumbers"):
        data.val_dataloader()


class _AsksForMore(IterableDataset):
    """A data set whose state needs arguments that only its own loader has."""

    def __iter__(self) -> Iterator[int]:
        yield from range(20)

    def state_dict(self, num_workers: int, batch_size: int, *, samples: int, fresh: bool = False) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class _AsksForNothing(_AsksForMore):
    def state_dict(self, verbose: bool = False, **others: Any) -> dict[str, Any]:
        return {"some": "state"}


def test_a_state_that_needs_arguments_is_not_used_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    named = "_AsksForMore.state_dict needs num_workers, batch_size, samples"
    with pytest.warns(UserWarning, match=named):
        data = FreeScaleDataModule(_AsksForMore(), float, 2, collate_fn=list)
    loader = data.train_dataloader()
    batches = list(loader)
    resumed = data.train_dataloader()
    resumed.load_state_dict(loader.state_after(4))
    assert not caplog.records
    assert list(resumed) == batches[4:]
    assert "8 samples" in caplog.text and named in caplog.text
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # arguments that may be left out are no hindrance
        loader = FreeScaleDataModule(_AsksForNothing(), float, 2, collate_fn=list).train_dataloader()
    list(loader)
    assert loader.state_after(4)["stream"]["reader"]["place"]["states"] == [{"some": "state"}]
