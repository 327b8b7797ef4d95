"""An epoch of a stream that was interrupted is read on by another number of ranks: every sample once."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import IterableDataset, get_worker_info

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import StreamOptions
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.test_resume import Seen, StopAt
from tests.helpers.recommender import Samples, collate, trainer

SIZE = 70


class Rereading(IterableDataset):
    """A rank's part of the samples, which always starts at its beginning."""

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self.samples, self.rank, self.world_size = Samples(SIZE), rank, world_size

    def own(self) -> range:
        rank = int(os.environ["RANK"]) if self.rank is None else self.rank
        world_size = int(os.environ["WORLD_SIZE"]) if self.world_size is None else self.world_size
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(rank + worker * world_size, SIZE, workers * world_size)

    def __iter__(self) -> Any:
        yield from (self.samples[index] for index in self.own())

    def for_rank(self, rank: int, world_size: int) -> Rereading:
        return type(self)(rank, world_size)


class Seekable(Rereading):
    """The same, from where it was left."""

    place, fresh = 0, True

    def __iter__(self) -> Any:
        self.place, self.fresh = (0 if self.fresh else self.place), True
        own = self.own()
        while self.place < len(own):
            self.place += 1
            yield self.samples[own[self.place - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.fresh = state["place"], False


class Fixed(Rereading):
    """Knows its own part alone."""

    for_rank = property()  # type: ignore[assignment]


def _length(sample: dict[str, Any]) -> int:
    return len(sample["history"])


def _fit(
    ranks: int,
    dataset: type[Rereading],
    path: Path | None = None,
    stop: tuple[int, Path] | None = None,
    workers: int = 0,
    balancing: str = "global",
) -> list[list[int]]:
    """Two epochs from the start or a checkpoint; returns what this rank saw in each step."""
    module = Seen("sgd")
    data = FreeScaleDataModule(
        dataset(), _length, 4, collate_fn=collate, num_workers=workers, stream=StreamOptions(stream_balancing=balancing)
    )
    callbacks: list[L.Callback] = [] if stop is None else [StopAt(stop[0], str(stop[1]))]
    trainer(devices=ranks, max_epochs=2, callbacks=callbacks).fit(module, data, ckpt_path=path)
    return module.seen


def _all(of_ranks: list[list[list[int]]], steps: slice = slice(None)) -> list[int]:
    return [sample for rank in of_ranks for step in rank[steps] for sample in step]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), pytest.param(2, 1, marks=pytest.mark.slow), (3, 1)])
@pytest.mark.parametrize("dataset", [Rereading, Seekable])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_every_sample_comes_once(before: int, after: int, dataset: type[Rereading], workers: int, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    first = run_distributed(_fit, before, before, dataset, stop=(3, path), workers=workers)
    second = run_distributed(_fit, after, after, dataset, path, workers=workers)
    rest = SIZE - len(_all(first))
    assert rest > 0
    found = _all(second)
    assert len(found) == rest + SIZE, "the rest of this epoch, and the next one"
    steps = next(n for n in range(len(second[0])) if len(_all(second, slice(0, n))) == rest)
    assert sorted(_all(first) + _all(second, slice(0, steps))) == list(range(SIZE))
    assert sorted(_all(second, slice(steps, None))) == list(range(SIZE))


def test_what_is_read_on_may_be_interrupted_again(tmp_path: Path) -> None:
    path, again = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    first = run_distributed(_fit, 2, 2, Seekable, stop=(3, path))
    second = run_distributed(_fit, 3, 3, Seekable, path, stop=(5, again))
    third = run_distributed(_fit, 3, 3, Seekable, again)
    left = SIZE - len(_all(first)) - len(_all(second))
    assert left > 0 and len(_all(third)) == left + SIZE
    steps = next(n for n in range(len(third[0]) + 1) if len(_all(third, slice(0, n))) == left)
    assert sorted(_all(first) + _all(second) + _all(third, slice(0, steps))) == list(range(SIZE))
    with pytest.raises(RankFailed, match="has been resumed on other ranks in this epoch before"):
        run_distributed(_fit, 2, 2, Seekable, again)


@pytest.mark.parametrize(
    ("dataset", "balancing", "message"),
    [
        (Fixed, "global", r"epoch of 2 streams, this run has 3 ranks.*they need Fixed.for_rank\(rank, world_size\)"),
        (Seekable, "local", "epoch of 2 streams, this run has 3 ranks.*each keeps its samples"),
    ],
)
def test_what_nobody_can_read_on_is_refused(dataset: type[Rereading], balancing: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_distributed(_fit, 2, 2, dataset, stop=(3, path), balancing=balancing)
    with pytest.raises(RankFailed, match=message):
        run_distributed(_fit, 3, 3, dataset, path, balancing=balancing)


def _forking_threads(dataset: type[Rereading], path: Path) -> set[str]:
    """Names of the threads in which workers were started."""
    names, start = set(), multiprocessing.process.BaseProcess.start

    def start_noted(process: Any) -> None:
        names.add(threading.current_thread().name)
        start(process)

    multiprocessing.process.BaseProcess.start = start_noted  # type: ignore[method-assign]
    _fit(1, dataset, path, workers=2)
    return names


@pytest.mark.parametrize("dataset", [Rereading, pytest.param(Seekable, marks=pytest.mark.slow)])
def test_workers_are_forked_in_the_main_thread(dataset: type[Rereading], tmp_path: Path) -> None:
    """Else they may inherit a lock that it holds, and wait for it for ever."""
    path = tmp_path / "a.ckpt"
    run_distributed(_fit, 3, 3, dataset, stop=(3, path), workers=2)
    assert run_distributed(_forking_threads, 1, dataset, path) == [{"MainThread"}]
