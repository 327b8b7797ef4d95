"""Where a rank's time goes: stamped intervals and collectives, and nothing that synchronizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

Kind = Literal["data", "compute", "pause"]


class Clock(Protocol):
    """Takes stamps now and turns them into seconds later."""

    def stamp(self) -> Any:
        """A moment in the stream of work."""

    def seconds(self, stamp: Any) -> float:
        """Seconds of that moment on this host's monotonic clock."""


class HostClock:
    """For devices that the host waits for: a stamp is the time it is taken."""

    def stamp(self) -> float:
        """Seconds on the host's monotonic clock."""
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        """The stamp itself."""
        return stamp


class CudaClock:
    """For streams that run behind the host: a stamp is an event on the current stream. Not tested on GPU."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # once, before training, to tie the device's time to the host's
        self._base, self._base_seconds = self.stamp(), time.perf_counter()

    def stamp(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        """Waits for the event, so ask only for what is long past."""
        stamp.synchronize()
        return self._base_seconds + float(self._base.elapsed_time(stamp)) / 1000


@dataclass
class Span:
    """Time spent on one thing, from ``start`` to ``end`` (stamps of the timeline's clock)."""

    kind: Kind
    name: str
    start: Any
    end: Any


@dataclass
class Collective:
    """One exchange: when this rank was there (``arrive``), and when it waited for it (``start`` to ``end``)."""

    name: str
    arrive: Any
    start: Any = None
    end: Any = None


@dataclass
class StepRecord:
    """What one rank did in one step; the lists are in the order things began."""

    start: Any
    end: Any = None
    samples: int = 0
    spans: list[Span] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)


class Timeline:
    """Records spans and collectives of the step in progress; does nothing until a step is opened."""

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self.driven = False
        """Whether a profiler opens and closes the steps."""
        self.on_step: Callable[[StepRecord], None] | None = None
        """Called with every step that is closed."""
        self._step: StepRecord | None = None

    @property
    def enabled(self) -> bool:
        """Whether somebody wants the records."""
        return self.clock is not None

    def enable(self, device: torch.device) -> None:
        """Start recording with the clock that fits ``device``."""
        if self.clock is None:
            self.clock = CudaClock(device) if device.type == "cuda" else HostClock()

    def disable(self) -> None:
        """Stop recording and forget the step in progress."""
        self.clock, self._step, self.driven = None, None, False

    def open_step(self, start: Any = None) -> None:
        """Begin a step, now or at an earlier stamp."""
        if self.clock is not None:
            self._step = StepRecord(self.clock.stamp() if start is None else start)

    def close_step(self, samples: int = 0) -> StepRecord | None:
        """End the step in progress and hand it over; None if none was open."""
        step, self._step = self._step, None
        if step is not None and self.clock is not None:
            step.end, step.samples = self.clock.stamp(), samples
            if self.on_step is not None:
                self.on_step(step)
        return step

    @contextmanager
    def span(self, kind: Kind, name: str) -> Iterator[None]:
        """Record the block as ``kind``."""
        step = self._step
        if step is None or self.clock is None:
            yield
            return
        span = Span(kind, name, self.clock.stamp(), None)
        step.spans.append(span)
        try:
            yield
        finally:
            span.end = self.clock.stamp()

    def arrive(self, name: str) -> Collective | None:
        """This rank has done its part of a collective."""
        if self._step is None or self.clock is None:
            return None
        collective = Collective(name, self.clock.stamp())
        self._step.collectives.append(collective)
        return collective

    @contextmanager
    def waiting(self, collective: Collective | None) -> Iterator[None]:
        """This rank needs the result of a collective now."""
        if collective is None or self.clock is None or collective.start is not None:
            yield
            return
        collective.start = self.clock.stamp()
        try:
            yield
        finally:
            collective.end = self.clock.stamp()

    def stamp(self) -> Any:
        """Now; None if nobody wants the records."""
        return None if self.clock is None else self.clock.stamp()

    @contextmanager
    def awaited(self, name: str, arrived: Any) -> Iterator[None]:
        """The wait for a collective in whose background part this rank arrived earlier, at a stamp (None: now)."""
        collective = self.arrive(name)
        if collective is not None and arrived is not None:
            collective.arrive = arrived
        with self.waiting(collective):
            yield

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """A collective that blocks right away."""
        with self.waiting(self.arrive(name)):
            yield
