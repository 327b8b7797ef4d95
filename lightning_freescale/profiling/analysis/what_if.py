"""What would the run have taken if ...? The measured steps once more, with some of their durations altered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.contention import Contention
from lightning_freescale.profiling.analysis.maxplus import Arrivals, altered_clocks, measured_clocks, own_seconds
from lightning_freescale.profiling.analysis.schedule import Schedule
from lightning_freescale.profiling.analysis.segments import RankSegments

Floats = NDArray[np.float64]
_WORTH_A_NOTE = 0.01
"""Share of the time that the reader should know of."""


@dataclass(frozen=True)
class WhatIf:
    """How much faster the run would be.

    Attributes:
        name: without what.
        speed_up: time of the run / time of the run without it, at least 1.
        limit: what no change of this kind can exceed, 1 / (1 - bubble); without contention, compute that it adds counts as
            lost, too.
        note: what the reader should know of the figure.
    """

    name: str
    speed_up: float | None
    limit: float | None
    note: str | None = None


class Replay:
    """Plays steps of all ranks again.

    A rank's clock never goes back, and takes at least the rank's own work. So the ranks' mean time is at least their mean
    compute, which no case but that without contention reduces: no speed-up exceeds its limit. Clocks are built from durations
    by sums, maxima and minima, so none is ever later when durations shrink, and speed-ups are at least 1, except where compute
    is evened out, which lengthens that of some ranks. Without minima (see :class:`Arrivals`) the time is convex in the ranks'
    compute, so evening it out cannot hurt if the ranks are alike in all else: no mean of times is below the time of the mean.
    If they are not (the rank that computes less waits longer for data), it can, and then counts as 1: nobody has to do it.

    After a gap between steps, and where all ranks pause, the clocks are set to the measured ones: what ranks do there
    brings them together in its own way. An exchange whose end was not seen apart from the wait counts as lasting until then,
    which errs on the side of less gain.

    Args:
        steps: consecutive steps, for each one :class:`RankSegments` per rank.

    Attributes:
        error: how far the unaltered replay is from the measured wall times of the steps: mean distance / mean wall time.
        left_out: steps that are not replayed, because their ranks waited for collectives in orders that cannot be reconciled.
    """

    def __init__(self, steps: Sequence[Sequence[RankSegments]]) -> None:
        self.schedule = schedule = Schedule.of(steps)
        self.left_out, self.error = schedule.left_out, 0.0
        if not len(schedule.steps):
            return
        self._measured = measured_clocks(schedule)
        pauses = schedule.column("pause")
        walls = schedule.per_step(self._measured.elapsed - pauses)
        self.error = float(np.abs(walls - schedule.walls).sum() / schedule.walls.sum())
        self._wall = float(walls.sum())
        together = np.flatnonzero((pauses > 0).all(axis=1))
        self._restarts = np.union1d(schedule.first[schedule.seams], together)
        self._arrivals = Arrivals.of(self._measured, schedule.column("ahead"), self._restarts)
        self.compute = schedule.per_step(schedule.column("compute"))
        """Seconds of each step on each rank, shape ``[steps, ranks]``."""

    def speed_up(self, compute: Floats | None = None, overlap: bool = False, data: bool = True) -> float:
        """Time of the run / time of the run as altered.

        Args:
            compute: seconds of each step on each rank instead of the measured ones, shape ``[steps, ranks]``.
            overlap: exchanges cost nothing, as far as the compute of the rank's step can hide them.
            data: ranks wait for data.
        """
        schedule = self.schedule
        before = schedule.column("compute")
        rows = before if compute is None else self._spread(compute)
        work = own_seconds(schedule) - before + rows - (0.0 if data else schedule.column("data"))
        transfer = schedule.column("transfer")
        if overlap:
            transfer = self._exposed(transfer, self.compute if compute is None else compute)
        clocks = altered_clocks(work, transfer, self._arrivals, self._measured, self._restarts)
        return self._wall / float((clocks.elapsed - schedule.column("pause")).sum())

    def limit(self, compute: Floats) -> float:
        """Time of the run / time of nothing but ``compute``."""
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


def what_if(
    steps: Sequence[Sequence[RankSegments]], contention: Contention | None = None, hidden: Floats | None = None
) -> tuple[WhatIf, ...]:
    """How much faster the steps would be without each kind of bubble; nothing if no rank computes in them.

    Args:
        steps: consecutive steps, for each one :class:`RankSegments` per rank.
        contention: what exchanges under way do to compute; left out if not given.
        hidden: seconds of compute behind which an exchange was under way, shape ``[steps, ranks]``; needed with contention.

    Raises:
        ValueError: contention without ``hidden``.
    """
    if contention is not None and (hidden is None or hidden.shape[:1] != (len(steps),)):
        given = None if hidden is None else hidden.shape
        raise ValueError(f"what_if(contention, hidden={given}) of {len(steps)} steps: pass hidden seconds [steps, ranks]")
    replay = Replay(steps)
    if not len(replay.schedule.steps) or not replay.compute.sum():
        return ()
    cases = _balance_and_overlap(replay)
    cases.append(WhatIf("no data wait", replay.speed_up(data=False), replay.limit(replay.compute)))
    if contention is not None and hidden is not None:
        cases.append(_without(contention, replay, hidden[replay.schedule.steps]))
    return tuple(_bounded(case, replay.error) for case in cases)


def _balance_and_overlap(replay: Replay) -> list[WhatIf]:
    even = np.broadcast_to(replay.compute.mean(axis=1, keepdims=True), replay.compute.shape)
    balance, overlap, both = replay.speed_up(even), replay.speed_up(overlap=True), replay.speed_up(even, overlap=True)
    longer = 1 / balance - 1
    worse = f"equal compute would take {longer:.1%} longer: ranks that compute less lose time elsewhere"
    limit = replay.limit(replay.compute)
    return [
        WhatIf("perfect balance", balance, limit, worse if longer > _WORTH_A_NOTE else None),
        WhatIf("full overlap", overlap, limit),
        WhatIf("both", max(both, overlap), limit),
    ]


def _without(contention: Contention, replay: Replay, hidden: Floats) -> WhatIf:
    if not contention.share:
        return WhatIf("no contention", 1.0, replay.limit(replay.compute), contention.reason)
    compute = replay.compute - contention.share * hidden
    note = f"exchanges under way take {contention.share:.0%} of the compute beside them, which the limit counts as lost, too"
    return WhatIf("no contention", replay.speed_up(compute), replay.limit(compute), note)


def _bounded(case: WhatIf, error: float) -> WhatIf:
    """Rounding and harm apart, every speed-up is between 1 and its limit; see :class:`Replay`."""
    off = f"the replay of the run as it was is {error:.1%} off" if error > _WORTH_A_NOTE else None
    note = "; ".join(text for text in (case.note, off) if text) or None
    assert case.speed_up is not None
    assert case.limit is not None
    return WhatIf(case.name, min(max(case.speed_up, 1.0), case.limit), case.limit, note)
