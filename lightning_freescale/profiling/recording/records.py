"""Records of the steps of one rank, the clocks that stamp them, and the same in seconds on rank 0's clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class HostClock:
    """For devices that the host waits for: a stamp is the time it is taken."""

    def __init__(self) -> None:
        self.stamp = time.perf_counter

    def seconds(self, stamp: float) -> float:
        """Return the seconds of a stamp on this host's monotonic clock: the stamp itself."""
        return stamp

    def release(self, stamps: Iterable[float]) -> None:
        """Take back stamps that are not needed any more; numbers need not be taken back."""

    def tie(self) -> None:
        """Compare the device's clock with the host's: they are one."""


class CudaClock:
    """For streams that run behind the host: a stamp is an event on the current stream, from a pool.

    All are of one device: no time can be had from one GPU's event to another's. They measure milliseconds in single
    precision, so times are counted from an event that moves along with the run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._free: deque[Any] = deque()
        self._base: Any = None
        self.tie()

    def stamp(self) -> Any:
        """Record an event on the current stream of the clock's device."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        # not the calling thread's device: a thread that has chosen none works on the first GPU, which may be another rank's
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamp: Any) -> float:
        """Return the seconds of an event; waits for it, so ask only for what is long past."""
        stamp.synchronize()
        return self._base_seconds + float(self._base.elapsed_time(stamp)) / 1000

    def release(self, stamps: Iterable[Any]) -> None:
        """Take the events back; the last of them becomes the one that times are counted from."""
        events = list(stamps)
        if not events:
            return
        seconds, base = self.seconds(events[-1]), events.pop()
        self._free.append(self._base)
        self._base, self._base_seconds = base, seconds
        self._free.extend(events)

    def tie(self) -> None:
        """Wait for the device, then read its clock and the host's at once; call it while nothing runs."""
        torch.cuda.synchronize(self._device)
        self._base = self.stamp()
        self._base.synchronize()
        self._base_seconds = time.perf_counter()


Clock = HostClock | CudaClock
"""Takes stamps now and turns them into seconds later."""


def clock_for(device: torch.device) -> Clock:
    """Return the clock that fits a device.

    Raises:
        ValueError: nothing is known of devices of that type.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the timeline can stamp the work of cpu and cuda devices, not of {device}: profile without it there")
    return CudaClock(device) if device.type == "cuda" else HostClock()


Floats = NDArray[np.float64]
Kind = Literal["data", "forward", "backward", "optimizer", "host", "pause"]
"""The kind of a span. A pause (validation, the profiler's exchange) is no part of the step; "host" is other work."""


@dataclass
class Span:
    """Time spent on one thing, from ``start`` to ``end`` (stamps of the timeline's clock)."""

    kind: Kind
    name: str
    start: Any
    end: Any = None


@dataclass
class Collective:
    """One exchange, in stamps of the timeline's clock.

    Attributes:
        name: what it is.
        key: names the same exchange on all of its ranks: the group, and which of the group's exchanges it is.
        arrive: this rank has done its part.
        start: this rank begins to wait for the result; None as long as it does not.
        end: it has the result.
        done: when the exchange was over, if that is seen apart from the wait.
        moved: bytes that pass this rank's link, the larger of sent and received; None if unknown.
        at_most: whether it was under way somewhere between ``arrive`` and ``done``, not all the time.
    """

    name: str
    key: str
    arrive: Any
    start: Any = None
    end: Any = None
    done: Any = None
    moved: int | None = None
    at_most: bool = False


@dataclass
class StepRecord:
    """The record of one step of one rank; the lists are in the order things began.

    ``samples`` and ``features`` (sums over the samples, see :func:`~lightning_freescale.balance.cost.sample_features`) are what
    it worked on, ``predicted`` is how long that should take, in the unit of the step's plan, and ``plan`` what the plan says of
    all ranks, a :class:`~lightning_freescale.profiling.analysis.imbalance.PlannedStep`. ``index`` counts the steps of a fit.
    """

    start: Any
    end: Any = None
    index: int = 0
    samples: int = 0
    features: Any = None
    predicted: float | None = None
    plan: Any = None
    spans: list[Span] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)


