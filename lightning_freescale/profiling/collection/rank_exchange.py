"""Exchange the recorded steps of a rank with the other ranks, and gather them for the trace."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from lightning_freescale._runtime.object_gather import gather_bytes
from lightning_freescale.profiling.analysis.breakdown import arrivals_of, last_arrivals, wall_of
from lightning_freescale.profiling.analysis.rank_window import RankWindow, window_of
from lightning_freescale.profiling.clock_sync import Alignment
from lightning_freescale.profiling.recording.memory import MemoryReading
from lightning_freescale.profiling.recording.records import Clock, Collective, ResolvedStep, StepRecord, resolve, stamps_of
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.document import WaitAttribution
from lightning_freescale.profiling.reporting.kineto import SHARES, KinetoWindow, temporal_breakdown

_TOO_UNCERTAIN = 0.02
"""Uncertainty of the clocks, as a share of a step's wall time, above which arrivals are not compared."""
_FIRST_SYNC, _SYNC_EVERY = 5.0, 60.0
"""Seconds until the first comparison of the clocks; the interval doubles up to the second value."""
_ROUNDS = 12
"""Round trips of a comparison during training, which takes a few milliseconds."""
ToRankZero = Callable[[Any], Any]
"""Function from this host's clock to rank 0's clock, for seconds or an array of them."""


