"""The measured steps once more, with some of their durations altered.

The clocks of all ranks go through a schedule: each goes on when its own work and the exchange are done, whichever is later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.rank_window import COLUMNS, RankSegments

Floats = NDArray[np.float64]
_TRANSFER = COLUMNS.index("transfer")
_SEAM = 1e-6
"""Seconds between two steps that count as a gap."""
_WAITED = 0.05
"""A data wait of this share of a mean step is one for the loader's workers; taking over a batch that is there is shorter."""
_LEAST_WAITS = 30
"""Fewer do not show whether they depend on when a rank asks."""


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


@dataclass(frozen=True)
class RankClocks:
    """When each rank begins a row, when its own work in it is done, and when it ends it; shape ``[rows, ranks]`` each."""

    begin: Floats
    ready: Floats
    end: Floats

    @property
    def elapsed(self) -> Floats:
        """Seconds of each row, of shape ``[rows, ranks]``."""
        return self.end - self.begin


@dataclass(frozen=True)
class ArrivalPoints:
    """The moments ranks arrived, as points of their own work: they move with what comes before, not with what comes after.

    A point lies in ``row``, after the ``share`` of the work there and ``after`` seconds more (the rank was waiting then), but
    not after the row's end. ``own`` says of which rows this is the row itself, without a wait.
    """

    row: NDArray[np.intp]
    share: Floats
    after: Floats
    own: list[bool]

    @classmethod
    def from_clocks(cls, clocks: RankClocks, ahead: Floats, restarts: NDArray[np.intp]) -> ArrivalPoints:
        """Find where each rank was ``ahead`` seconds before it was ready.

        What came before the clocks were last set, at ``restarts``, keeps its distance to that.
        """
        arrived = clocks.ready - ahead
        rows = np.arange(len(ahead))
        row = np.repeat(rows[:, None], ahead.shape[1], axis=1)
        earliest = restarts[np.searchsorted(restarts, rows, side="right") - 1]
        for rank in np.flatnonzero((arrived < clocks.begin).any(axis=0)):
            early = np.flatnonzero(arrived[:, rank] < clocks.begin[:, rank])
            found = np.searchsorted(np.maximum.accumulate(clocks.end[:, rank]), arrived[early, rank])
            row[early, rank] = np.clip(found, earliest[early], early)
        begin = np.take_along_axis(clocks.begin, row, axis=0)
        work = np.take_along_axis(clocks.ready, row, axis=0) - begin
        share = np.clip((arrived - begin) / np.where(work > 0, work, 1.0), 0.0, 1.0) * (work > 0)
        after = arrived - begin - share * work
        own = (row == rows[:, None]).all(axis=1) & (np.abs(after) <= 1e-9).all(axis=1)
        return cls(row, share, np.where(own[:, None], 0.0, after), own.tolist())


@dataclass(frozen=True)
class BatchMoments:
    """When batches were there that loader workers make beside compute, as far as a rank waited for them.

    Workers begin a batch when one is taken that makes room for it, and go on whatever the rank does. So it is there ``lag``
    seconds after that of row ``source`` was taken, or at the moment ``lag`` where ``source`` is -1. A rank takes its batch at
    the beginning of a row; ``waited`` says where it waited for one. All of shape ``[rows, ranks]``.
    """

    waited: NDArray[np.bool_]
    source: NDArray[np.intp]
    lag: Floats

    @classmethod
    def from_clocks(cls, clocks: RankClocks, schedule: Schedule, restarts: NDArray[np.intp], prefetched: int) -> BatchMoments:
        """Find what was waited for; moments before the clocks were last set, at ``restarts``, are measured ones."""
        data, ranks = schedule.column("data"), np.arange(clocks.begin.shape[1])
        waited, source = np.zeros(data.shape, dtype=bool), np.full(data.shape, -1, dtype=np.intp)
        # a step takes one batch, in the row with its longest wait
        ends = np.append(schedule.first[1:], len(data))
        row = np.array([first + data[first:end].argmax(axis=0) for first, end in zip(schedule.first, ends)])
        long = data[row, ranks] > _WAITED * schedule.walls.mean()
        waited[row, ranks] = long
        set_at = restarts[np.searchsorted(restarts, row, side="right") - 1]
        source[row[prefetched:], ranks] = np.where(row[:-prefetched] >= set_at[prefetched:], row[:-prefetched], -1)
        taken = clocks.begin + data
        before = np.where(source >= 0, np.take_along_axis(taken, np.maximum(source, 0), axis=0), 0.0)
        since = clocks.begin[row[1:], ranks] - taken[row[:-1], ranks]
        both = long[1:] & long[:-1] & (row[:-1] >= set_at[1:])
        if _last_as_long_whenever_asked(np.where(both, since, np.nan), data[row[1:], ranks], float(schedule.walls.mean())):
            waited[:] = False  # a batch that is there, but takes long to be taken over
        return cls(waited, source, taken - before)

    def taken(self, at: int, begin: Floats, data: Floats, before: Floats) -> Floats:
        """Return when ranks that begin row ``at`` have its batch; ``before`` is when they took those of the rows before."""
        source = self.source[at]
        there = self.lag[at] + np.where(source >= 0, before[source, np.arange(len(source))], 0.0)
        return np.where(self.waited[at], np.maximum(begin, there), begin + data)


