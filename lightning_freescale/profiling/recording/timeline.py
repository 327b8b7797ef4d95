"""Where a rank's time goes: stamped intervals and collectives, and nothing that synchronizes."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lightning_freescale.profiling.recording.clocks import Clock, HostClock, clock_for
from lightning_freescale.profiling.recording.records import Collective, Kind, Span, StepRecord

_NOTHING: AbstractContextManager[None] = nullcontext()


class Timeline:
    """Records spans and collectives of the step in progress; does nothing until a step is opened.

    Attributes:
        clock: takes the stamps; None if nobody wants the records.
        driven: whether a profiler opens and closes the steps.
        on_step: called with every step that is closed.
        background: exchanges that other threads have been seen in, the latest ones.
        stamps: how many stamps were taken.
        inside: whether a collective is being waited for.
    """

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self.driven = False
        self.on_step: Callable[[StepRecord], None] | None = None
        self.background: deque[Collective] = deque(maxlen=10_000)
        self.stamps = 0
        self._step: StepRecord | None = None
        self._steps = 0
        self._counts: Counter[str] = Counter()
        self.inside = False
        self._thread = 0

    @property
    def enabled(self) -> bool:
        """Whether somebody wants the records."""
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
        """Start recording with the clock that fits ``device``; the calling thread is the one that trains."""
        self._thread = threading.get_ident()
        if self.clock is None:
            self.clock, self.stamps = clock_for(device), 0

    def disable(self) -> None:
        """Stop recording and forget the step in progress."""
        self.clock, self._step, self.driven, self._steps = None, None, False, 0
        self.background.clear()

    @property
    def is_training_thread(self) -> bool:
        """Whether the caller is the thread that trains, or autograd working for it."""
        if threading.get_ident() == self._thread:
            return True
        # on CUDA autograd runs backward in threads that are not Python's
        return isinstance(threading.current_thread(), threading._DummyThread)

    def take_background(self) -> list[Collective]:
        """What other threads have been seen in since the last time."""
        return [self.background.popleft() for _ in range(len(self.background))]

    # -- steps

    def open_step(self, start: Any = None) -> None:
        """Begin a step, now or at an earlier stamp; one that is open begins anew under its number."""
        if self.clock is not None:
            if self._step is None:
                self._steps += 1
                self._counts.clear()
            self._step = StepRecord(self.stamp() if start is None else start, index=self._steps - 1)

    def close_step(self, samples: int = 0, features: Any = None) -> StepRecord | None:
        """End the step in progress and hand it over; None if none was open."""
        step, self._step = self._step, None
        if step is not None and self.clock is not None:
            step.end, step.samples, step.features = self.stamp(), samples, features
            if self.on_step is not None:
                self.on_step(step)
        return step

    def stamp(self) -> Any:
        """Now; None if nobody wants the records."""
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
        return _Recorded(self, span)

    # -- collectives

    def arrive(self, name: str, group: str = "", moved: int | None = None) -> Collective | None:
        """This rank has done its part of a collective; None if nobody wants to know."""
        step = self._step
        if step is None:
            return None
        place = group or name
        key = f"{place}:{step.index}.{self._counts[place]}"
        self._counts[place] += 1
        if self.inside:
            return None
        return Collective(name, key, self.stamp(), moved=moved)

    def waiting(self, collective: Collective | None) -> AbstractContextManager[None]:
        """This rank needs the result of a collective now; it belongs to the step in progress."""
        step = self._step
        if collective is None or step is None or collective.start is not None:
            return _NOTHING
        step.collectives.append(collective)
        return _Waited(self, collective)

    def collective(self, name: str, group: str = "", moved: int | None = None) -> AbstractContextManager[None]:
        """A collective that blocks right away; others in the block are parts of it."""
        return self.waiting(self.arrive(name, group, moved))

    def awaited(self, name: str, arrived: Any) -> AbstractContextManager[None]:
        """The wait for a collective in whose background part this rank arrived earlier, at a stamp (None: now)."""
        collective = self.arrive(name)
        if collective is not None and arrived is not None:
            collective.arrive = arrived
        return self.waiting(collective)

    @contextmanager
    def elsewhere(self, name: str, moved: int | None = None) -> Iterator[None]:
        """A collective that another thread runs."""
        if self._step is None:
            yield
            return
        collective = Collective(name, "", self.stamp(), moved=moved)
        try:
            yield
        finally:
            collective.done = self.stamp()
            if collective.done is not None:  # or the run is over
                self.background.append(collective)


class _Recorded(AbstractContextManager[None]):
    """Stamps the ends of a span; a generator in its place takes three times as long."""

    __slots__ = ("_of", "_timeline")

    def __init__(self, timeline: Timeline, of: Span | Collective) -> None:
        self._timeline, self._of = timeline, of

    def __enter__(self) -> None:
        self._of.start = self._timeline.stamp()

    def __exit__(self, *_: object) -> None:
        self._of.end = self._timeline.stamp()


class _Waited(_Recorded):
    """The same for a collective; others inside are parts of it."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._timeline.inside = True
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._timeline.inside = False
