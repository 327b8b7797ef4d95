"""Many steps of many ranks as one table: a row for every collective, in an order that all ranks kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.segments import COLUMNS, RankSegments

Floats = NDArray[np.float64]
_TRANSFER = COLUMNS.index("transfer")
_SEAM = 1e-6
"""Seconds between two steps that count as a gap."""


@dataclass(frozen=True)
class Schedule:
    """Rows are collectives and, after those of each step, what follows its last one. A rank that has no part in it passes.

    Attributes:
        seconds: a row's laps, see :class:`~lightning_freescale.profiling.analysis.segments.RankSegments`; shape
            ``[rows, ranks, len(COLUMNS)]``; ``transfer`` is minus infinity for ranks without a part.
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
    def of(cls, steps: Sequence[Sequence[RankSegments]]) -> Schedule:
        """For every step one :class:`RankSegments` per rank."""
        tables = [_table(step) for step in steps]
        kept = [k for k, table in enumerate(tables) if table is not None]
        seconds = [table for table in tables if table is not None]
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
        """One of ``COLUMNS``, shape ``[rows, ranks]``."""
        return self.seconds[..., COLUMNS.index(name)]

    def per_step(self, rows: Floats) -> Floats:
        """Sums over the rows of each step, shape ``[steps, ranks]``."""
        return np.add.reduceat(rows, self.first, axis=0)

    def per_row(self, steps: Floats) -> Floats:
        """Each step's values for all of its rows."""
        return np.repeat(steps, np.diff(np.append(self.first, len(self.seconds))), axis=0)


def _table(step: Sequence[RankSegments]) -> Floats | None:
    """None if there is no order of the collectives that every rank kept."""
    order = _common_order([rank.keys for rank in step])
    if order is None:
        return None
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
