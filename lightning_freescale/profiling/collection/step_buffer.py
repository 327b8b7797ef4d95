"""The steps that this rank has recorded, on their way to the others and into the trace, and those torch.profiler watches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from lightning_freescale.profiling.collection.rank_exchange import gather_to_rank_zero
from lightning_freescale.profiling.recording.records import Collective, ResolvedStep, StepRecord, resolve, stamps_of
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.kineto import KinetoWindow

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
        if self._timeline.on_step is not None:  # somebody else resolves the same stamps later
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
        told = [step.as_list() for step in (*self._steps, *others)]
        everyone = gather_to_rank_zero((told, events_here, shares_here and vars(shares_here)), group)
        if everyone is None:
            return [], [], None
        steps, events, shares = zip(*everyone)
        names = ("idle", "compute", "other")
        idle = {name: [None if one is None else one[name] for one in shares] for name in names}
        traced = [[ResolvedStep.from_list(each) for each in row] for row in zip(*steps)]
        return traced, list(events) if any(events) else [], {"steps": len(self._records), **idle} if any(shares) else None