class Interval(NamedTuple):
    """Time spent on one thing, in seconds on rank 0's clock: a span, or what a step is cut into.

    ``kind`` is that of a span or, in a step that was cut, also ``"straggler_wait"``, ``"transfer"``, ``"wait"`` (not divided
    into the two) or ``"unexplained"``.
    """

    kind: str
    name: str
    start: float
    end: float


class ResolvedCollective(NamedTuple):
    """A collective in seconds on rank 0's clock; see :class:`Collective`. ``done`` is ``end`` if it was not seen apart."""

    name: str
    key: str
    arrive: float
    start: float
    end: float
    done: float
    moved: int | None = None
    at_most: bool = False

    @property
    def is_message(self) -> bool:
        """Whether it is of two ranks only, one of which sends."""
        return self.name in ("send", "recv")

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """The two parts of the key: the ranks that take part, and which of their exchanges it is."""
        place, _, number = self.key.rpartition(":")
        return place, tuple(map(int, number.split(".")))


@dataclass(frozen=True)
class ResolvedStep:
    """A step of one rank in seconds on rank 0's clock; its spans may overlap.

    ``hidden`` holds the exchanges of other threads while the step ran; no rank waits for them, so ``start`` and ``end`` are
    ``arrive``.
    """

    start: float
    end: float
    index: int = 0
    samples: int = 0
    spans: tuple[Interval, ...] = ()
    collectives: tuple[ResolvedCollective, ...] = ()
    hidden: tuple[ResolvedCollective, ...] = ()

    def as_list(self) -> list[Any]:
        """Return the step as a rank sends it to rank 0."""
        return [self.start, self.end, self.index, self.samples, self.spans, self.collectives, self.hidden]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> ResolvedStep:
        """Return the step that a rank sent by :meth:`as_list`."""
        start, end, index, samples, spans, *exchanges = values
        collectives, hidden = (tuple(ResolvedCollective(*one) for one in each) for each in exchanges)
        return cls(start, end, index, samples, tuple(Interval(*one) for one in spans), collectives, hidden)


def resolve(
    records: Sequence[StepRecord],
    clock: Clock,
    to_rank_zero: Callable[[Floats], Floats] = np.asarray,
    background: Sequence[Collective] = (),
) -> list[ResolvedStep]:
    """Turn the stamps of steps that have ended into seconds on rank 0's clock; what has no end is left out.

    ``background`` holds exchanges of other threads; each is hidden in every step in which it was under way.
    """
    stamps = {stamp: None for record in records for stamp in (*stamps_of(record), record.end)}
    stamps.update({c.done: None for record in records for c in record.collectives if c.done is not None})
    stamps.update({stamp: None for c in background for stamp in (c.arrive, c.done)})
    # all at once: numpy interpolates the offsets of thousands of stamps in the time of a few
    seconds = to_rank_zero(np.array([clock.seconds(stamp) for stamp in stamps])).tolist()
    at: dict[Any, float] = dict(zip(stamps, seconds))
    beside = [
        ResolvedCollective(c.name, c.key, at[c.arrive], at[c.arrive], at[c.arrive], at[c.done], c.moved, c.at_most)
        for c in background
    ]
    return [_resolved_step(record, at, beside) for record in records]


def stamps_of(record: StepRecord) -> Iterator[Any]:
    """Yield the stamps of a step that are not needed once it is resolved, its start last; its end is the start of the next."""
    for span in record.spans:
        yield from (stamp for stamp in (span.start, span.end) if stamp is not None)
    for collective in record.collectives:
        yield from (stamp for stamp in (collective.arrive, collective.start, collective.end) if stamp is not None)
    yield record.start


def _resolved_step(record: StepRecord, at: Mapping[Any, float], background: Sequence[ResolvedCollective]) -> ResolvedStep:
    start, end = at[record.start], at[record.end]
    spans = tuple(Interval(s.kind, s.name, at[s.start], at[s.end]) for s in record.spans if s.end is not None)
    collectives = tuple(
        ResolvedCollective(c.name, c.key, at[c.arrive], at[c.start], at[c.end], at.get(c.done, at[c.end]), c.moved)
        for c in record.collectives
        if c.end is not None
    )
    hidden = tuple(one for one in background if one.arrive < end and one.done > start)
    return ResolvedStep(start, end, record.index, record.samples, spans, collectives, hidden)
