"""The steps that torch.profiler watches: in the trace, and out of the report, because it slows them down."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_freescale.profiling.collection.gather import to_rank_zero as gather
from lightning_freescale.profiling.collection.step_buffer import Clock, StepBuffer
from lightning_freescale.profiling.recording.records import ResolvedStep, StepRecord
from lightning_freescale.profiling.reporting.kineto import KinetoWindow


class KinetoSteps:
    """A window of torch.profiler over some steps, or none.

    Args:
        window: not started; None for none.
    """

    def __init__(self, window: KinetoWindow | None) -> None:
        self._window = window
        self._records: list[StepRecord] = []
        self._steps: list[ResolvedStep] = []

    def start(self) -> None:
        """Between two steps; does nothing the second time."""
        if self._window is not None and not self._window.running and not self._records:
            self._window.start()

    def takes(self, record: StepRecord) -> bool:
        """Whether the step that has ended was watched; it is kept here then."""
        if self._window is None or not self._window.running:
            return False
        self._records.append(record)
        return True

    def end_step(self) -> None:
        """After a step that was watched."""
        if self._window is not None and len(self._records) == self._window.steps:
            self._window.stop()

    def give_up(self) -> None:
        """The run ends before its time."""
        if self._window is not None and self._window.running:
            self._window.stop()

    def settle(self, recorded: StepBuffer, to_rank_zero: Clock) -> None:
        """Resolve the steps of a window that is over, before what belongs to them is thrown away."""
        if self._window is not None and not self._window.running and len(self._steps) < len(self._records):
            self._steps = recorded.resolve_only(self._records, to_rank_zero)

    def gathered(
        self, others: list[ResolvedStep], clock: Clock, group: dist.ProcessGroup | None
    ) -> tuple[list[list[ResolvedStep]], list[Any], dict[str, Any] | None]:
        """On rank 0: for every traced step the records of all ranks, every rank's events, how idle devices were. Collective."""
        seen = self._window if self._records else None
        mine = ([], None) if seen is None else (seen.events(clock), seen.breakdown())
        everyone = gather(([*self._steps, *others], *mine), group)
        if everyone is None:
            return [], [], None
        steps, events, shares = zip(*everyone)
        names = ("idle", "compute", "other")
        idle = {name: [None if one is None else getattr(one, name) for one in shares] for name in names}
        traced = [list(row) for row in zip(*steps)]
        return traced, list(events) if any(events) else [], {"steps": len(self._records), **idle} if any(shares) else None
