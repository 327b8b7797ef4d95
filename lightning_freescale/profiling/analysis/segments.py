"""Steps as segments between collectives, of one rank and, in an order that all ranks kept, of all: what a replay needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.intervals import COMPUTE, WAITS, Interval
from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedStep

COLUMNS = ("compute", "data", "other", "pause", "ahead", "transfer")
Floats = NDArray[np.float64]
_KINDS = {**dict.fromkeys(COMPUTE, 0), "data": 1, "pause": 3}
_TRANSFER = COLUMNS.index("transfer")
_TOGETHER = 1e-3
"""Seconds between waits that follow each other as fast as a loop over them does, on a machine that is busy."""
_SEAM = 1e-6
"""Seconds between two steps that count as a gap."""


@dataclass(frozen=True)
class RankSegments:
    """One rank's step.

    Attributes:
        start: when the step began, on rank 0's clock, pauses included.
        end: when it ended.
        keys: of the collectives this rank waited for, in that order.
        seconds: shape ``[collectives + 1, len(COLUMNS)]``. Before it is held up by a collective the rank spends ``compute``,
            ``data`` (waiting for data), ``other`` and ``pause`` seconds since it was held up before; it had done its part
            ``ahead`` seconds before that; the exchange is over ``transfer`` seconds after its last rank has arrived, less
            than zero where the ranks' clocks disagree. The last row is what follows the last collective.
    """

    start: float
    end: float
    keys: tuple[str, ...]
    seconds: Floats


def segments_of(step: ResolvedStep, last: Sequence[float], intervals: Sequence[Interval]) -> RankSegments:
    """Return one rank's step as segments; ``last`` is when the last rank arrived at each collective.

    What a rank does while it waits is its own time, as if it had begun to wait afterwards. The time from the end of an
    exchange to the moment at which the rank goes on is ``other`` of the next segment.
    """
    order = _in_order(step.collectives)
    collectives = [step.collectives[k] for k in order]
    goes_on = np.minimum(np.maximum.accumulate([step.start, *(c.end for c in collectives)]), step.end)
    seconds = np.zeros((len(order) + 1, len(COLUMNS)))
    seconds[:, :4] = _work(intervals, np.append(goes_on, step.end))
    ready = goes_on + seconds[:, :4].sum(axis=1)
    for row, (k, collective) in enumerate(zip(order, collectives)):
        over = min(collective.done, collective.end, step.end)
        seconds[row, 4] = max(0.0, ready[row] - collective.arrive)
        seconds[row, 5] = over - last[k]
        seconds[row + 1, 2] += max(0.0, goes_on[row + 1] - max(ready[row], over))
    return RankSegments(step.start, step.end, tuple(c.key for c in collectives), seconds)


def _in_order(collectives: Sequence[ResolvedCollective]) -> list[int]:
    """Return the order in which a rank is held up: that of its waits, but for messages that it waits for together.

    Of these, all under way before the first wait, one rank waits for the sent one first and the other for the received one,
    which is the same one; in the order of their keys both agree.
    """
    order: list[int] = []
    together: list[int] = []
    for k in sorted(range(len(collectives)), key=lambda k: collectives[k].start):
        one, first = collectives[k], collectives[together[0]] if together else None
        if first is None or not (
            one.is_message and one.arrive <= first.start and one.start - collectives[together[-1]].end <= _TOGETHER
        ):
            order += sorted(together, key=lambda k: collectives[k].place)
            together = []
        if one.is_message:
            together.append(k)
        else:
            order.append(k)
    return order + sorted(together, key=lambda k: collectives[k].place)


def _work(intervals: Sequence[Interval], bounds: Floats) -> Floats:
    """Seconds of each kind of work between one bound and the next, shape ``[len(bounds) - 1, 4]``."""
    work = [interval for interval in intervals if interval.kind not in WAITS]
    starts = np.array([interval.start for interval in work])
    ends = np.array([interval.end for interval in work])
    shared = np.minimum(bounds[1:, None], ends) - np.maximum(bounds[:-1, None], starts)
    return np.clip(shared, 0, None) @ np.eye(4)[[_KINDS.get(interval.kind, 2) for interval in work]]


@dataclass(frozen=True)
class Schedule:
    """Many steps of many ranks as one table.

    Rows are collectives and, after those of each step, what follows its last one. A rank that has no part in it passes.

    Attributes:
        seconds: of a row's segments, see :class:`RankSegments`; shape ``[rows, ranks, len(COLUMNS)]``; ``transfer`` is minus
            infinity for ranks without a part.
        steps: which of the steps given are in it.
        first: the first row of each of these.
        starts: when they began, shape ``[steps, ranks]``.
        walls: how long they took, without pauses, same shape.
        seams: of which of them the clocks must be read anew, because they do not follow the step before at once.
        left_out: steps whose ranks waited for their collectives in orders that cannot be reconciled.
    """

    seconds: Floats
    steps: NDArray[np.intp]
    first: NDArray[np.intp]
    starts: Floats
    walls: Floats
    seams: NDArray[np.bool_]
    left_out: int

    @classmethod
    def from_steps(cls, steps: Sequence[Sequence[RankSegments]]) -> Schedule:
        """Put steps into one table, from one :class:`RankSegments` per rank for every step."""
        tables = {k: table for k, step in enumerate(steps) if (table := _step_table(step)) is not None}
        kept, seconds = list(tables), list(tables.values())
        starts = np.array([[rank.start for rank in steps[k]] for k in kept])
        ends = np.array([[rank.end for rank in steps[k]] for k in kept])
        pauses = np.array([table[..., COLUMNS.index("pause")].sum(axis=0) for table in seconds])
        seams = np.ones(len(kept), dtype=bool)
        if len(kept) > 1:
            seams[1:] = (np.abs(starts[1:] - ends[:-1]) > _SEAM).any(axis=1)
        first = np.cumsum([0, *(len(table) for table in seconds)])[:-1]
        table = np.concatenate(seconds) if seconds else np.zeros((0, 0, len(COLUMNS)))
        return cls(table, np.array(kept, dtype=np.intp), first, starts, ends - starts - pauses, seams, len(steps) - len(kept))

    def column(self, name: str) -> Floats:
        """Return one of ``COLUMNS``, shape ``[rows, ranks]``."""
        return self.seconds[..., COLUMNS.index(name)]

    def per_step(self, rows: Floats) -> Floats:
        """Return sums over the rows of each step, shape ``[steps, ranks]``."""
        return np.add.reduceat(rows, self.first, axis=0)

    def per_row(self, steps: Floats) -> Floats:
        """Return each step's values for all of its rows."""
        return np.repeat(steps, np.diff(np.append(self.first, len(self.seconds))), axis=0)