def gather_to_all(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks on every rank. Collective; the group takes CPU tensors, None is one rank.

    The values travel as JSON: numbers, text, lists, dicts with text as keys, arrays as lists, and data classes as dicts.
    """
    mine = _encoded(value)
    return [json.loads(each) for each in ([mine] if group is None else gather_bytes(mine, group))]


def gather_to_rank_zero(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Return the values of all ranks on rank 0 and None on the others, see :func:`gather_to_all`. Collective."""
    mine = _encoded(value)
    everyone = [mine] if group is None else gather_bytes(mine, group, only_first=True)
    return [json.loads(each) for each in everyone] or None


def _encoded(value: Any) -> bytes:
    return json.dumps(value, default=lambda one: one.tolist() if hasattr(one, "tolist") else vars(one)).encode()


class RankExchange:
    """Exchanges the steps of all ranks, and divides waits at the arrival of the last rank.

    Every rank summarizes its own steps and only needs the last arrivals of the others; rank 0 receives the summaries. If the
    clocks of the ranks are too uncertain to compare arrivals, waits are not divided.

    Attributes:
        group: a group of all ranks for these exchanges only; None with one rank.
        alignment: conversion from this rank's clock to rank 0's.
        spent_here: processor seconds of the exchanges on this rank; the caller sets it.
        spent: the largest value of any rank in the last exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None, clock: Clock) -> None:
        self.group, self.alignment = group, Alignment()
        self.spent_here = self.spent = 0.0
        self._clock = clock
        self._uncertainty = 0.0
        self._sync_after, self._sync_due = _FIRST_SYNC, False
        self._steps = self._undivided = 0
        self._clocks: Sequence[Mapping[str, float]] = ()
        self._reason: str | None = None
        self.sync_clocks()

    def sync_clocks(self, idle: bool = True) -> None:
        """Compare the clocks of all ranks, and if they are idle, the device's clock with the host's. Collective."""
        if idle:
            self._clock.tie()
        self.alignment.measure_offset(self.group, *(() if idle else (_ROUNDS,)))
        self._synced, self._sync_due = time.perf_counter(), False

    def sync_clocks_if_due(self, idle: bool = True) -> None:
        """Compare the clocks if the interval is over. All ranks call it between the same two steps. Collective."""
        if self._sync_due:
            self.sync_clocks(idle)

    def exchange_steps(self, steps: Sequence[ResolvedStep], memory: MemoryReading | None = None) -> list[RankWindow] | None:
        """Return the windows of all ranks for the same steps on rank 0, None on the others. Collective."""
        now = time.perf_counter()
        self._steps += len(steps)
        wall = sum(map(wall_of, steps)) / len(steps)
        due = not self._sync_due and now - self._synced > self._sync_after
        here, uncertainty = [arrivals_of(step) for step in steps], self.alignment.uncertainty_at(now)
        mine = here, uncertainty, wall, due, self.spent_here, self.alignment.figures()
        arrivals, uncertain, walls, all_due, spent, clocks = zip(*gather_to_all(mine, self.group))
        self.spent, self._clocks = max(spent), clocks
        self._uncertainty = max(self._uncertainty, *uncertain)
        aligned = max(uncertain) <= _TOO_UNCERTAIN * float(np.mean(walls))  # the same on every rank
        if not aligned:
            self._reason = f"the ranks' clocks agreed only within {max(uncertain) * 1e3:.2f} ms"
            self._undivided += len(steps)
        found = [last_arrivals(same) for same in zip(*arrivals)]
        last = [[latest[c.key].seconds for c in step.collectives] for step, latest in zip(steps, found)]
        window = window_of(steps, last, memory, alone=self.group is None, divided=aligned)
        windows = gather_to_rank_zero(window, self.group)
        self.sync_clocks_if_due(idle=False)  # due since the exchange before, if no epoch has ended meanwhile
        if all_due[0]:
            self._sync_due, self._sync_after = True, min(2 * self._sync_after, _SYNC_EVERY)
        return None if windows is None else [RankWindow.from_json(each) for each in windows]

    def own_window(self, steps: Sequence[ResolvedStep], reason: str) -> RankWindow:
        """Return the window of this rank alone. Its waits are not divided, because the other arrivals are unknown."""
        self._reason = reason
        self._undivided += len(steps)
        own = [[collective.arrive for collective in step.collectives] for step in steps]
        return window_of(steps, own, alone=True, divided=self.group is None)

    def wait_attribution(self) -> WaitAttribution:
        if self.group is None:
            return WaitAttribution(True, 0.0)
        # the worst of the other ranks: rank 0 measures no offset
        names = self._clocks[0] if self._clocks else ()
        clock = {name: max((one[name] for one in self._clocks), key=abs) for name in names} or None
        if not self._undivided:
            return WaitAttribution(True, self._uncertainty, None, clock)
        steps = max(self._steps, self._undivided)
        reason = self._reason if self._undivided == steps else f"{self._reason}: {self._undivided} of {steps} steps"
        return WaitAttribution(False, self._uncertainty, reason, clock)


class StepBuffer:
    """The steps of one rank until they are exchanged.

    Attributes:
        waiting: steps that no exchange has taken.
        recent: the last ``keep`` resolved steps with all their stamps, for the trace.
        count: the number of added steps.
    """

    def __init__(self, timeline: Timeline, keep: int) -> None:
        assert timeline.clock is not None
        self._timeline, self._clock = timeline, timeline.clock
        self.waiting: list[StepRecord] = []
        self.recent: deque[ResolvedStep] = deque(maxlen=keep)
        self.count = 0
        self._taken: list[StepRecord] = []
        self._resolved: list[ResolvedStep] = []
        self._background: list[Collective] = []

    def add_step(self, record: StepRecord) -> None:
        self.waiting.append(record)
        self.count += 1

    def take_steps(self, leave: int) -> list[StepRecord]:
        """Remove and return the waiting steps except the last ``leave``."""
        turn = len(self.waiting) - leave
        self._taken, self.waiting = self.waiting[:turn], self.waiting[turn:]
        self._resolved = []
        return self._taken

    def resolve_taken(self, records: Sequence[StepRecord], to_rank_zero: ToRankZero) -> list[ResolvedStep]:
        """Return taken steps in seconds on rank 0's clock, and release their stamps."""
        steps = self._resolved = self.resolve_only(records, to_rank_zero)
        until = self._clock.seconds(records[-1].end)
        self._background = [one for one in self._background if self._clock.seconds(one.done) > until]
        self.recent.extend(steps)
        return steps

    def resolve_only(self, records: Sequence[StepRecord], to_rank_zero: ToRankZero) -> list[ResolvedStep]:
        """Return steps that lie between others in the same way, but keep what the other steps need."""
        self._background += self._timeline.pop_background()
        steps = resolve(records, self._clock, to_rank_zero, self._background)
        if self._timeline.on_step is not None:  # other code resolves the same stamps later
            return steps
        for record in records:  # the start of the first is the end of the step before, which may not be resolved yet
            self._clock.release([stamp for stamp in stamps_of(record) if stamp is not records[0].start])
        return steps

    def resolve_rest(self, to_rank_zero: ToRankZero) -> tuple[list[StepRecord], list[ResolvedStep]]:
        """Return the steps taken last and the waiting steps, as records and resolved."""
        taken, steps, waiting = self._taken, self._resolved, self.take_steps(0)
        if len(steps) < len(taken):
            steps = self.resolve_taken(taken, to_rank_zero)
        return [*taken, *waiting], [*steps, *(self.resolve_taken(waiting, to_rank_zero) if waiting else [])]


def gather_trace(
    window: KinetoWindow, steps: Sequence[ResolvedStep], to_rank_zero: ToRankZero, group: dist.ProcessGroup | None
) -> tuple[list[list[ResolvedStep]], list[Any], dict[str, Any] | None]:
    """Return the steps, the Kineto events and the device shares of all ranks on rank 0, nothing on the others. Collective."""
    mine = ([], None) if not window.records else (window.events(to_rank_zero), temporal_breakdown(window.slices))
    everyone = gather_to_rank_zero((steps, *mine), group)
    if everyone is None:
        return [], [], None
    rows, events, shares = zip(*everyone)
    idle = {name: [None if one is None else one[name] for one in shares] for name in SHARES}
    traced = [[ResolvedStep.from_json(each) for each in row] for row in zip(*rows)]
    return traced, list(events) if any(events) else [], {"steps": len(window.records), **idle} if any(shares) else None
