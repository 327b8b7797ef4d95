"""Split the wall time of every rank's step into its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.intervals import COMPUTE, Interval, flights_of, hidden_seconds, intervals_of, told
from lightning_freescale.profiling.recording.records import ResolvedStep


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of one rank's step. All but ``wall`` and ``hidden`` add up to ``wall``; ``unexplained`` is what is left over.

    ``hidden`` is the time of compute behind which an exchange was under way.
    """

    wall: float
    data_wait: float
    forward: float
    backward: float
    optimizer: float
    straggler_wait: float
    transfer: float
    wait: float
    host_overhead: float
    unexplained: float
    hidden: float

    @property
    def compute(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward + self.backward + self.optimizer


PART_NAMES = tuple(f.name for f in fields(StepBreakdown))
ADDENDS = PART_NAMES[1:-1]
"""The parts that add up to the wall time."""


def attribute(step: ResolvedStep, last: Sequence[float] | None, pieces: Sequence[Interval] | None = None) -> StepBreakdown:
    """The parts of one rank's step; ``last`` is when the last rank arrived at each of the step's collectives.

    While a rank waits for a collective, the time until the last rank has arrived is straggler wait, the rest transfer.
    """
    cut = intervals_of(step, last) if pieces is None else pieces
    seconds: dict[str, float] = {}
    for piece in cut:
        kind, _ = told(piece)
        seconds[kind] = seconds.get(kind, 0.0) + piece.end - piece.start
    wall = step.end - step.start - seconds.get("pause", 0.0)
    data, forward, backward, optimizer, straggler, transfer, wait, host = (
        seconds.get(kind, 0.0) for kind in ("data", *COMPUTE, "straggler_wait", "transfer", "wait", "host")
    )
    rest = wall - data - forward - backward - optimizer - straggler - transfer - wait - host
    hidden = hidden_seconds(flights_of(step), cut)
    return StepBreakdown(wall, data, forward, backward, optimizer, straggler, transfer, wait, host, rest, hidden)


def bubble(parts: NDArray[np.float64]) -> float:
    """1 - compute / wall over all ranks and steps; ``parts`` has shape ``[..., len(PART_NAMES)]``."""
    total = StepBreakdown(*parts.reshape(-1, len(PART_NAMES)).sum(axis=0))
    return float(1 - total.compute / total.wall) if total.wall else 0.0


def as_array(steps: Sequence[StepBreakdown]) -> NDArray[np.float64]:
    """Shape ``[steps, len(PART_NAMES)]``."""
    return np.array([list(vars(step).values()) for step in steps]).reshape(-1, len(PART_NAMES))


def column(parts: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """One part of an array of parts, ``"compute"`` included; its last axis is gone."""
    if name == "compute":
        first = PART_NAMES.index(COMPUTE[0])
        return parts[..., first : first + len(COMPUTE)].sum(axis=-1)
    return parts[..., PART_NAMES.index(name)]
