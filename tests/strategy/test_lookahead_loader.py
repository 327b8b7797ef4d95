"""Looking one batch ahead keeps batches, errors and states, and stays in step with the training loop."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale._lightning.profiler import ObservedLoader
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.training.lookahead_loader import ENDED, UNKNOWN, LookaheadLoader
from tests.helpers.recommender import trainer


class Counting:
    """Yields 0, 1, ... and can resume; ``bad`` maps a number to its error, or to None."""

    def __init__(self, size: int, bad: dict[int, Any] | None = None) -> None:
        self.size, self.bad, self.counts = size, bad or {}, {"next": 0}

    def __iter__(self) -> Iterator[Any]:
        while self.counts["next"] < self.size:
            number = self.counts["next"]
            self.counts["next"] += 1
            instead = self.bad.get(number, number)
            if isinstance(instead, BaseException):
                raise instead
            yield instead
        self.counts["next"] = 0


class Resumable(Counting):
    """Returns the object that it counts in."""

    def state_dict(self) -> dict[str, int]:
        return self.counts

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts = dict(state)


def test_the_same_batches_each_fetched_one_early() -> None:
    inner = Counting(4)
    batches = iter(LookaheadLoader(inner))
    assert inner.counts["next"] == 0
    for number, fetched in enumerate([2, 3, 4]):
        assert next(batches) == number
        assert inner.counts["next"] == fetched
    assert list(batches) == [3]
    with pytest.raises(StopIteration):
        next(batches)
    assert list(LookaheadLoader([])) == []


def test_upcoming_is_the_next_batch_until_the_end() -> None:
    for prefetch in range(3):  # the number of batches that the consumer is ahead
        loader = LookaheadLoader(list(range(6)))
        assert loader.next_batch is UNKNOWN
        for _ in range(2):  # a new iteration starts anew
            batches, held, upcoming = iter(loader), [], []
            assert loader.next_batch is UNKNOWN
            for _ in range(prefetch):
                held.append(next(batches))
            for _ in range(6):
                held.extend([batch for batch in [next(batches, None)] if batch is not None])
                held.pop(0)
                upcoming.append(loader.start_batch())
            assert upcoming == [1, 2, 3, 4, 5, ENDED]
    old, new = iter(loader), iter(loader)
    next(new)
    next(old)  # an abandoned iteration does not affect the new one
    assert loader.start_batch() == 1


def test_batches_that_are_none_are_passed_over() -> None:
    loader = LookaheadLoader(Counting(5, bad={0: None, 2: None}))
    upcoming = []
    for batch in loader:
        if batch is not None:
            upcoming.append(loader.start_batch())
            loader.start_batch()  # one too many
    assert upcoming == [UNKNOWN, 4, ENDED]


@pytest.mark.parametrize(
    ("bad", "limits", "upcoming", "fetched"),
    [
        ({}, [2, 2, 2], [1, ENDED, ENDED], [2, 2, 3]),  # the third batch is fetched anyway
        ({2: None}, [1, 9], [ENDED, UNKNOWN], [1, 3]),  # the next batch is None, and the one after it is not fetched
    ],
)
def test_nothing_is_fetched_beyond_the_limit(bad: Any, limits: list[int], upcoming: list[Any], fetched: list[int]) -> None:
    inner, each = Counting(9, bad), iter(limits)
    loader, seen = LookaheadLoader(inner, limit=lambda: next(each)), []
    batches = iter(loader)
    for _ in limits:
        next(batches)
        seen.append((loader.start_batch(), inner.counts["next"]))
    assert seen == list(zip(upcoming, fetched))


def test_an_error_comes_with_its_own_batch() -> None:
    inner = Counting(4, bad={2: ValueError("broken batch")})
    loader = LookaheadLoader(inner)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 1]
    loader.start_batch()
    loader.start_batch()
    assert loader.next_batch is UNKNOWN
    with pytest.raises(ValueError, match="broken batch"):
        next(batches)
    assert list(batches) == [], "the inner generator has ended with its error"


def test_an_interrupt_passes_at_once_and_loses_no_batch() -> None:
    inner = Resumable(4, bad={2: KeyboardInterrupt()})
    loader = LookaheadLoader(inner)
    batches = iter(loader)
    next(batches)
    loader.start_batch()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert loader.state_dict() == {"next": 1}


@pytest.mark.parametrize(("begins", "observed"), [(False, False), (True, True)])
def test_the_state_is_that_without_looking_ahead(begins: bool, observed: bool) -> None:
    plain, inner = Resumable(3), Resumable(3)
    loader = LookaheadLoader(ObservedLoader(inner, Timeline()) if observed else inner)
    assert isinstance(loader, _Stateful)
    expected, batches = iter(plain), iter(loader)
    for _ in range(3):
        assert loader.state_dict() == plain.state_dict()
        batch = next(batches)
        assert batch == next(expected)
        if begins:
            loader.start_batch()
        assert loader.state_dict() == plain.state_dict()
    assert next(expected, "end") == next(batches, "end") == "end"
    assert loader.state_dict() == plain.state_dict() == {"next": 0}


def test_a_batch_that_waits_to_be_trained_on_is_loaded_again() -> None:
    loader = LookaheadLoader(Resumable(6))
    batches = iter(loader)
    assert [next(batches), next(batches), next(batches)] == [0, 1, 2]
    loader.start_batch()
    state = copy.deepcopy(loader.state_dict())
    assert state == {"next": 1}
    loader.load_state_dict(state)
    assert loader.next_batch is UNKNOWN and loader.state_dict() == state
    assert list(loader) == [1, 2, 3, 4, 5]


def test_looks_like_the_loader() -> None:
    inner = DataLoader(torch.arange(6), batch_size=2)
    loader = LookaheadLoader(inner)
    assert len(loader) == 3 and loader.dataset is inner.dataset
    assert not hasattr(loader, "state_dict") and not isinstance(loader, _Stateful)
    with pytest.raises(TypeError, match="len"):
        len(LookaheadLoader(Counting(3)))
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print, "attributes are set on the loader"


def test_the_workers_seed_is_drawn_when_it_would_be_without() -> None:
    def draws(wrap: Any) -> list[float]:
        torch.manual_seed(0)
        loader = wrap(DataLoader(torch.arange(4), shuffle=True))
        batches = iter(loader)
        return [float(torch.rand(())), *[float(batch) for batch in batches], float(torch.rand(()))]

    assert draws(LookaheadLoader) == draws(lambda loader: loader)


@pytest.mark.parametrize("begins", [False, True])
def test_keeps_one_batch_more_and_no_other(begins: bool) -> None:
    """Stop following the loop if no step begins after a few batches."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Batches(Resumable):
        def __iter__(self) -> Iterator[Any]:
            for _ in super().__iter__():
                batch = torch.zeros(1)
                alive.add(batch)
                yield batch
                del batch

    plain, most = Resumable(20), 0
    loader, expected = LookaheadLoader(Batches(20)), iter(plain)
    for number, _ in enumerate(loader):
        next(expected)
        if begins or not number:
            loader.start_batch()
        most = max(most, len(alive))
        assert loader.state_dict() == plain.state_dict() or 0 < number < 6, "the state does not stand still"
    assert most <= (2 if begins else 6)
    assert begins or loader.next_batch is UNKNOWN


