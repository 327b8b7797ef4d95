"""A source gives the same samples after a resume, whether it seeks or reads again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_freescale.data.streaming.reader import Chunk, StreamSource


class Counted(IterableDataset):
    """Numbers, divided among the workers; worker 0 has the fewest."""

    def __init__(self, samples: int = 50) -> None:
        self.samples, self.epoch, self.drawn = samples, 0, 0

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
    """Counts what it reads, so that a replay would show."""

    def __init__(self, samples: int = 50) -> None:
        super().__init__(samples)
        self.place: dict[str, Any] = {"next": 0, "pulled": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.place  # the live object: who keeps it must copy it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state

    def __iter__(self) -> Iterator[int]:
        own = self._own()
        while self.place["next"] < len(own):
            self.place["next"] += 1
            self.place["pulled"] += 1
            yield own[self.place["next"] - 1] + 1000 * self.epoch
        self.place = {"next": 0, "pulled": 0}


KINDS = pytest.mark.parametrize("kind", [Counted, Seekable])


def _flat(chunks: list[Chunk]) -> list[int]:
    return [sample for chunk in chunks for sample in chunk.samples]


@KINDS
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once_in_the_same_order(kind: type[Counted], workers: int) -> None:
    dataset = kind()
    chunks = list(StreamSource(dataset, 4, workers).read_chunks(epoch=2))
    read = _flat(chunks)
    expected = range(50) if not workers else [n for n in range(50) if n < 25 or n % 2]
    assert sorted(read) == [2000 + number for number in expected]
    assert read == _flat(list(StreamSource(kind(), 4, workers).read_chunks(epoch=2)))
    assert all(len(chunk.samples) == 4 for chunk in chunks if not chunk.ended)
    assert [chunk.worker for chunk in chunks[:5]] == ([0, 1, 0, 1, 0] if workers else [0] * 5)


@KINDS
@pytest.mark.parametrize("workers", [0, 2])
def test_goes_on_at_any_place(kind: type[Counted], workers: int) -> None:
    source = StreamSource(kind(), 4, workers)
    whole, place = list(source.read_chunks(epoch=1)), source.first_place()
    stops = {1, 2, 7, 8, 11, len(whole) - 1, len(whole)} if workers else set(range(len(whole) + 1))
    for index, chunk in enumerate(whole, 1):
        place = source.place_after(place, chunk)
        if index in stops:
            resumed = list(StreamSource(kind(), 4, workers).read_chunks(place, epoch=1))
            assert [(c.samples, c.worker, c.read, c.ended) for c in resumed] == [
                (c.samples, c.worker, c.read, c.ended) for c in whole[index:]
            ]


@pytest.mark.parametrize("workers", [0, 2])
def test_seeks_without_reading_again(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    source = StreamSource(Seekable(), 4, workers)
    place = source.first_place()
    for chunk in islice(source.read_chunks(), 4):
        place = source.place_after(place, chunk)
    fresh = Seekable()
    with caplog.at_level(logging.INFO):
        (first, *_) = StreamSource(fresh, 4, workers).read_chunks(place)
    assert first.state["pulled"] == first.read == place["read"][first.worker] + 4
    assert not caplog.records


def test_replay_says_how_much_and_how_to_avoid_it(caplog: pytest.LogCaptureFixture) -> None:
    source = StreamSource(Counted(), 4)
    place = source.first_place()
    for chunk in islice(source.read_chunks(), 6):
        place = source.place_after(place, chunk)
    dataset = Counted()
    with caplog.at_level(logging.INFO):
        next(StreamSource(dataset, 4).read_chunks(place))
    assert dataset.drawn == 28
    (record,) = caplog.records
    assert "Counted has no state_dict and load_state_dict" in record.getMessage()
    assert "the 24 samples" in record.getMessage()


def test_a_place_can_be_used_twice() -> None:
    source = StreamSource(Seekable(), 4)
    place = source.place_after(source.first_place(), next(source.read_chunks()))
    assert (
        _flat(list(StreamSource(Seekable(), 4).read_chunks(place)))
        == _flat(list(StreamSource(Seekable(), 4).read_chunks(place)))
        == [*range(4, 50)]
    )


def test_another_number_of_workers() -> None:
    with pytest.raises(ValueError, match=r"num_workers=2, .* made with 1 reader"):
        StreamSource(Counted(), 4, 2).read_chunks(StreamSource(Counted(), 4).first_place())


class Broken(Counted):
    def __iter__(self) -> Iterator[int]:
        yield from range(6)
        raise KeyError("the needle")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_of_the_data_set_is_raised(workers: int) -> None:
    with pytest.raises(KeyError, match="the needle"):
        list(StreamSource(Broken(), 4, workers).read_chunks())


@pytest.mark.parametrize("workers", [0, 1])
def test_leaves_the_global_random_state_alone(workers: int) -> None:
    torch.manual_seed(1)
    expected = float(torch.rand(()))
    torch.manual_seed(1)
    list(StreamSource(Counted(), 4, workers).read_chunks())
    assert float(torch.rand(())) == expected


class Noise(IterableDataset):
    def __iter__(self) -> Iterator[float]:
        yield float(torch.rand(()))


def test_workers_draw_by_the_seed() -> None:
    first, again, other = (_flat(list(StreamSource(Noise(), 4, 1).read_chunks(seed=seed))) for seed in (1, 1, 2))
    assert first == again != other
