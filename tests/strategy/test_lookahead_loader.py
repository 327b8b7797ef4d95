"""Looking one batch ahead keeps batches, errors and states, and stays in step with the training loop."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import DataLoader

from lightning_freescale._lightning.profiler import ObservedLoader
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.training.lookahead_loader import ENDED, UNKNOWN, LookaheadLoader


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