def test_dropping_the_iteration_drops_the_loaders() -> None:
    closed = []

    class Inner:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                closed.append(True)

    gc.disable()  # deletion is immediate
    try:
        for loader in (Inner(), DataLoader(torch.arange(40), batch_size=2, num_workers=1)):
            batches = iter(LookaheadLoader(loader))
            next(batches)
            workers = multiprocessing.active_children()
            del batches
        assert closed == [True]
        assert workers and not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


# -- in Lightning's training loop


class Lookahead(SingleDeviceStrategy):
    """Records the next batch in every step."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.upcoming: list[Any] = []

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if trainer.training:
            self.loader = dataloader = LookaheadLoader(dataloader, limit=lambda: trainer.num_training_batches)
        return dataloader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        upcoming = self.loader.start_batch()
        self.upcoming.append(upcoming.flatten().tolist() if isinstance(upcoming, Tensor) else upcoming)


class Model(L.LightningModule):
    """Records its batches; ends an epoch before batch ``end``."""

    def __init__(self, end: int | None) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(1, 1), end
        self.trained: list[list[float]] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        self.trained.append(batch.flatten().tolist())
        return -1 if batch_idx == self.end else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(14.0).view(-1, 1)


class Resuming(Resumable):
    """Yields tensors; Lightning leaves a sized loader before its end."""

    def __iter__(self) -> Iterator[Tensor]:
        self.counts["next"] %= self.size
        for number in super().__iter__():
            yield torch.full((2, 1), float(number))


class ResumingSized(Resuming):
    def __len__(self) -> int:
        return self.size


PAIRS = {"dataset": torch.arange(14.0).view(-1, 1), "batch_size": 2}
LOADERS: dict[str, Callable[[], Any]] = {
    "sized": lambda: DataLoader(**PAIRS, shuffle=True),
    "workers": lambda: DataLoader(**PAIRS, shuffle=True, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "batches": lambda: DataLoader(torch.arange(14.0).view(-1, 2, 1), batch_size=None),
    "resuming": lambda: Resuming(7),
    "resuming sized": lambda: ResumingSized(7),
}


def _fit(
    kind: str, *callbacks: L.Callback, ckpt_path: Any = None, end: int | None = None, plain: bool = False, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Return the batches of a fit, and the next batch in each of its steps."""
    torch.manual_seed(0)
    strategy, model = Lookahead(), Model(end)
    validation = DataLoader(torch.arange(4.0).view(-1, 1))
    options |= {"strategy": "auto" if plain else strategy, "devices": 1, "max_epochs": 2, "callbacks": [*callbacks]}
    trainer(**options).fit(model, LOADERS[kind](), validation, ckpt_path=ckpt_path)
    return model.trained, strategy.upcoming


@pytest.mark.parametrize(("kind", "limit"), [*((kind, None) for kind in LOADERS), ("sized", 3), ("stream", 3), ("resuming", 3)])
def test_the_training_loop_gets_the_same_batches_and_knows_the_next(kind: str, limit: int | None) -> None:
    steps, options = limit or 7, {"limit_train_batches": limit, "val_check_interval": 2}
    expected, _ = _fit(kind, plain=True, **options)
    trained, upcoming = _fit(kind, **options)
    assert trained == expected and len(trained) == 2 * steps
    assert upcoming == [*trained[1:steps], ENDED, *trained[steps + 1 :], ENDED]


def test_an_epoch_that_is_cut_short() -> None:
    trained, upcoming = _fit("batches", end=2)
    assert trained == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] * 2
    assert upcoming == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]] * 2


@pytest.mark.parametrize("kind", ["resuming", "resuming sized"])
def test_resumes_with_the_batch_after_the_checkpoint(kind: str, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = _fit(kind, keep, enable_checkpointing=True)
    for step in (3, 6, 7, 10):
        rest = _fit(kind, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert [part[: 14 - step] for part in rest] == [part[step:] for part in whole]