def _last_as_long_whenever_asked(since: Floats, data: Floats, step: float) -> bool:
    """Whether waits vary far less than the times at which a rank asks, as waits for a moment cannot.

    ``since`` is when it asks, after it took the batch before; not a number unless it waited for both. Where that hardly varies
    there is no telling, and waits are taken to be for a moment.
    """
    known = np.isfinite(since)
    count = known.sum(axis=0)

    def variance(values: Floats) -> float:
        mean = np.where(known, values, 0.0).sum(axis=0) / np.maximum(count, 1)
        return float((np.where(known, values - mean, 0.0) ** 2).sum() / max(count.sum(), 1))

    asked = variance(since)
    varies = count.sum() >= _LEAST_WAITS and asked > (_WAITED * step) ** 2
    return bool(varies and variance(data) < asked / 4)


def altered_clocks(
    work: Floats,
    transfer: Floats,
    arrivals: ArrivalPoints,
    measured: RankClocks,
    restarts: NDArray[np.intp],
    data: Floats,
    batches: BatchMoments | None = None,
) -> RankClocks:
    """Return the clocks with other durations; at ``restarts`` the clocks are set to the measured ones.

    ``data`` is the part of ``work`` that waits for data; where ``batches`` are waited for it is as long as these take.
    """
    work, ranks = work.copy(), np.arange(work.shape[1])
    taken = np.empty_like(work)
    some_wait: list[bool] = [] if batches is None else np.any(batches.waited, axis=1).tolist()

    def own(begin: Floats, at: int) -> Floats:
        if batches is not None:
            taken[at] = batches.taken(at, begin, data[at], taken) if some_wait[at] else begin + data[at]
            if some_wait[at]:
                work[at] += taken[at] - begin - data[at]
        return work[at]

    def arrive(clocks: RankClocks, at: int) -> Floats:
        if arrivals.own[at]:
            return clocks.begin[at] + arrivals.share[at] * work[at]
        row = arrivals.row[at]
        moment = clocks.begin[row, ranks] + arrivals.share[at] * work[row, ranks] + arrivals.after[at]
        return np.minimum(moment, clocks.end[row, ranks])

    return _play(own, transfer, {at: measured.begin[at] for at in restarts.tolist()}, arrive)


def own_seconds(schedule: Schedule) -> Floats:
    """Return what each rank does by itself in each row, pauses included."""
    return np.sum([schedule.column(name) for name in ("compute", "data", "other", "pause")], axis=0)


def _play(
    own: Callable[[Floats, int], Floats],
    transfer: Floats,
    starts: dict[int, Floats],
    arrive: Callable[[RankClocks, int], Floats],
) -> RankClocks:
    clocks = RankClocks(np.empty_like(transfer), np.empty_like(transfer), np.empty_like(transfer))
    member = np.isfinite(transfer)
    absent = np.where(member, 0.0, -np.inf)
    shared: list[bool] = np.any(member, axis=1).tolist()
    for at in range(len(transfer)):
        begin = starts[at] if at in starts else clocks.end[at - 1]
        clocks.begin[at] = begin
        clocks.ready[at] = clocks.end[at] = begin + own(begin, at)
        if shared[at]:
            last = (arrive(clocks, at) + absent[at]).max()
            np.maximum(clocks.ready[at], last + transfer[at], out=clocks.end[at])
    return clocks


