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
"""Steps whose ends are kept, for the hang watch."""


class Timeline:
    """Records spans and collectives of the step in progress; does nothing until a step is opened.

    Attributes:
        clock: takes the stamps; None if no records are wanted.
        driven: whether a profiler opens and closes the steps.
        on_step: called with every step that is closed.
        background: exchanges that other threads have been seen in, the latest ones.
        under_way: the exchange that another thread is in now, by its identifier.
        ended: numbers of the last steps and when they ended, in seconds of ``time.perf_counter``, whatever the clock.
        stamps: how many stamps were taken.
        in_collective: whether a collective is being waited for.
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
        self._step: StepRecord | None = None
        self._steps = 0
        self._counts: Counter[str] = Counter()
        self._thread = 0

    @property
    def enabled(self) -> bool:
        """Whether records are wanted."""
        return self.clock is not None

    @property
    def recording(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    @property
    def on_host(self) -> bool:
        """Whether a stamp is the time at which the host takes it."""
        return isinstance(self.clock, HostClock)

    def enable(self, device: torch.device) -> None:
        """Start recording with the clock that fits ``device``; the calling thread is the one that trains.

        Raises:
            ValueError: nothing is known of devices of that type.
        """
        self._thread = threading.get_ident()
        if self.clock is None:
            self.clock, self.stamps = clock_for(device), 0

    def disable(self) -> None:
        """Stop recording and forget the step in progress."""
        self.clock = self._step = None
        self.driven, self._steps = False, 0
        self.background.clear()
        self.ended.clear()

    @property
    def thread(self) -> int:
        """Identifier of the thread that trains."""
        return self._thread

    @property
    def is_training_thread(self) -> bool:
        """Whether the caller is the thread that trains, or autograd working for it."""
        if threading.get_ident() == self._thread:
            return True
        # on CUDA autograd runs backward in threads that are not Python's
        return isinstance(threading.current_thread(), threading._DummyThread)

    def pop_background(self) -> list[Collective]:
        """Return what other threads have been seen in since the last call."""
        return [self.background.popleft() for _ in range(len(self.background))]

    # -- steps

    def open_step(self, start: Any = None) -> None:
        """Begin a step, now or at an earlier stamp; one that is open begins anew under its number."""
        if self.clock is not None:
            if self._step is None:
                self._steps += 1
                self._counts.clear()
            self._step = StepRecord(self.stamp() if start is None else start, index=self._steps - 1)

    def close_step(
        self, samples: int = 0, features: Any = None, predicted: float | None = None, plan: Any = None
    ) -> StepRecord | None:
        """End the step in progress and return its record; None if none was open."""
        step, self._step = self._step, None
        if step is not None and self.clock is not None:
            step.end, step.samples = self.stamp(), samples
            self.ended.append((step.index, time.perf_counter()))
            step.features, step.predicted, step.plan = features, predicted, plan
            if self.on_step is not None:
                self.on_step(step)
        return step

    def position(self) -> tuple[StepRecord | None, dict[str, int]]:
        """Return the step in progress as it stands, and how many collectives of each group it has come to.

        For another thread than the one that trains, which nothing makes wait.
        """
        return self._step, dict(self._counts)

    def stamp(self) -> Any:
        """Stamp this moment; None if no records are wanted."""
        if self.clock is None:
            return None
        self.stamps += 1
        return self.clock.stamp()

    # -- spans

    def span(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """Record the block as ``kind``."""
        step = self._step
        if step is None:
            return _NOTHING
        span = Span(kind, name, None)
        step.spans.append(span)
        return _StampedBlock(self, span)

    # -- collectives

    def arrive(self, name: str, group: str = "", moved: int | None = None) -> Collective | None:
        """Record that this rank has done its part of a collective; None if no step is open."""
        if self._step is None:
            return None
        key = self.key_in(group or name)
        if self.in_collective:
            return None
        return Collective(name, key, self.stamp(), moved=moved)

    def key_in(self, place: str) -> str:
        """Return the key of the next exchange of a place in the step in progress: of a group, or of the ranks of a message."""
        # counted anew in every step: a rank that calls one collective more than the others puts one step out of order,
        # not the rest of the run
        assert self._step is not None
        key = f"{place}:{self._step.index}.{self._counts[place]}"
        self._counts[place] += 1
        return key

    def waiting(self, collective: Collective | None) -> AbstractContextManager[Collective | None]:
        """Record the block as the wait for a collective; it belongs to the step in progress, whichever issued it."""
        step = self._step
        if collective is None or step is None or collective.start is not None:
            return _NOTHING
        step.collectives.append(collective)
        return _StampedWait(self, collective)

    def collective(self, name: str, group: str = "", moved: int | None = None) -> AbstractContextManager[Collective | None]:
        """Record the block as a collective that blocks right away; others in the block are parts of it."""
        return self.waiting(self.arrive(name, group, moved))

    def awaited(self, name: str, arrived: Any) -> AbstractContextManager[Collective | None]:
        """Record the wait for a collective in whose background part this rank arrived earlier, at a stamp (None: now).

        Who sees when it was over, apart from the wait, sets ``done`` of the record that is entered with.
        """
        collective = self.arrive(name)
        if collective is not None and arrived is not None:
            collective.arrive = arrived
        return self.waiting(collective)

    @contextmanager
    def background_collective(self, name: str, moved: int | None = None) -> Iterator[None]:
        """Record the block as a collective that another thread runs."""
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
            if collective.done is not None:  # or the run is over
                self.background.append(collective)


class _StampedBlock(AbstractContextManager[None]):
    """Stamps both ends of a span; a generator in its place takes three times as long."""

    __slots__ = ("_span", "_timeline")

    def __init__(self, timeline: Timeline, span: Span) -> None:
        self._timeline, self._span = timeline, span

    def __enter__(self) -> None:
        self._span.start = self._timeline.stamp()

    def __exit__(self, *_: object) -> None:
        self._span.end = self._timeline.stamp()


class _StampedWait(AbstractContextManager[Collective]):
    """Stamps both ends of the wait for a collective; others inside are parts of it."""

    __slots__ = ("_collective", "_timeline")

    def __init__(self, timeline: Timeline, collective: Collective) -> None:
        self._timeline, self._collective = timeline, collective

    def __enter__(self) -> Collective:
        self._timeline.in_collective = True
        self._collective.start = self._timeline.stamp()
        return self._collective

    def __exit__(self, *_: object) -> None:
        self._collective.end = self._timeline.stamp()
        self._timeline.in_collective = False


def batches_on(timeline: Timeline, loader: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate over a loader of batches with every ``next`` on the timeline, as waiting for data."""

    def stamped(batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            with timeline.span("data", "fetch"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    return stamped(iter(loader))  # not in the generator: a loader draws its workers' seed now, not at the first batch


def seconds_per_stamp(device: torch.device) -> float:
    """Measure what a stamp costs, on a timeline of its own; takes about a millisecond."""
    timeline = Timeline()
    timeline.enable(device)
    timeline.open_step()
    began = time.perf_counter()
    for _ in range(_MEASURED_SPANS):
        with timeline.span("host", "empty"):
            pass
    return (time.perf_counter() - began) / (2 * _MEASURED_SPANS)
