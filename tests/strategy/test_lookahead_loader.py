"""One batch ahead: the same batches, errors and states as without, and always in step with the training loop."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale._lightning.stages import ObservedLoader
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.lookahead_loader import ENDED, UNKNOWN, LookaheadLoader
from tests.helpers.recommender import trainer


class Counting:
    """Yields 0, 1, ... and can go on where it was; fails or yields None where told."""

    def __init__(self, size: int, bad: dict[int, Any] | None = None) -> None:
        self.size, self.bad, self.counts = size, bad or {}, {"next": 0}
        self.worker_init_fn = None

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
    """Hands out the very object that it counts in."""

    def state_dict(self) -> dict[str, int]:
        return self.counts

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts = dict(state)


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


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
    for prefetch in range(3):  # of the consumer, which then is as many batches ahead
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
    next(old)  # an abandoned iteration says nothing about the new one
    assert loader.start_batch() == 1


def test_batches_that_are_none_are_passed_over() -> None:
    loader = LookaheadLoader(Counting(5, bad={0: None, 2: None}))
    upcoming = []
    for batch in loader:
        if batch is not None:
            upcoming.append(loader.start_batch())
            loader.start_batch()  # one too many
    assert upcoming == [UNKNOWN, 4, ENDED]


def test_nothing_is_fetched_beyond_the_limit() -> None:
    inner = Counting(9)
    loader = LookaheadLoader(inner, limit=lambda: 2)
    batches, upcoming = iter(loader), []
    for _ in range(2):
        next(batches)
        loader.start_batch()
        upcoming.append(loader.next_batch)
    assert upcoming == [1, ENDED] and inner.counts["next"] == 2
    next(batches)  # asked for all the same
    loader.start_batch()
    assert loader.next_batch is ENDED and inner.counts["next"] == 3


def test_a_limit_that_grows() -> None:
    limits = iter([1, 9, 9])
    loader = LookaheadLoader(Counting(4, bad={2: None}), limit=lambda: next(limits))
    batches = iter(loader)
    next(batches)
    loader.start_batch()
    assert loader.next_batch is ENDED
    next(batches)
    loader.start_batch()
    assert loader.next_batch is UNKNOWN, "the next one is None, and what follows it was not fetched"


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


@pytest.mark.parametrize(("begins", "observed"), [(False, False), (True, False), (True, True)])
def test_the_state_is_that_without_looking_ahead(begins: bool, observed: bool) -> None:
    plain, inner = Resumable(3), Resumable(3)
    timeline = Timeline()
    loader = LookaheadLoader(ObservedLoader(inner, timeline) if observed else inner)
    assert isinstance(loader, Stateful)
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


@pytest.mark.parametrize("observed", [False, True])
def test_looks_like_the_loader(observed: bool) -> None:
    inner = DataLoader(torch.arange(6), batch_size=2)
    loader = LookaheadLoader(ObservedLoader(inner, Timeline()) if observed else inner)
    assert len(loader) == 3 and loader.dataset is inner.dataset
    assert not hasattr(loader, "state_dict") and not isinstance(loader, Stateful)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(TypeError, match="len"):
        len(LookaheadLoader(Counting(3)))
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print, "what is set on it is set on the loader"


def test_fetches_are_on_the_timeline() -> None:
    timeline = Timeline()
    records = []
    timeline.enable(torch.device("cpu"))
    timeline.on_step = records.append
    timeline.open_step()
    assert list(LookaheadLoader(ObservedLoader([1, 2], timeline))) == [1, 2]
    timeline.close_step()
    timeline.disable()
    assert len(records) == 1
    assert [span.name for span in records[0].spans] == ["fetch"] * 3


def test_the_workers_seed_is_drawn_when_it_would_be_without() -> None:
    def draws(wrap: Any) -> list[float]:
        torch.manual_seed(0)
        loader = wrap(DataLoader(torch.arange(4), shuffle=True))
        batches = iter(loader)
        return [float(torch.rand(())), *[float(batch) for batch in batches], float(torch.rand(()))]

    assert draws(LookaheadLoader) == draws(lambda loader: loader)


class Batch:
    """A test sees when it goes away."""


@pytest.mark.parametrize("begins", [False, True])
def test_keeps_one_batch_more_and_no_other(begins: bool) -> None:
    """Where no step begins, it stops following after a few."""
    alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    class Batches(Resumable):
        def __iter__(self) -> Iterator[Batch]:
            for _ in super().__iter__():
                batch = Batch()
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

    gc.disable()  # at once, not some time
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
    """Keeps what it trains on, and what comes next."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.loader: LookaheadLoader | None = None
        self.trained: list[list[float]] = []
        self.upcoming: list[Any] = []

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if trainer.training:
            self.loader = dataloader = LookaheadLoader(dataloader, limit=lambda: trainer.num_training_batches)
        return dataloader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trained.append(batch.flatten().tolist())
        upcoming = self.loader.start_batch()
        self.upcoming.append(upcoming.flatten().tolist() if isinstance(upcoming, Tensor) else upcoming)


