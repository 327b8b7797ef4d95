"""From what this rank recorded to what all ranks know of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from lightning_freescale.profiling.analysis.bandwidth import Bandwidth
from lightning_freescale.profiling.analysis.intervals import wall_of
from lightning_freescale.profiling.analysis.rank_window import RankWindow, window_of
from lightning_freescale.profiling.clock_sync.alignment import Alignment
from lightning_freescale.profiling.collection.gather import arrivals_of, last_arrivals, to_all, to_rank_zero
from lightning_freescale.profiling.options import Options
from lightning_freescale.profiling.recording.clocks import Clock
from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.facts import WaitAttribution

_TOO_UNCERTAIN = 0.02
"""Share of a step's wall time by which clocks may disagree before arrivals are of no use."""
_FIRST_SYNC, _SYNC_EVERY = 5.0, 60.0
"""Seconds until the ranks compare their clocks again, twice as long each time, up to the second."""
_ROUNDS = 12
"""Of a comparison while training goes on: it takes a few milliseconds."""


class RankExchange:
    """Splits the waits of every rank's steps, by arrivals that the ranks tell each other, or by bandwidth.

    Args:
        group: of all ranks, for nobody else; None if there is one rank.
        clock: of the stamps.
        options: how to split.

    Attributes:
        alignment: from this rank's clock to rank 0's.
        spent_here: processor seconds that exchanges have taken on this rank, for its caller to say.
        spent: the most of any rank, as of the last exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None, clock: Clock, options: Options) -> None:
        self.group, self.alignment = group, Alignment()
        self.spent_here = self.spent = 0.0
        self._clock, self._options = clock, options
        self._uncertainty = self._unsplit = 0.0
        self._sync_after, self._sync_due = _FIRST_SYNC, False
        self._steps = self._by_bandwidth = 0
        self._clocks: Sequence[Mapping[str, float]] = ()
        self._bandwidth: Bandwidth | None = None
        self._reason: str | None = None
        self.sync()

    def sync(self, idle: bool = True) -> None:
        """Compare the clocks of all ranks; the device's with the host's if nothing runs. Collective."""
        if idle:
            self._clock.tie()
        self.alignment.sync(self.group, *(() if idle else (_ROUNDS,)))
        self._synced, self._sync_due = time.perf_counter(), False

    def sync_if_due(self, idle: bool = True) -> None:
        """Where all ranks are between two steps. Collective."""
        if self._sync_due:
            self.sync(idle)

    def together(self, steps: Sequence[ResolvedStep], features: Sequence[Any]) -> list[RankWindow] | None:
        """The same steps of all ranks on rank 0; None on the others. Collective."""
        now = time.perf_counter()
        self._steps += len(steps)
        wall = sum(map(wall_of, steps)) / len(steps)
        due = not self._sync_due and now - self._synced > self._sync_after
        here, uncertainty = [arrivals_of(step) for step in steps], self.alignment.uncertainty_at(now)
        mine = here, uncertainty, wall, due, self.spent_here, self.alignment.figures()
        arrivals, uncertain, walls, all_due, spent, clocks = zip(*to_all(mine, self.group))
        self.spent, self._clocks = max(spent), clocks
        reason = self._why_not_by_clocks(max(uncertain), float(np.mean(walls)))
        if reason is None:
            last = [last_arrivals(step, same) for step, same in zip(steps, zip(*arrivals))]
            window = window_of(steps, last, features, alone=self.group is None)
            self._uncertainty = max(self._uncertainty, *uncertain)
        else:
            window = self.alone(steps, features, reason)
        windows = to_rank_zero(window, self.group)
        self.sync_if_due(idle=False)  # since the exchange before: no epoch has ended meanwhile
        if all_due[0]:
            self._sync_due, self._sync_after = True, min(2 * self._sync_after, _SYNC_EVERY)
        return windows

    def alone(self, steps: Sequence[ResolvedStep], features: Sequence[Any], reason: str) -> RankWindow:
        """This rank's steps as it sees them, their waits split by bandwidth."""
        bandwidth = Bandwidth.of_steps(steps, self._options.link_bandwidth)
        if bandwidth.bytes_per_second is None and self._bandwidth is not None:
            bandwidth = self._bandwidth  # too few exchanges tell it, as at the end of a run; those before did
        self._bandwidth, self._reason = bandwidth, reason
        self._by_bandwidth += len(steps)
        self._unsplit += sum(bandwidth.unsplit(step) for step in steps)
        return window_of(steps, [bandwidth.last_arrivals(step) for step in steps], features, alone=True)

    def waiting(self) -> WaitAttribution:
        """How waits were split so far."""
        if self.group is None:
            return WaitAttribution(True, 0.0)
        bandwidth = self._bandwidth
        # rank 0 asks nobody for the time: the worst of the others
        names = self._clocks[0] if self._clocks else ()
        clock = {name: max((one[name] for one in self._clocks), key=abs) for name in names} or None
        if bandwidth is None:
            return WaitAttribution(True, self._uncertainty, None, clock)
        steps = max(self._steps, self._by_bandwidth)
        reason = self._reason if self._by_bandwidth == steps else f"{self._reason}: {self._by_bandwidth} of {steps} steps"
        return WaitAttribution(False, bandwidth.uncertainty, reason, clock)

    def _why_not_by_clocks(self, uncertainty: float, wall: float) -> str | None:
        """The same on every rank."""
        how = self._options.split_waits_by
        if how == "bandwidth":
            return "split_waits_by='bandwidth' was asked for"
        if how == "auto" and uncertainty > _TOO_UNCERTAIN * wall:
            return f"the ranks' clocks agreed only within {uncertainty * 1e3:.2f} ms"
        return None
