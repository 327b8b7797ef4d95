"""A source returns the same samples after a resume, whether it seeks or reads them again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_freescale.data.streaming.reader import StreamSource


class Counted(IterableDataset):
    """A stream of numbers, divided among the workers; worker 0 has the fewest."""

    samples, epoch, drawn = 50, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _own(self) -> range:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(worker, self.samples // 2 if workers > 1 and worker == 0 else self.samples, workers)

    def __iter__(self) -> Iterator[int]:
        for number in self._own():
            self.drawn += 1
            yield number + 1000 * self.epoch


class Seekable(Counted):
    """A stream that counts its reads, so that a replay is visible."""

    def __init__(self) -> None:
        self.place: dict[str, Any] = {"next": 0, "pulled": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.place  # the live object: a caller that keeps it must copy it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state

    def __iter__(self) -> Iterator[int]:
        own = self._own()
        while self.place["next"] < len(own):
            self.place["next"] += 1
            self.place["pulled"] += 1
            yield own[self.place["next"] - 1] + 1000 * self.epoch
        self.place = {"next": 0, "pulled": 0}


def _flat(chunks: list[tuple[list[Any], dict[str, Any]]]) -> list[int]:
    return [sample for samples, _ in chunks for sample in samples]


@pytest.mark.parametrize("kind", [Counted, Seekable])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once_in_the_same_order_also_from_any_place_on(kind: type[Counted], workers: int) -> None:
    source = StreamSource(kind(), 4, workers)
    whole = list(source.read_chunks(epoch=2))
    expected = range(50) if not workers else [n for n in range(50) if n < 25 or n % 2]
    assert sorted(_flat(whole)) == [2000 + number for number in expected]
    assert all(len(samples) == 4 for samples, place in whole if not any(place["ended"]))
    assert [place["turn"] for _, place in whole[:5]] == ([1, 0, 1, 0, 1] if workers else [0] * 5)
    stops = {1, 2, 7, 8, 11, len(whole) - 1, len(whole)} if workers else set(range(len(whole) + 1))
    for index, (_, place) in enumerate(whole, 1):
        for _ in range(2 if index == 1 else index in stops):  # a place can be used twice
            resumed = list(StreamSource(kind(), 4, workers).read_chunks(place, epoch=2))
            found, rest = ([(samples, {**at, "states": None}) for samples, at in each] for each in (resumed, whole[index:]))
            assert found == rest, index


def _resumed(kind: type[Counted], workers: int, chunks: int) -> tuple[Counted, dict[str, Any], dict[str, Any]]:
    """Return the resumed data set, and the places before and after its first chunk."""
    fresh = kind()
    *_, (_, place) = islice(StreamSource(kind(), 4, workers).read_chunks(), chunks)
    ((_, after),) = islice(StreamSource(fresh, 4, workers).read_chunks(place), 1)
    return fresh, place, after


@pytest.mark.parametrize("workers", [0, 2])
def test_seeks_or_warns_of_samples_that_are_read_again(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _, place, after = _resumed(Seekable, workers, 4)
        worker = place["turn"]
        assert after["states"][worker]["pulled"] == after["read"][worker] == place["read"][worker] + 4
        assert not caplog.records
        dataset, _, _ = _resumed(Counted, 0, 6)
    assert dataset.drawn == 28
    (record,) = caplog.records
    assert "Counted" in record.getMessage() and "state_dict" in record.getMessage() and "24 samples" in record.getMessage()


def test_another_number_of_workers() -> None:
    with pytest.raises(ValueError, match="num_workers=2"):
        StreamSource(Counted(), 4, 2).read_chunks(StreamSource(Counted(), 4).first_place())


class Broken(Counted):
    def __iter__(self) -> Iterator[int]:
        yield from range(6)
        raise KeyError("the needle")


class Noise(IterableDataset):
    def __iter__(self) -> Iterator[float]:
        yield float(torch.rand(()))


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_are_raised_and_the_global_random_state_is_left_alone(workers: int) -> None:
    torch.manual_seed(1)
    expected = float(torch.rand(()))
    torch.manual_seed(1)
    list(StreamSource(Counted(), 4, workers).read_chunks())
    with pytest.raises(KeyError, match="the needle"):
        list(StreamSource(Broken(), 4, workers).read_chunks())
    assert float(torch.rand(())) == expected
    first, again, other = (_flat(list(StreamSource(Noise(), 4, 1).read_chunks(seed=seed))) for seed in (1, 1, 2))
    assert first == again != other
