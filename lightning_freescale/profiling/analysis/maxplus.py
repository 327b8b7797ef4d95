"""The clocks of all ranks through a schedule: each goes on when its own work and the exchange are done, whichever is later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.schedule import Schedule

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Clocks:
    """Of every rank when it begins a row, when its own work in it is done and when it ends it; shape ``[rows, ranks]`` each."""

    begin: Floats
    ready: Floats
    end: Floats

    @property
    def elapsed(self) -> Floats:
        """Seconds of each row, shape ``[rows, ranks]``."""
        return self.end - self.begin


@dataclass(frozen=True)
class Arrivals:
    """The moment a rank arrived, as a point of its own work: it moves with what comes before it, not with what comes after.

    It lies in ``row``, after the ``share`` of the work there and ``after`` seconds more (it was waiting then), but not after
    the row's end. ``own`` says of which rows this is the row itself, without a wait.
    """

    row: NDArray[np.intp]
    share: Floats
    after: Floats
    own: list[bool]

    @classmethod
    def of(cls, clocks: Clocks, ahead: Floats, restarts: NDArray[np.intp]) -> Arrivals:
        """Where each rank was ``ahead`` seconds before it was ready.

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


def measured_clocks(schedule: Schedule) -> Clocks:
    """The run as it was: nothing is altered, and the clocks are set by the measured starts at every seam."""
    ahead = schedule.column("ahead")
    seams = np.flatnonzero(schedule.seams)
    starts = dict(zip(schedule.first[seams].tolist(), schedule.starts[seams]))
    work, transfer = own_seconds(schedule), schedule.column("transfer")
    return _run(work, transfer, starts, lambda clocks, at: clocks.ready[at] - ahead[at])


def altered_clocks(work: Floats, transfer: Floats, arrivals: Arrivals, measured: Clocks, restarts: NDArray[np.intp]) -> Clocks:
    """The same with other durations; at ``restarts`` the clocks are set to the measured ones."""
    ranks = np.arange(work.shape[1])

    def arrive(clocks: Clocks, at: int) -> Floats:
        if arrivals.own[at]:
            return clocks.begin[at] + arrivals.share[at] * work[at]
        row = arrivals.row[at]
        moment = clocks.begin[row, ranks] + arrivals.share[at] * work[row, ranks] + arrivals.after[at]
        return np.minimum(moment, clocks.end[row, ranks])

    return _run(work, transfer, {at: measured.begin[at] for at in restarts.tolist()}, arrive)


def own_seconds(schedule: Schedule) -> Floats:
    """What each rank does by itself in each row, pauses included."""
    return np.sum([schedule.column(name) for name in ("compute", "data", "other", "pause")], axis=0)


def _run(work: Floats, transfer: Floats, starts: dict[int, Floats], arrive: Callable[[Clocks, int], Floats]) -> Clocks:
    clocks = Clocks(np.empty_like(work), np.empty_like(work), np.empty_like(work))
    member = np.isfinite(transfer)
    absent = np.where(member, 0.0, -np.inf)
    shared: list[bool] = np.any(member, axis=1).tolist()
    for at in range(len(work)):
        begin = starts[at] if at in starts else clocks.end[at - 1]
        clocks.begin[at] = begin
        clocks.ready[at] = clocks.end[at] = begin + work[at]
        if shared[at]:
            last = (arrive(clocks, at) + absent[at]).max()
            np.maximum(clocks.ready[at], last + transfer[at], out=clocks.end[at])
    return clocks
