"""Replay the measured steps with altered durations.

The clocks of all ranks pass through a schedule. Each clock continues after the rank's own work and after the exchange.
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
"""Smallest gap between two steps, in seconds."""
_WAITED = 0.05
"""Share of a mean step above which a data wait is a wait for the loader's workers, and not the transfer of a ready batch."""
_LEAST_WAITS = 30
"""Number of waits needed to decide whether they depend on the time of the request."""


class Schedule:
    """The steps of all ranks as one table, from one :class:`RankSegments` per step and rank.

    A step has one row for each collective and one for the time after the last collective.

    Attributes:
        seconds: durations of the rows, see :class:`RankSegments`, shape ``[rows, ranks, len(COLUMNS)]``. ``transfer`` is minus
            infinity for ranks that do not take part.
        steps: indices of the included steps, without those whose ranks waited in orders that contradict each other.
        first: first row of each step.
        starts: starts of the steps, shape ``[steps, ranks]``.
        walls: wall times of the steps without pauses, same shape.
        seams: True for steps that do not directly follow the step before, so that the clocks restart.
    """

    def __init__(self, steps: Sequence[Sequence[RankSegments]]) -> None:
        tables = {k: table for k, step in enumerate(steps) if (table := _step_table(step)) is not None}
        kept, seconds = list(tables), list(tables.values())
        self.steps = np.array(kept, dtype=np.intp)
        self.starts = np.array([[rank.start for rank in steps[k]] for k in kept])
        ends = np.array([[rank.end for rank in steps[k]] for k in kept])
        pauses = np.array([table[..., COLUMNS.index("pause")].sum(axis=0) for table in seconds])
        self.walls = ends - self.starts - pauses
        self.seams = np.ones(len(kept), dtype=bool)
        if len(kept) > 1:
            self.seams[1:] = (np.abs(self.starts[1:] - ends[:-1]) > _SEAM).any(axis=1)
        self.first = np.cumsum([0, *(len(table) for table in seconds)])[:-1]
        self.seconds = np.concatenate(seconds) if seconds else np.zeros((0, 0, len(COLUMNS)))

    def column(self, name: str) -> Floats:
        """Return a column of ``COLUMNS``, shape ``[rows, ranks]``."""
        return self.seconds[..., COLUMNS.index(name)]

    def per_step(self, rows: Floats) -> Floats:
        """Return the sums over the rows of each step, shape ``[steps, ranks]``."""
        return np.add.reduceat(rows, self.first, axis=0)

    def per_row(self, steps: Floats) -> Floats:
        """Repeat the values of each step for all of its rows."""
        return np.repeat(steps, np.diff(np.append(self.first, len(self.seconds))), axis=0)


def _step_table(step: Sequence[RankSegments]) -> Floats | None:
    """Return a step's rows; None if no order of the collectives agrees with every rank."""
    order = _common_order([rank.keys for rank in step])
    if order is None:
        return None
    if all(len(rank.keys) == len(order) and list(rank.keys) == order for rank in step):
        table = np.stack([rank.seconds for rank in step], axis=1)  # the usual case, and ten times as fast
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
    """The begin of each row, the end of the rank's own work in it, and the end of the row; each of shape ``[rows, ranks]``."""

    begin: Floats
    ready: Floats
    end: Floats

    @property
    def elapsed(self) -> Floats:
        """The duration of each row, shape ``[rows, ranks]``."""
        return self.end - self.begin


class ArrivalPoints:
    """The arrivals as points in the ranks' own work, which move with the work before them.

    The arrivals are ``ahead`` seconds before each rank was ready. A point lies in ``row``, after the ``share`` of the work of
    that row and ``after`` more seconds, during which the rank waited, but not after the end of the row. It does not pass the
    last of the ``restarts``. ``own`` is True for rows whose points lie in the row itself, without a wait.
    """

    def __init__(self, clocks: RankClocks, ahead: Floats, restarts: NDArray[np.intp]) -> None:
        arrived = clocks.ready - ahead
        rows = np.arange(len(ahead))
        self.row = row = np.repeat(rows[:, None], ahead.shape[1], axis=1)
        earliest = restarts[np.searchsorted(restarts, rows, side="right") - 1]
        for rank in np.flatnonzero((arrived < clocks.begin).any(axis=0)):
            early = np.flatnonzero(arrived[:, rank] < clocks.begin[:, rank])
            found = np.searchsorted(np.maximum.accumulate(clocks.end[:, rank]), arrived[early, rank])
            row[early, rank] = np.clip(found, earliest[early], early)
        begin = np.take_along_axis(clocks.begin, row, axis=0)
        work = np.take_along_axis(clocks.ready, row, axis=0) - begin
        self.share = np.clip((arrived - begin) / np.where(work > 0, work, 1.0), 0.0, 1.0) * (work > 0)
        after = arrived - begin - self.share * work
        own = (row == rows[:, None]).all(axis=1) & (np.abs(after) <= 1e-9).all(axis=1)
        self.after = np.where(own[:, None], 0.0, after)
        self.own: list[bool] = own.tolist()


