"""Stamp the spans and collectives of the step in progress, without synchronizing the device."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from lightning_freescale.profiling.recording.records import Clock, Collective, HostClock, Kind, Span, StepRecord, clock_for

Batch = TypeVar("Batch")
_NOTHING: AbstractContextManager[None] = nullcontext()
_MEASURED_SPANS = 300
_REMEMBERED = 20
"""Number of steps whose ends are kept for the hang watch."""


class Timeline:
    """Records spans and collectives of the step in progress. It does nothing while no step is open.

    Attributes:
        clock: clock of the stamps; None while the timeline is disabled.
        driven: True if a profiler opens and closes the steps.
        on_step: function that is called with every closed step.
        background: latest exchanges of other threads.
        under_way: pending exchange of each other thread, by the identifier of the thread.
        ended: numbers and ends of the last steps, in seconds of ``time.perf_counter`` with any clock.
        stamps: number of stamps.
        in_collective: True during the wait for a collective.
        thread: identifier of the thread that trains.
    """

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self.driven = False
        self.on_step: Callable[[StepRecord], None] | None = None
        self.background: deque[Collective] = deque(maxlen=10_000)
        self.under_way: dict[int, Collective] = {}
        self.ended: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self.stamps = 0
        self.in_collective = False
        self.thread = 0
        self._step: StepRecord | None = None
        self._steps = 0
        self._counts: Counter[str] = Counter()

    @property
    def enabled(self) -> bool:
        """True between :meth:`enable` and :meth:`disable`."""
        return self.clock is not None

    @property
    def recording(self) -> bool:
        """True while a step is open."""
        return self._step is not None

    @property
    def on_host(self) -> bool:
        """True if a stamp is the time at which the host takes it."""
        return isinstance(self.clock, HostClock)

    def enable(self, device: torch.device) -> None:
        """Start recording with the clock of ``device``. The calling thread is the one that trains.

        Raises:
            ValueError: the type of the device is neither cpu nor cuda.
        """
        self.thread = threading.get_ident()
        if self.clock is None:
            self.clock, self.stamps = clock_for(device), 0

    def disable(self) -> None:
        """Stop recording and drop the step in progress."""
        self.clock = self._step = None
        self.driven, self._steps = False, 0
        self.background.clear()
        self.ended.clear()

    @property
    def is_training_thread(self) -> bool:
        """True on the thread that trains, and on the autograd threads that work for it."""
        if threading.get_ident() == self.thread:
            return True
        # on CUDA, autograd runs backward in threads that Python did not start
        return isinstance(threading.current_thread(), threading._DummyThread)

    def pop_background(self) -> list[Collective]:
        """Return the exchanges of other threads since the last call."""
        return [self.background.popleft() for _ in range(len(self.background))]

    # -- steps

    def open_step(self, start: Any = None) -> None:
        """Open a step, now or at an earlier stamp. A step that is already open restarts with the same number."""
        if self.clock is not None:
            if self._step is None:
                self._steps += 1
                self._counts.clear()
            self._step = StepRecord(self.stamp() if start is None else start, index=self._steps - 1)

    def close_step(
        self, samples: int = 0, features: Any = None, predicted: float | None = None, plan: Any = None
    ) -> StepRecord | None:
        """Close the step in progress and return its record; return None if no step is open."""
        step, self._step = self._step, None
        if step is not None and self.clock is not None:
            step.end, step.samples = self.stamp(), samples
            self.ended.append((step.index, time.perf_counter()))
            step.features, step.predicted, step.plan = features, predicted, plan
            if self.on_step is not None:
                self.on_step(step)
        return step

    def position(self) -> tuple[StepRecord | None, dict[str, int]]:
        """Return the step in progress, and the number of collectives of each group that it has begun.

        Another thread may call this without a lock.
        """
        return self._step, dict(self._counts)

    def stamp(self) -> Any:
        """Return a stamp of this moment; None while the timeline is disabled."""
        if self.clock is None:
            return None
        self.stamps += 1
        return self.clock.stamp()

    # -- spans

    def span(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        step = self._step
        if step is None:
            return _NOTHING
        span = Span(kind, name, None)
        step.spans.append(span)
        return _StampedBlock(self, span)

    # -- collectives

    def arrive(self, name: str, group: str = "", moved: int | None = None) -> Collective | None:
        """Record the arrival of this rank at a collective; return None if no step is open."""
        if self._step is None:
            return None
        key = self.key_in(group or name)
        if self.in_collective:
            return None
        return Collective(name, key, self.stamp(), moved=moved)

    def key_in(self, place: str) -> str:
        """Return the key of the next exchange of a place, which is a group or the ranks of a message."""
        # the count restarts in every step: a rank that calls one collective more than the others affects one step only
        assert self._step is not None
        key = f"{place}:{self._step.index}.{self._counts[place]}"
        self._counts[place] += 1
        return key

    def waiting(self, collective: Collective | None) -> AbstractContextManager[Collective | None]:
        """Record the block as the wait for a collective. It belongs to the step in progress, not to the one that issued it."""
        step = self._step
        if collective is None or step is None or collective.start is not None:
            return _NOTHING
        step.collectives.append(collective)
        return _StampedWait(self, collective)

    def collective(self, name: str, group: str = "", moved: int | None = None) -> AbstractContextManager[Collective | None]:
        """Record the block as a blocking collective. Collectives inside the block are parts of it."""
        return self.waiting(self.arrive(name, group, moved))

    def awaited(self, name: str, arrived: Any) -> AbstractContextManager[Collective | None]:
        """Record the block as the wait for a collective at which this rank arrived earlier, at a stamp (None for now).

        A caller that observes the end of the collective sets ``done`` of the record.
        """
        collective = self.arrive(name)
        if collective is not None and arrived is not None:
            collective.arrive = arrived
        return self.waiting(collective)

    @contextmanager
    def background_collective(self, name: str, moved: int | None = None) -> Iterator[None]:
        """Record the block as a collective of another thread."""
        if self._step is None:
            yield
            return
        collective = Collective(name, "", self.stamp(), moved=moved)
        thread = threading.get_ident()
        self.under_way[thread] = collective
        try:
            yield
        finally:
            self.under_way.pop(thread, None)
            collective.done = self.stamp()
            if collective.done is not None:  # otherwise the run has ended
                self.background.append(collective)


class _StampedBlock(AbstractContextManager[Any]):
    """Stamps both ends of a span or a wait. A generator would take three times as long."""

    __slots__ = ("_record", "_timeline")

    def __init__(self, timeline: Timeline, record: Span | Collective) -> None:
        self._timeline, self._record = timeline, record

    def __enter__(self) -> Any:
        self._record.start = self._timeline.stamp()
        return self._record

    def __exit__(self, *_: object) -> None:
        self._record.end = self._timeline.stamp()


class _StampedWait(_StampedBlock):
    __slots__ = ()

    def __enter__(self) -> Any:
        self._timeline.in_collective = True
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._timeline.in_collective = False


def batches_on(timeline: Timeline, loader: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate over a loader of batches and record every ``next`` as a wait for data."""

    def stamped(batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            with timeline.span("data", "fetch"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    return stamped(iter(loader))  # not inside the generator: a loader draws the seed of its workers now, not at the first batch


def seconds_per_stamp(device: torch.device) -> float:
    """Return the measured cost of a stamp. The measurement takes about a millisecond."""
    timeline = Timeline()
    timeline.enable(device)
    timeline.open_step()
    began = time.perf_counter()
    for _ in range(_MEASURED_SPANS):
        with timeline.span("host", "empty"):
            pass
    return (time.perf_counter() - began) / (2 * _MEASURED_SPANS)
