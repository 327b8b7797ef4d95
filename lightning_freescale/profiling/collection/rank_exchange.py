"""The steps that a rank has recorded, on their way to the other ranks and into the trace."""

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
from lightning_freescale.profiling.reporting.kineto import KinetoWindow

_TOO_UNCERTAIN = 0.02
"""Share of a step's wall time by which clocks may disagree before arrivals are of no use."""
_FIRST_SYNC, _SYNC_EVERY = 5.0, 60.0
"""Seconds until the ranks compare their clocks again, twice as long each time, up to the second."""
_ROUNDS = 12
"""Round trips of a comparison while training goes on, which takes a few milliseconds."""


def gather_to_all(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, on every rank. Collective on a group that takes CPU tensors (None: one rank).

    They travel as JSON: numbers, text, lists and dicts by text.
    """
    return [value] if group is None else [json.loads(each) for each in gather_bytes(_written(value), group)]


def gather_to_rank_zero(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Return the values of all ranks on rank 0, None on the others; as for :func:`gather_to_all`. Collective."""
    if group is None:
        return [value]
    everyone = gather_bytes(_written(value), group, only_first=True)
    return [json.loads(each) for each in everyone] if group.rank() == 0 else None


def _written(value: Any) -> bytes:
    return json.dumps(value, default=lambda numbers: numbers.tolist()).encode()  # of numpy


class RankExchange:
    """Brings the steps of all ranks together, and divides their waits where the last rank arrived.

    Every rank works on its own steps and only needs to know when the last rank arrived; rank 0 gets what came of it. Where the
    ranks' clocks agree too badly to compare arrivals, waits stay undivided. ``group`` is of all ranks and serves nothing else;
    None if there is one rank.

    Attributes:
        alignment: from this rank's clock to rank 0's.
        spent_here: processor seconds that exchanges have taken on this rank, for its caller to say.
        spent: the most of any rank, as of the last exchange.
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
        """Compare the clocks of all ranks; the device's with the host's if nothing runs. Collective."""
        if idle:
            self._clock.tie()
        self.alignment.measure_offset(self.group, *(() if idle else (_ROUNDS,)))
        self._synced, self._sync_due = time.perf_counter(), False

    def sync_clocks_if_due(self, idle: bool = True) -> None:
        """Compare the clocks if it is time, where all ranks are between two steps. Collective."""
        if self._sync_due:
            self.sync_clocks(idle)

    def exchange_steps(
        self,
        steps: Sequence[ResolvedStep],
        features: Sequence[Any],
        predicted: Sequence[float | None],
        memory: MemoryReading | None = None,
    ) -> list[RankWindow] | None:
        """Return the same steps of all ranks, and what they held of memory, on rank 0; None on the others. Collective."""
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
        window = window_of(steps, last, features, predicted, memory, alone=self.group is None, divided=aligned)
        windows = gather_to_rank_zero(window.as_lists(), self.group)
        self.sync_clocks_if_due(idle=False)  # since the exchange before: no epoch has ended meanwhile
        if all_due[0]:
            self._sync_due, self._sync_after = True, min(2 * self._sync_after, _SYNC_EVERY)
        return None if windows is None else [RankWindow.from_lists(each) for each in windows]

    def own_window(
        self, steps: Sequence[ResolvedStep], features: Sequence[Any], predicted: Sequence[float | None], reason: str
    ) -> RankWindow:
        """Return this rank's steps as it sees them alone: the others' arrivals are unknown, so waits are not divided."""
        self._reason = reason
        self._undivided += len(steps)
        own = [[collective.arrive for collective in step.collectives] for step in steps]
        return window_of(steps, own, features, predicted, alone=True, divided=self.group is None)

    def wait_attribution(self) -> WaitAttribution:
        """Return how waits were divided so far."""
        if self.group is None:
            return WaitAttribution(True, 0.0)
        # rank 0 does not ask for the time: the worst of the others
        names = self._clocks[0] if self._clocks else ()
        clock = {name: max((one[name] for one in self._clocks), key=abs) for name in names} or None
        if not self._undivided:
            return WaitAttribution(True, self._uncertainty, None, clock)
        steps = max(self._steps, self._undivided)
        reason = self._reason if self._undivided == steps else f"{self._reason}: {self._undivided} of {steps} steps"
        return WaitAttribution(False, self._uncertainty, reason, clock)


ToRankZero = Callable[[Any], Any]
"""From this host's clock to rank 0's, for seconds or an array of them."""


class StepBuffer:
    """Steps of one rank, recorded on ``timeline``.

    Attributes:
        waiting: those that no exchange was about.
        recent: the last ``keep`` of those that were resolved, with all their stamps, for the trace.
        count: how many were added.
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
        """Add a step that has ended."""
        self.waiting.append(record)
        self.count += 1

    def take_steps(self, leave: int) -> list[StepRecord]:
        """Return the steps that wait, but the last ``leave``; they wait no more."""
        turn = len(self.waiting) - leave
        self._taken, self.waiting = self.waiting[:turn], self.waiting[turn:]
        self._resolved = []
        return self._taken

    def resolve_taken(self, records: Sequence[StepRecord], to_rank_zero: ToRankZero) -> list[ResolvedStep]:
        """Return steps that were taken, in seconds on rank 0's clock. Their stamps are others' from then on."""
        steps = self._resolved = self.resolve_only(records, to_rank_zero)
        until = self._clock.seconds(records[-1].end)
        self._background = [one for one in self._background if self._clock.seconds(one.done) > until]
        self.recent.extend(steps)
        return steps

    def resolve_only(self, records: Sequence[StepRecord], to_rank_zero: ToRankZero) -> list[ResolvedStep]:
        """Return steps in between in the same way, but leave what other steps need."""
        self._background += self._timeline.pop_background()
        steps = resolve(records, self._clock, to_rank_zero, self._background)
        if self._timeline.on_step is not None:  # other code resolves the same stamps later
            return steps
        for record in records:  # the step before the first ends with its start, and may have to be resolved yet
            self._clock.release([stamp for stamp in stamps_of(record) if stamp is not records[0].start])
        return steps

    def resolve_rest(self, to_rank_zero: ToRankZero) -> tuple[list[StepRecord], list[ResolvedStep]]:
        """Return the steps taken last and those that wait, as they were recorded and resolved."""
        taken, steps, waiting = self._taken, self._resolved, self.take_steps(0)
        if len(steps) < len(taken):
            steps = self.resolve_taken(taken, to_rank_zero)
        return [*taken, *waiting], [*steps, *(self.resolve_taken(waiting, to_rank_zero) if waiting else [])]


class KinetoSteps:
    """The steps that torch.profiler watches: in the trace, and out of the report, because it slows them down."""

    def __init__(self, window: KinetoWindow | None) -> None:
        self._window = window
        self._records: list[StepRecord] = []
        self._steps: list[ResolvedStep] = []

    def start_once(self) -> None:
        """Start the window, between two steps; do nothing the second time."""
        if self._window is not None and not self._window.running and not self._records:
            self._window.start()

    def keep_watched(self, record: StepRecord) -> bool:
        """Keep the step that has ended if it was watched; return whether it was."""
        if self._window is None or not self._window.running:
            return False
        self._records.append(record)
        return True

    def stop_after_last(self) -> None:
        """Stop the window if the step that has ended was its last."""
        if self._window is not None and len(self._records) == self._window.steps:
            self._window.stop()

    def stop_early(self) -> None:
        """Stop a window that is open when the run ends."""
        if self._window is not None and self._window.running:
            self._window.stop()

    def resolve_watched(self, buffer: StepBuffer, to_rank_zero: ToRankZero) -> None:
        """Resolve the steps of a window that is over, before what belongs to them is thrown away."""
        if self._window is not None and not self._window.running and len(self._steps) < len(self._records):
            self._steps = buffer.resolve_only(self._records, to_rank_zero)

    def gather_trace(
        self, others: list[ResolvedStep], to_rank_zero: ToRankZero, group: dist.ProcessGroup | None
    ) -> tuple[list[list[ResolvedStep]], list[Any], dict[str, Any] | None]:
        """Return, on rank 0, all ranks' records of every traced step, all ranks' events, how idle devices were. Collective."""
        seen = self._window if self._records else None
        events_here, shares_here = ([], None) if seen is None else (seen.events(to_rank_zero), seen.breakdown())
        mine = [step.as_list() for step in (*self._steps, *others)]
        everyone = gather_to_rank_zero((mine, events_here, shares_here and vars(shares_here)), group)
        if everyone is None:
            return [], [], None
        steps, events, shares = zip(*everyone)
        names = ("idle", "compute", "other")
        idle = {name: [None if one is None else one[name] for one in shares] for name in names}
        traced = [[ResolvedStep.from_list(each) for each in row] for row in zip(*steps)]
        return traced, list(events) if any(events) else [], {"steps": len(self._records), **idle} if any(shares) else None
