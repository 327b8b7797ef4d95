"""What one rank stamps in one step, and the same in seconds on one clock for all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["data", "forward", "backward", "optimizer", "host", "pause"]
"""Of a span. A pause (validation, the profiler's exchange) is no part of the step; "host" is work beside the model's."""


@dataclass
class Span:
    """Time spent on one thing, from ``start`` to ``end`` (stamps of the timeline's clock)."""

    kind: Kind
    name: str
    start: Any
    end: Any = None


@dataclass
class Collective:
    """One exchange.

    Attributes:
        name: what it is.
        key: names the same exchange on all of its ranks: the group, and which of the group's exchanges it is.
        arrive: this rank has done its part.
        start: this rank begins to wait for the result; None as long as it does not.
        end: it has the result.
        done: when the exchange was over, if that is seen apart from the wait.
        moved: bytes that pass this rank's link, the larger of sent and received; None if unknown.
    """

    name: str
    key: str
    arrive: Any
    start: Any = None
    end: Any = None
    done: Any = None
    moved: int | None = None


@dataclass
class StepRecord:
    """What one rank did in one step; the lists are in the order things began.

    ``samples`` and ``features`` (sums over the samples, see :func:`~lightning_freescale.balance.cost.sample_features`) are what
    it worked on. ``index`` counts the steps of a fit.
    """

    start: Any
    end: Any = None
    index: int = 0
    samples: int = 0
    features: Any = None
    spans: list[Span] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)


class ResolvedSpan(NamedTuple):
    """A span in seconds on rank 0's clock."""

    kind: Kind
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


@dataclass(frozen=True)
class ResolvedStep:
    """A step of one rank in seconds on rank 0's clock.

    ``hidden`` holds the exchanges of other threads while the step ran; nobody waits for them, so ``start`` and ``end`` are
    ``arrive``.
    """

    start: float
    end: float
    index: int = 0
    samples: int = 0
    spans: tuple[ResolvedSpan, ...] = ()
    collectives: tuple[ResolvedCollective, ...] = ()
    hidden: tuple[ResolvedCollective, ...] = ()