class Model(L.LightningModule):
    """Trains a layer that does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(14.0).view(-1, 1)


class Resuming(Resumable):
    """Yields tensors; Lightning leaves a sized one before it has ended."""

    def __iter__(self) -> Iterator[Tensor]:
        self.counts["next"] %= self.size
        for number in super().__iter__():
            yield torch.full((2, 1), float(number))


class ResumingSized(Resuming):
    def __len__(self) -> int:
        return self.size


LOADERS: dict[str, Callable[[], Any]] = {
    "sized": lambda: DataLoader(torch.arange(14.0).view(-1, 1), batch_size=2, shuffle=True),
    "workers": lambda: DataLoader(
        torch.arange(14.0).view(-1, 1), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "batches": lambda: DataLoader(torch.arange(14.0).view(-1, 2, 1), batch_size=None),
    "resuming": lambda: Resuming(7),
    "resuming sized": lambda: ResumingSized(7),
}


def _fit(loader: Any, *callbacks: L.Callback, ckpt_path: Any = None, make: Any = None, **options: Any) -> Lookahead:
    torch.manual_seed(0)
    strategy = options.pop("strategy", None) or Lookahead()
    fitting = trainer(strategy=strategy, devices=1, max_epochs=2, callbacks=[*callbacks], **options)
    fitting.fit((make or Model)(), loader, DataLoader(torch.arange(4.0).view(-1, 1)), ckpt_path=ckpt_path)
    return strategy


def _follows(trained: list[Any], steps: int) -> list[Any]:
    """What comes after each batch, in epochs of that many."""
    return [ENDED if (step + 1) % steps == 0 else trained[step + 1] for step in range(len(trained))]


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.trained: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
        self.trained.append(batch.flatten().tolist())


@pytest.mark.parametrize(("kind", "limit"), [*((kind, None) for kind in LOADERS), ("sized", 3), ("stream", 3), ("resuming", 3)])
def test_the_training_loop_gets_the_same_batches_and_knows_the_next(kind: str, limit: int | None) -> None:
    recorder, steps = Recorder(), limit or 7
    given: dict[str, Any] = {"limit_train_batches": limit, "val_check_interval": 2}
    _fit(LOADERS[kind](), recorder, strategy="auto", **given)
    found = _fit(LOADERS[kind](), **given)
    assert found.trained == recorder.trained and len(found.trained) == 2 * steps
    assert found.upcoming == _follows(found.trained, steps)


def test_an_epoch_that_is_cut_short() -> None:
    class Stops(Model):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    found = _fit(LOADERS["batches"](), make=Stops)
    assert found.trained == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] * 2
    assert found.upcoming == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]] * 2


class SaveAt(L.Callback):
    """Saves a checkpoint after some steps, each in a file of its own."""

    def __init__(self, steps: list[int], folder: Path) -> None:
        self.steps, self.folder = steps, folder

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize("kind", ["resuming", "resuming sized"])
def test_resumes_with_the_batch_after_the_checkpoint(kind: str, tmp_path: Path) -> None:
    steps = [3, 6, 7, 10]
    whole = _fit(LOADERS[kind](), SaveAt(steps, tmp_path))
    for step in steps:
        rest = _fit(LOADERS[kind](), ckpt_path=tmp_path / f"{step}.ckpt")
        assert rest.trained[: 14 - step] == whole.trained[step:]
        assert rest.upcoming[: 14 - step] == whole.upcoming[step:]
