"""Data sets that are read by the number of a sample although they are IterableDatasets, and lengths that are a function."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import BalanceOptions, StreamOptions
from lightning_freescale.data.iterable import IterableData
from lightning_freescale.data.map_style import MapStyleData
from lightning_freescale.data.streaming import BalancedStreamLoader

SIZE, RANKS = 41, 2
LENGTHS = np.random.RandomState(0).randint(1, 40, SIZE)


def _sample(number: int) -> dict[str, Any]:
    return {"number": number, "history": list(range(LENGTHS[number]))}


def _length(sample: dict[str, Any]) -> int:
    return len(sample["history"])


def _twice(sample: dict[str, Any]) -> int:
    return 2 * len(sample["history"])


class _OnTwoRanks(IterableDataset):
    """What litdata's and MosaicML's data sets have in common: numbers reach all samples, len() counts one rank's."""

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
    """A subclass, as users write them for a transform."""


KINDS = pytest.mark.parametrize("kind", [_Lit, _Mosaic, _OfAUser])


@KINDS
@pytest.mark.parametrize("lengths", [_length, LENGTHS], ids=["function", "array"])
def test_the_whole_data_set_is_planned(kind: type[_OnTwoRanks], lengths: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        data = FreeScaleDataModule(kind(), lengths, 4, collate_fn=list, num_workers=2)
    assert isinstance(data.train, MapStyleData)
    np.testing.assert_array_equal(data.train.lengths, LENGTHS)
    assert sorted(i for rank in range(RANKS) for batch in data.sampler(rank, RANKS) for i in batch) == list(range(SIZE))
    assert sorted(sample["number"] for batch in data.train_dataloader() for sample in batch) == list(range(SIZE))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith(f"{kind.__name__} is read by the numbers of its {SIZE} samples, as a map-style data set")


@KINDS
@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_the_whole_data_set_is_evaluated(kind: type[_OnTwoRanks], stage: str) -> None:
    data = FreeScaleDataModule([1], [1], collate_fn=list, **{f"{stage}_dataset": kind()})
    loader = getattr(data, f"{stage}_dataloader")()
    assert [sample["number"] for batch in loader for sample in batch] == list(range(SIZE))


def test_arguments_are_those_of_a_map_style_data_set() -> None:
    data = FreeScaleDataModule(_Lit(), LENGTHS, 4, seed=3, balance=BalanceOptions(outlier_window=2), pin_memory=False)
    assert data.train.seed == 3
    with pytest.raises(ValueError, match=r"stream=\.\.\.\) has no meaning for a map-style data set"):
        FreeScaleDataModule(_Lit(), LENGTHS, stream=StreamOptions())
    with pytest.raises(ValueError, match=rf"lengths has shape \({SIZE // RANKS},\): .* shape \[{SIZE}\]"):
        FreeScaleDataModule(_Lit(), LENGTHS[: SIZE // RANKS])


class _Counted(Dataset):
    """Tells which samples were read."""

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
    dataset = _Counted()
    data = FreeScaleDataModule(dataset, **{"batch_size": 4, **options})
    assert dataset.reads == list(range(SIZE))
    sampler = data.sampler(0, RANKS)
    assert (data.train.lengths is None) == (lengths is None)
    if lengths is not None:
        np.testing.assert_array_equal(data.train.lengths, lengths)
    if costs is not None:
        np.testing.assert_array_equal(data.train.costs, costs)
    np.testing.assert_array_equal(sampler.loss_weights, np.ones(SIZE) if weights is None else weights)


def test_tokens_are_the_lengths_that_a_function_gives() -> None:
    options = BalanceOptions(assignment_mode="slack", max_tokens_per_rank=200)
    sampler = FreeScaleDataModule(_Counted(), _length, 4, balance=options).sampler(0, RANKS)
    assert max(LENGTHS[part].sum() for part in sampler.plan(0, 0)) <= 200


def test_what_a_function_gives_is_checked() -> None:
    with pytest.raises(ValueError, match=r"lengths\(sample\)\[0\] is -1"):
        FreeScaleDataModule(_Counted(), lambda sample: sample["number"] - 1)


class _Sized(IterableDataset):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_a_length_alone_gives_no_sample() -> None:
    data = FreeScaleDataModule([1], [1], val_dataset=_Sized())
    with pytest.raises(ValueError, match="val_dataset=_Sized is not map-style"):
        data.val_dataloader()


class _OwnNumbers(_Sized):
    """Nobody knows whether its numbers are those of one rank."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError


def test_any_other_iterable_data_set_is_a_stream() -> None:
    data = FreeScaleDataModule(_OwnNumbers(), float, 1, collate_fn=list)
    assert isinstance(data.train, IterableData)
    assert sorted(sample for batch in data.train_dataloader() for sample in batch) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"lengths=list\): .* pass a function, or a data set that is no IterableDataset"):
        FreeScaleDataModule(_OwnNumbers(), [1.0, 1.0, 1.0])


class _AsksForMore(IterableDataset):
    """Its state needs what only its own loader knows."""

    def __iter__(self) -> Iterator[int]:
        yield from range(20)

    def state_dict(self, num_workers: int, batch_size: int, *, samples: int, fresh: bool = False) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_that_needs_arguments_is_left_alone_and_told(caplog: pytest.LogCaptureFixture) -> None:
    named = "_AsksForMore.state_dict needs num_workers, batch_size, samples, which nobody here knows"
    with pytest.warns(UserWarning, match=f"{named}, so it is not asked: .* read again and discarded"):
        data = FreeScaleDataModule(_AsksForMore(), float, 2, collate_fn=list)
    loader = data.train_dataloader()
    assert isinstance(loader, BalancedStreamLoader)
    batches = list(loader)
    resumed = data.train_dataloader()
    resumed.load_state_dict(loader.state_after(4))
    assert not caplog.records
    assert list(resumed) == batches[4:]
    assert "the 8 samples that were read before are read again and discarded" in caplog.text
    assert named in caplog.text


class _AsksForNothing(_AsksForMore):
    loaded: Any = None

    def state_dict(self, verbose: bool = False, **others: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"some": "state"}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        self.loaded = state


@pytest.mark.filterwarnings("error:.*state_dict needs")
def test_arguments_that_may_be_left_out_are_no_hindrance() -> None:
    loader = FreeScaleDataModule(_AsksForNothing(), float, 2, collate_fn=list).train_dataloader()
    assert isinstance(loader, BalancedStreamLoader)
    list(loader)
    assert loader.state_after(4)["stream"]["reader"]["place"]["states"] == [{"some": "state"}]


def test_numbers_are_plain_ints() -> None:
    """Tensors and numpy's numbers would be taken for something else by data sets that look at the type."""
    data = FreeScaleDataModule(_Lit(), torch.from_numpy(LENGTHS), 4, collate_fn=list, micro_batches=2)
    assert len(list(data.train_dataloader())) == -(-SIZE // 4)