class BatchMoments:
    """The times at which batches of loader workers were ready, if a rank waited for them. All of shape ``[rows, ranks]``.

    Workers start a batch when another one is taken, independently of the rank's work. So a batch is ready ``lag`` seconds after
    the batch of row ``source`` was taken, or at the time ``lag`` if ``source`` is -1. A rank takes its batch at the beginning
    of a row; ``waited`` is True where it waited. Times before the last of the ``restarts`` are as measured.
    """

    def __init__(self, clocks: RankClocks, schedule: Schedule, restarts: NDArray[np.intp], prefetched: int) -> None:
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
            waited[:] = False  # the batches were ready, but slow to transfer
        self.waited, self.source, self.lag = waited, source, taken - before

    def taken(self, at: int, begin: Floats, data: Floats, before: Floats) -> Floats:
        """Return the time at which ranks have the batch of row ``at``; ``before`` has the times of the earlier rows."""
        source = self.source[at]
        there = self.lag[at] + np.where(source >= 0, before[source, np.arange(len(source))], 0.0)
        return np.where(self.waited[at], np.maximum(begin, there), begin + data)


def _last_as_long_whenever_asked(since: Floats, data: Floats, step: float) -> bool:
    """Return True if the waits vary much less than the times of the requests, which waits for a fixed time cannot.

    ``since`` is the time of a request after the batch before was taken; not a number unless the rank waited for both. If it
    hardly varies, the waits count as waits for a fixed time.
    """
    known = np.isfinite(since)
    count = known.sum(axis=0)

    def variance(values: Floats) -> float:
        mean = np.where(known, values, 0.0).sum(axis=0) / np.maximum(count, 1)
        return float((np.where(known, values - mean, 0.0) ** 2).sum() / max(count.sum(), 1))

    asked = variance(since)
    varies = count.sum() >= _LEAST_WAITS and asked > (_WAITED * step) ** 2
    return bool(varies and variance(data) < asked / 4)


def own_seconds(schedule: Schedule) -> Floats:
    """Return the seconds of each rank's own work in each row, pauses included."""
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
    """Replays the steps of all ranks.

    A rank's clock takes at least the rank's own work, so no speed-up exceeds the limit. Clocks are sums, maxima and minima of
    durations, so shorter durations give speed-ups of at least 1. Equal compute is an exception, because it lengthens the
    compute of some ranks. It cannot hurt ranks that are equal otherwise (the time is convex in their compute), but it can if
    the rank that computes less waits longer for data. Then it counts as 1.

    With ``prefetched`` batches of loader workers, a wait for data ends when the batch is ready, so time saved elsewhere may be
    spent waiting for data. Without workers, a batch takes the rank the measured time. The speed of workers that no rank waited
    for is unknown.

    An exchange whose end was not observed separately counts until the end of the wait, which underestimates the gain.

    Args:
        steps: consecutive steps with one :class:`RankSegments` per rank.
        prefetched: number of batches that loader workers prepare in advance; 0 without workers, or if unknown.

    Attributes:
        error: mean deviation of the unaltered replay from the measured wall times / mean wall time.
        unseen: True if there are workers, and most batches were ready before a rank asked for them.
        compute: seconds of each step on each rank, shape ``[steps, ranks]``.
    """

    def __init__(self, steps: Sequence[Sequence[RankSegments]], prefetched: int = 0) -> None:
        self.schedule = schedule = Schedule(steps)
        self.error, self.unseen = 0.0, False
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
        # the clocks restart at the measured times after a gap between steps and in a common pause, because the work there
        # synchronizes the ranks in a way that is not recorded
        together = np.flatnonzero((pauses > 0).all(axis=1))
        self._restarts = np.union1d(seams, together)
        self._arrivals = ArrivalPoints(self._measured, ahead, self._restarts)
        self._batches = BatchMoments(self._measured, schedule, self._restarts, prefetched) if prefetched else None
        if self._batches is not None:
            self.unseen = bool(self._batches.waited.sum() < walls.size / 2)
        self.compute = schedule.per_step(schedule.column("compute"))

    def speed_up(self, compute: Floats | None = None, overlap: bool = False, data: bool = True, host: bool = True) -> float:
        """Return the time of the run / the time of the altered run.

        Args:
            compute: seconds of each step on each rank in place of the measured ones, shape ``[steps, ranks]``.
            overlap: compute hides exchanges as far as the compute of the rank's step allows.
            data: False removes waits for data.
            host: False removes host overhead and unexplained time.
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
        clocks = self._altered(work, transfer, waits, self._batches if data else None)
        return self._wall / float((clocks.elapsed - schedule.column("pause")).sum())

    def _altered(self, work: Floats, transfer: Floats, data: Floats, batches: BatchMoments | None) -> RankClocks:
        """Return the clocks with altered durations, which restart at the measured times.

        ``data`` is the part of ``work`` that waits for data. Waits for ``batches`` last until these are ready.
        """
        arrivals, work, ranks = self._arrivals, work.copy(), np.arange(work.shape[1])
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

        return _play(own, transfer, {at: self._measured.begin[at] for at in self._restarts.tolist()}, arrive)

    def limit(self, compute: Floats) -> float:
        """Return the time of the run / the time of ``compute`` alone."""
        return self._wall / float(compute.sum())

    def _spread(self, compute: Floats) -> Floats:
        """Distribute compute over a step's rows like the measured compute; a rank without any computes at the end."""
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
