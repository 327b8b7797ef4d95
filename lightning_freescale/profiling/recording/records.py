"""Records of the steps of one rank, the clocks that stamp them, and the resolved steps in seconds on rank 0's clock."""

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
    """Clock of devices that the host waits for: a stamp is the time at which it is taken."""

    def __init__(self) -> None:
        self.stamp = time.perf_counter

    def seconds(self, stamp: float) -> float:
        """Return the seconds of a stamp on this host's monotonic clock."""
        return stamp

    def release(self, stamps: Iterable[float]) -> None:
        """Release stamps; numbers need no release."""

    def tie(self) -> None:
        """Do nothing: the host's clock needs no comparison."""


class CudaClock:
    """Clock of streams that run behind the host: a stamp is an event on the current stream, from a pool.

    All events are of one device, because CUDA measures no time between events of two GPUs. Events measure milliseconds in
    single precision, so times are counted from an event that moves along with the run.
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
        # the device is passed, because a thread that has chosen none uses the first GPU, which may belong to another rank
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamp: Any) -> float:
        """Return the seconds of an event, and wait for it. Call it only for events that are long past."""
        stamp.synchronize()
        return self._base_seconds + float(self._base.elapsed_time(stamp)) / 1000

    def release(self, stamps: Iterable[Any]) -> None:
        """Return events to the pool; times are then counted from the last of them."""
        events = list(stamps)
        if not events:
            return
        seconds, base = self.seconds(events[-1]), events.pop()
        self._free.append(self._base)
        self._base, self._base_seconds = base, seconds
        self._free.extend(events)

    def tie(self) -> None:
        """Wait for the device, then read its clock and the host's. Call it while nothing runs."""
        torch.cuda.synchronize(self._device)
        self._base = self.stamp()
        self._base.synchronize()
        self._base_seconds = time.perf_counter()


Clock = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device.

    Raises:
        ValueError: the type of the device is neither cpu nor cuda.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the profiler supports cpu and cuda devices, not {device}. Train without it on this device")
    return CudaClock(device) if device.type == "cuda" else HostClock()


Floats = NDArray[np.float64]
Kind = Literal["data", "forward", "backward", "optimizer", "host", "pause"]
"""The kind of a span. A pause, such as validation, is not part of the step; "host" is other work."""


@dataclass
class Span:
    """A named section of a step, from ``start`` to ``end`` in stamps of the timeline's clock."""

    kind: Kind
    name: str
    start: Any
    end: Any = None


@dataclass
class Collective:
    """One exchange, in stamps of the timeline's clock.

    Attributes:
        name: name of the exchange.
        key: identifier of the exchange on all of its ranks: the group, and its number among the group's exchanges.
        arrive: time at which this rank has done its part.
        start: beginning of the wait for the result; None before.
        end: end of the wait.
        done: end of the exchange, if it was observed separately from the wait.
        moved: bytes over this rank's link, the larger of sent and received; None if unknown.
        at_most: True if the exchange ran at some time between ``arrive`` and ``done``, not all the time.
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
    """The record of one step of one rank. The lists are in the order of the starts.

    ``index`` counts the steps of a fit. ``samples`` is the number of samples, ``features`` sums over them (see
    :func:`~lightning_freescale.balance.cost.sample_features`), and ``predicted`` the predicted compute in the unit of ``plan``,
    a :class:`~lightning_freescale.profiling.analysis.imbalance.PlannedStep`.
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
    """A span, or an interval of a step that was cut into intervals, in seconds on rank 0's clock.

    ``kind`` is that of a span. In a step that was cut, it may also be ``"straggler_wait"``, ``"transfer"``, ``"wait"`` (not
    divided into the two) or ``"unexplained"``.
    """

    kind: str
    name: str
    start: float
    end: float


class ResolvedCollective(NamedTuple):
    """A :class:`Collective` in seconds on rank 0's clock. ``done`` is ``end`` if it was not observed separately."""

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
        """True for a message from one rank to another."""
        return self.name in ("send", "recv")

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """The two parts of the key: the group or the ranks of a message, and the number among their exchanges."""
        place, _, number = self.key.rpartition(":")
        return place, tuple(map(int, number.split(".")))


@dataclass(frozen=True)
class ResolvedStep:
    """A step of one rank in seconds on rank 0's clock. Its spans may overlap.

    ``hidden`` has the exchanges of other threads during the step. No rank waits for them, so their ``start`` and ``end`` are
    ``arrive``. :class:`StepRecord` describes ``features`` and ``predicted``.
    """

    start: float
    end: float
    index: int = 0
    samples: int = 0
    spans: tuple[Interval, ...] = ()
    collectives: tuple[ResolvedCollective, ...] = ()
    hidden: tuple[ResolvedCollective, ...] = ()
    features: Any = None
    predicted: float | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ResolvedStep:
        """Return the step from its fields, in which JSON has made lists of the tuples."""
        collectives, hidden = (tuple(ResolvedCollective(*one) for one in values[name]) for name in ("collectives", "hidden"))
        spans = tuple(Interval(*one) for one in values["spans"])
        return cls(**{**values, "spans": spans, "collectives": collectives, "hidden": hidden})


def resolve(
    records: Sequence[StepRecord],
    clock: Clock,
    to_rank_zero: Callable[[Floats], Floats] = np.asarray,
    background: Sequence[Collective] = (),
) -> list[ResolvedStep]:
    """Convert the stamps of ended steps into seconds on rank 0's clock, without spans and collectives that have not ended.

    ``background`` has the exchanges of other threads. Each is added to every step during which it ran.
    """
    stamps = {stamp: None for record in records for stamp in (*stamps_of(record), record.end)}
    stamps.update({c.done: None for record in records for c in record.collectives if c.done is not None})
    stamps.update({stamp: None for c in background for stamp in (c.arrive, c.done)})
    # in one call, because numpy interpolates thousands of offsets in the time of a few
    seconds = to_rank_zero(np.array([clock.seconds(stamp) for stamp in stamps])).tolist()
    at: dict[Any, float] = dict(zip(stamps, seconds))
    beside = [
        ResolvedCollective(c.name, c.key, at[c.arrive], at[c.arrive], at[c.arrive], at[c.done], c.moved, c.at_most)
        for c in background
    ]
    return [_resolved_step(record, at, beside) for record in records]


def stamps_of(record: StepRecord) -> Iterator[Any]:
    """Yield the stamps that a resolved step no longer needs, its start last. Its end is the start of the next step."""
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
    work = record.features, record.predicted
    return ResolvedStep(start, end, record.index, record.samples, spans, collectives, hidden, *work)