class Replay:
    """Plays steps of all ranks again.

    A rank's clock takes at least the rank's own work, so no case but that without contention, which reduces compute, exceeds
    its limit. Clocks are sums, maxima and minima of durations, so none is later when durations shrink, and speed-ups are at
    least 1. Except where compute is evened out, which lengthens that of some ranks: it cannot hurt ranks that are alike in all
    else (the time is convex in their compute), but if the rank that computes less waits longer for data, it can. It counts as 1
    then, because it is optional.

    With ``prefetched`` batches, which loader workers make beside compute, a wait for data ends when the batch is there, however
    early the rank asks: time saved elsewhere is waited for data then. Without, the rank makes its batches, which takes as long
    as it took. How fast workers could be that no rank waited for is unknown.

    An exchange whose end was not seen apart from the wait counts as lasting until then, which errs on the side of less gain.

    Args:
        steps: consecutive steps, for each one :class:`RankSegments` per rank.
        prefetched: how many batches loader workers make ahead; 0 without workers, or if unknown.

    Attributes:
        error: how far the unaltered replay is from the measured wall times of the steps: mean distance / mean wall time.
        left_out: steps that are not replayed, because their ranks waited for collectives in orders that cannot be reconciled.
        unseen: there are workers, and most batches were there before they were asked for.
    """

    def __init__(self, steps: Sequence[Sequence[RankSegments]], prefetched: int = 0) -> None:
        self.schedule = schedule = Schedule.from_steps(steps)
        self.left_out, self.error, self.unseen = schedule.left_out, 0.0, False
        if not len(schedule.steps):
            return
        pauses, ahead = schedule.column("pause"), schedule.column("ahead")
        seams = schedule.first[schedule.seams]
        starts = dict(zip(seams.tolist(), schedule.starts[schedule.seams]))  # as measured, at every seam
        work, transfer = own_seconds(schedule), schedule.column("transfer")
        self._measured = _play(lambda _, at: work[at], transfer, starts, lambda clocks, at: clocks.ready[at] - ahead[at])
        walls = schedule.per_step(self._measured.elapsed - pauses)
        self.error = float(np.abs(walls - schedule.walls).sum() / schedule.walls.sum())
        self._wall = float(walls.sum())
        # the clocks are set to the measured ones after a gap between steps and where all ranks pause: what ranks do there
        # brings them together in its own way
        together = np.flatnonzero((pauses > 0).all(axis=1))
        self._restarts = np.union1d(seams, together)
        self._arrivals = ArrivalPoints.from_clocks(self._measured, ahead, self._restarts)
        self._batches = BatchMoments.from_clocks(self._measured, schedule, self._restarts, prefetched) if prefetched else None
        if self._batches is not None:
            self.unseen = bool(self._batches.waited.sum() < walls.size / 2)
        self.compute = schedule.per_step(schedule.column("compute"))
        """Seconds of each step on each rank, shape ``[steps, ranks]``."""

    def speed_up(self, compute: Floats | None = None, overlap: bool = False, data: bool = True, host: bool = True) -> float:
        """Return time of the run / time of the run as altered.

        Args:
            compute: seconds of each step on each rank instead of the measured ones, shape ``[steps, ranks]``.
            overlap: exchanges cost nothing, as far as the compute of the rank's step can hide them.
            data: ranks wait for data.
            host: there is host overhead, and time that nothing explains.
        """
        schedule = self.schedule
        before = schedule.column("compute")
        rows = before if compute is None else self._spread(compute)
        work = own_seconds(schedule) - before + rows
        for column, kept in (("data", data), ("other", host)):
            work = work if kept else work - schedule.column(column)
        transfer = schedule.column("transfer")
        if overlap:
            transfer = self._exposed(transfer, self.compute if compute is None else compute)
        waits = schedule.column("data") if data else np.zeros_like(work)
        batches = self._batches if data else None
        clocks = altered_clocks(work, transfer, self._arrivals, self._measured, self._restarts, waits, batches)
        return self._wall / float((clocks.elapsed - schedule.column("pause")).sum())

    def limit(self, compute: Floats) -> float:
        """Return time of the run / time of nothing but ``compute``."""
        return self._wall / float(compute.sum())

    def _spread(self, compute: Floats) -> Floats:
        """Over a step's rows as the measured compute is; a rank that had none computes at the end."""
        some = self.compute > 0
        factors = np.where(some, compute / np.where(some, self.compute, 1.0), 0.0)
        rows = self.schedule.column("compute") * self.schedule.per_row(factors)
        rows[np.append(self.schedule.first[1:], len(rows)) - 1] += np.where(some, 0.0, compute)
        return rows

    def _exposed(self, transfer: Floats, compute: Floats) -> Floats:
        lasting = np.maximum(transfer, 0.0)
        total = self.schedule.per_step(lasting)
        left = np.clip(1.0 - compute / np.where(total > 0, total, 1.0), 0.0, None)
        return np.where(transfer > 0, lasting * self.schedule.per_row(left), transfer)
