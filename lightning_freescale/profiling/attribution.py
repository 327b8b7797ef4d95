"""Split the wall time of every rank's step into its parts."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.timeline import Clock, StepRecord

Interval = tuple[str, str, float, float]
"""Kind, name, start and end in seconds."""


@dataclass(frozen=True)
class ResolvedStep:
    """A step of one rank with all stamps in seconds. Collectives are ``(name, arrive, start, end)`` in order of arrival."""

    start: float
    end: float
    samples: int
    spans: list[Interval]
    collectives: list[tuple[str, float, float, float]]


@dataclass(frozen=True)
class Parts:
    """Seconds of one rank's step. ``unexplained`` is what the other parts do not add up to."""

    wall: float
    data_wait: float
    compute: float
    straggler_wait: float
    transfer: float
    host_overhead: float
    unexplained: float


PART_NAMES = tuple(f.name for f in fields(Parts))


def resolve(record: StepRecord, clock: Clock, offset: float = 0.0) -> ResolvedStep:
    """Turn stamps into seconds on rank 0's clock (``offset`` is rank 0's time minus this rank's)."""

    def at(stamp: object) -> float:
        return clock.seconds(stamp) + offset

    spans: list[Interval] = [(s.kind, s.name, at(s.start), at(s.end)) for s in record.spans if s.end is not None]
    collectives = [(c.name, at(c.arrive), at(c.start), at(c.end)) for c in record.collectives if c.end is not None]
    return ResolvedStep(at(record.start), at(record.end), record.samples, spans, collectives)


def attribute(step: ResolvedStep, last: list[float]) -> Parts:
    """The parts of one rank's step; ``last`` is when the last rank arrived at each of the step's collectives.

    While a rank waits for a collective, the time until the last rank has arrived is straggler wait, the rest transfer. Time
    in several intervals counts once, for the one that began last; time in none is host overhead. Pauses (validation, the
    profiler itself) are taken out of the wall time.
    """
    waits: list[Interval] = []
    for (name, _, start, end), arrived in zip(step.collectives, last):
        turn = min(max(arrived, start), end)
        waits += [("straggler_wait", name, start, turn), ("transfer", name, turn, end)]
    seconds = _exclusive(step.spans + waits, step.start, step.end)
    wall = step.end - step.start - seconds.get("pause", 0.0)
    data, compute, straggler, transfer, host = (
        seconds.get(kind, 0.0) for kind in ("data", "compute", "straggler_wait", "transfer", "host")
    )
    return Parts(wall, data, compute, straggler, transfer, host, wall - data - compute - straggler - transfer - host)


def bubble(parts: NDArray[np.float64]) -> float:
    """1 - compute / wall over all ranks and steps; ``parts`` has shape ``[..., len(PART_NAMES)]``."""
    total = Parts(*parts.reshape(-1, len(PART_NAMES)).sum(axis=0))
    return float(1 - total.compute / total.wall) if total.wall else 0.0


def as_array(steps: list[Parts]) -> NDArray[np.float64]:
    """Shape ``[steps, len(PART_NAMES)]``."""
    return np.array([astuple(step) for step in steps]).reshape(-1, len(PART_NAMES))


def _exclusive(intervals: list[Interval], start: float, end: float) -> dict[str, float]:
    """Seconds per kind between ``start`` and ``end``; a pause covers whatever else goes on in it."""
    edges = sorted({start, end, *(t for _, _, a, b in intervals for t in (a, b) if start < t < end)})
    seconds: dict[str, float] = {}
    for left, right in zip(edges, edges[1:]):
        inside = [(kind == "pause", a, i, kind) for i, (kind, _, a, b) in enumerate(intervals) if a <= left and b >= right]
        kind = max(inside)[3] if inside else "host"
        seconds[kind] = seconds.get(kind, 0.0) + right - left
    return seconds