def _step_table(step: Sequence[RankSegments]) -> Floats | None:
    """Return a step's rows; None if there is no order of the collectives that every rank kept."""
    order = _common_order([rank.keys for rank in step])
    if order is None:
        return None
    if all(len(rank.keys) == len(order) and list(rank.keys) == order for rank in step):
        table = np.stack([rank.seconds for rank in step], axis=1)  # as almost always, and ten times as fast
    else:
        row = {key: at for at, key in enumerate(order)}
        table = np.zeros((len(order) + 1, len(step), len(COLUMNS)))
        table[..., _TRANSFER] = -np.inf
        for at, rank in enumerate(step):
            table[[*(row[key] for key in rank.keys), -1], at] = rank.seconds
    table[-1, :, _TRANSFER] = -np.inf
    return table


def _common_order(ranks: Sequence[Sequence[str]]) -> list[str] | None:
    if all(keys == ranks[0] for keys in ranks) and len(set(ranks[0])) == len(ranks[0]):
        return list(ranks[0])
    graph: TopologicalSorter[str] = TopologicalSorter()
    for keys in ranks:
        for key, before in zip(keys, (None, *keys)):
            graph.add(key, *(() if before is None else (before,)))
    try:
        return list(graph.static_order())
    except CycleError:
        return None
