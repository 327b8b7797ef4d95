"""A step as a row of laps, each ending in a collective: what a replay needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.intervals import COMPUTE, WAITS, Interval
from lightning_freescale.profiling.recording.records import ResolvedStep

COLUMNS = ("compute", "data", "other", "pause", "ahead", "transfer")
_KINDS = {**dict.fromkeys(COMPUTE, 0), "data": 1, "pause": 3}


@dataclass(frozen=True)
class RankSegments:
    """One rank's step.

    Attributes:
        start: when the step began, on rank 0's clock, pauses included.
        end: when it ended.
        keys: of the collectives this rank waited for, in that order.
        names: of the same.
        seconds: shape ``[collectives + 1, len(COLUMNS)]``. Before it is held up by a collective the rank spends ``compute``,
            ``data`` (waiting for data), ``other`` and ``pause`` seconds since it was held up before; it had done its part
            ``ahead`` seconds before that; the exchange is over ``transfer`` seconds after its last rank has arrived, less
            than zero where the ranks' clocks disagree. The last row is what follows the last collective.
    """

    start: float
    end: float
    keys: tuple[str, ...]
    names: tuple[str, ...]
    seconds: NDArray[np.float64]


def laps_of(step: ResolvedStep, last: Sequence[float], pieces: Sequence[Interval]) -> RankSegments:
    """One rank's step as laps; ``last`` is when the last rank arrived at each collective.

    What a rank does while it waits is its own time, as if it had begun to wait afterwards. The time from the end of an
    exchange to the moment at which the rank goes on is ``other`` of the next lap.
    """
    order = sorted(range(len(step.collectives)), key=lambda k: step.collectives[k].start)
    collectives = [step.collectives[k] for k in order]
    goes_on = np.minimum(np.maximum.accumulate([step.start, *(c.end for c in collectives)]), step.end)
    seconds = np.zeros((len(order) + 1, len(COLUMNS)))
    seconds[:, :4] = _work(pieces, np.append(goes_on, step.end))
    ready = goes_on + seconds[:, :4].sum(axis=1)
    for lap, (k, collective) in enumerate(zip(order, collectives)):
        over = min(collective.done, collective.end, step.end)
        seconds[lap, 4] = max(0.0, ready[lap] - collective.arrive)
        seconds[lap, 5] = over - last[k]
        seconds[lap + 1, 2] += max(0.0, goes_on[lap + 1] - max(ready[lap], over))
    return RankSegments(step.start, step.end, tuple(c.key for c in collectives), tuple(c.name for c in collectives), seconds)


def _work(pieces: Sequence[Interval], bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of each kind of work between one bound and the next, shape ``[len(bounds) - 1, 4]``."""
    work = [piece for piece in pieces if piece.kind not in WAITS]
    starts, ends = np.array([p.start for p in work]), np.array([p.end for p in work])
    shared = np.minimum(bounds[1:, None], ends) - np.maximum(bounds[:-1, None], starts)
    return np.clip(shared, 0, None) @ np.eye(4)[[_KINDS.get(p.kind, 2) for p in work]]
