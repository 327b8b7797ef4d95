"""One batch ahead: the same batches, errors and states as without, and always in step with the training loop."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_freescale._lightning.stages import ObservedLoader
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.lookahead_loader import ENDED, UNKNOWN, LookaheadLoader


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
    loader = LookaheadLoader([10, 11, 12])
    assert loader.next_batch is UNKNOWN
    for _ in range(2):  # a new iteration starts anew
        upcoming = []
        for _ in loader:
            upcoming.append(loader.start_batch())
        assert upcoming == [11, 12, ENDED]
        iter(loader)
        assert loader.next_batch is UNKNOWN


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_in_step_with_a_consumer_that_prefetches(prefetch: int) -> None:
    loader = LookaheadLoader(list(range(6)))
    batches, held, upcoming = iter(loader), [], []
    for _ in range(prefetch):
        held.append(next(batches))
    for _ in range(6):
        held.extend([batch for batch in [next(batches, None)] if batch is not None])
        held.pop(0)
        upcoming.append(loader.start_batch())
    assert upcoming == [1, 2, 3, 4, 5, ENDED]


def test_batches_that_are_none_are_passed_over() -> None:
    loader = LookaheadLoader(Counting(5, bad={0: None, 2: None}))
    upcoming = []
    for batch in loader:
        if batch is not None:
            upcoming.append(loader.start_batch())
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


def test_one_begin_too_many_loses_no_batch() -> None:
    loader = LookaheadLoader([0, 1, 2])
    batches = iter(loader)
    next(batches)
    loader.start_batch()
    loader.start_batch()
    assert loader.next_batch == 1 and list(batches) == [1, 2]


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


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("observed", [False, True])
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


def test_the_state_does_not_stand_still_if_nobody_begins_any_more() -> None:
    plain, loader = Resumable(20), LookaheadLoader(Resumable(20))
    expected, batches = iter(plain), iter(loader)
    next(batches)
    loader.start_batch()
    next(expected)
    for _ in range(9):
        assert next(batches) == next(expected)
    assert loader.state_dict() == plain.state_dict() and loader.next_batch is UNKNOWN


def test_an_abandoned_iteration_says_nothing_about_the_new_one() -> None:
    loader = LookaheadLoader([1, 2, 3, 4])
    old, new = iter(loader), iter(loader)
    next(new)
    next(old)
    loader.start_batch()
    assert loader.next_batch == 2


@pytest.mark.parametrize("observed", [False, True])
def test_looks_like_the_loader(observed: bool) -> None:
    inner = DataLoader(torch.arange(6), batch_size=2)
    loader = LookaheadLoader(ObservedLoader(inner, Timeline()) if observed else inner)
    assert len(loader) == 3 and loader.dataset is inner.dataset
    assert not hasattr(loader, "state_dict") and not isinstance(loader, Stateful)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(TypeError, match="len"):
        len(LookaheadLoader(Counting(3)))


def test_what_is_set_on_it_is_set_on_the_loader() -> None:
    inner = Counting(1)
    LookaheadLoader(inner).worker_init_fn = print
    assert inner.worker_init_fn is print


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
    """Something that can be watched going away."""


@pytest.mark.parametrize("begins", [False, True])
def test_keeps_one_batch_more_and_no_other(begins: bool) -> None:
    alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    def batches() -> Iterator[Batch]:
        for _ in range(12):
            batch = Batch()
            alive.add(batch)
            yield batch
            del batch

    loader, most = LookaheadLoader(batches()), 0
    for _ in loader:
        if begins:
            loader.start_batch()
        most = max(most, len(alive))
    assert most <= (2 if begins else 6)  # nobody who begins: a few, then it stops following
    assert begins or loader.next_batch is UNKNOWN


def test_dropping_the_iteration_drops_the_loaders() -> None:
    closed = []

    class Inner:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                closed.append(True)

    loader = LookaheadLoader(Inner())
    gc.disable()  # at once, not some time
    try:
        batches = iter(loader)
        next(batches)
        del batches
        assert closed == [True]
    finally:
        gc.enable()


def test_dropping_the_iteration_ends_the_workers() -> None:
    loader = LookaheadLoader(DataLoader(torch.arange(40), batch_size=2, num_workers=1))
    batches = iter(loader)
    next(batches)
    workers = batches._batches._workers
    assert all(worker.is_alive() for worker in workers)
    del batches
    assert not any(worker.is_alive() for worker in workers)
