"""The steps that this rank has recorded, on their way to the others and into the trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lightning_freescale.profiling.recording.records import Collective, ResolvedStep, StepRecord
from lightning_freescale.profiling.recording.resolve import resolve, stamps_of
from lightning_freescale.profiling.recording.timeline import Timeline

Clock = Callable[[Any], Any]
"""From this host's clock to rank 0's, for seconds or an array of them."""


class StepBuffer:
    """Steps of one rank.

    Args:
        timeline: that they are recorded on.
        keep: how many of the last steps to keep with all their stamps.

    Attributes:
        waiting: those that no exchange was about.
        recent: the last of those that were resolved, for the trace.
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
        self._elsewhere: list[Collective] = []

    def add(self, record: StepRecord) -> None:
        """A step that has ended."""
        self.waiting.append(record)
        self.count += 1

    def take(self, leave: int) -> list[StepRecord]:
        """Those that wait, but the last ``leave``."""
        turn = len(self.waiting) - leave
        self._taken, self.waiting, self._resolved = self.waiting[:turn], self.waiting[turn:], []
        return self._taken

    def resolve(self, records: Sequence[StepRecord], to_rank_zero: Clock) -> list[ResolvedStep]:
        """Steps that were taken, in seconds on rank 0's clock. Their stamps are others' from then on."""
        steps = self._resolved = self.resolve_only(records, to_rank_zero)
        until = self._clock.seconds(records[-1].end)
        self._elsewhere = [one for one in self._elsewhere if self._clock.seconds(one.done) > until]
        self.recent.extend(steps)
        return steps

    def resolve_only(self, records: Sequence[StepRecord], to_rank_zero: Clock) -> list[ResolvedStep]:
        """The same of steps in between, which leaves what other steps need."""
        self._elsewhere += self._timeline.take_background()
        steps = resolve(records, self._clock, to_rank_zero, self._elsewhere)
        if self._timeline.on_step is not None:  # somebody else resolves the same stamps later
            return steps
        for record in records:  # the step before the first ends with its start, and may have to be resolved yet
            self._clock.release([stamp for stamp in stamps_of(record) if stamp is not records[0].start])
        return steps

    def resolve_rest(self, to_rank_zero: Clock) -> tuple[list[StepRecord], list[ResolvedStep]]:
        """Those taken last, and those that wait."""
        taken, steps, waiting = self._taken, self._resolved, self.take(0)
        if len(steps) < len(taken):
            steps = self.resolve(taken, to_rank_zero)
        return [*taken, *waiting], [*steps, *(self.resolve(waiting, to_rank_zero) if waiting else [])]
