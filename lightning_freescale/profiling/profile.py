"""Profile a training loop: record steps, bring those of all ranks together now and then, and report."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.profiling.exchange import Exchange
from lightning_freescale.profiling.history import Explain, History
from lightning_freescale.profiling.options import Options
from lightning_freescale.profiling.recording.cost import seconds_per_stamp
from lightning_freescale.profiling.recording.records import ResolvedStep, StepRecord
from lightning_freescale.profiling.recording.resolve import resolve, stamps_of
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.files import Files
from lightning_freescale.profiling.reporting.kineto import KinetoWindow
from lightning_freescale.profiling.reporting.report import About, BubbleReport, Overhead, Status
from lightning_freescale.profiling.watched import Watched

_LAG = 2
"""The newest steps wait for the next exchange: they may still be running on a device."""


class Profile:
    """One run on one rank. Steps are stamped by whoever trains; ``docs/profiler.md`` shows a plain loop.

    Args:
        timeline: that the run is recorded on, enabled.
        device: of the run.
        group: a gloo group of all ranks for nobody else, or None if there is one rank; every collective here is on it.
        options: how.
        about: what is run.
        folder: where rank 0 writes its files.
        explain: fits what the ranks worked on to their compute times.

    Attributes:
        files: what was written; nothing on other ranks than 0.
    """

    def __init__(
        self,
        timeline: Timeline,
        device: torch.device,
        group: dist.ProcessGroup | None,
        options: Options,
        about: About,
        folder: Path,
        explain: Explain | None = None,
    ) -> None:
        assert timeline.clock is not None
        self.timeline, self.options, self.files = timeline, options, Files(folder)
        self._leads = group is None or group.rank() == 0
        self._history = History(about, options.keep_steps, explain)
        self._exchange, self._clock = Exchange(group, timeline.clock, options), timeline.clock
        self._watched = Watched(KinetoWindow(options.kineto_steps, device) if options.kineto_steps else None)
        self._records: list[StepRecord] = []
        self._recent: deque[ResolvedStep] = deque(maxlen=options.trace_steps)
        self._seen, self._stamp_cost = 0, seconds_per_stamp(device)

    # -- while training

    def end_step(self, samples: int = 0, features: Any = None) -> dict[str, float] | None:
        """Close the step in progress and open the next; every now and then an exchange. Collective then.

        Args:
            samples: of this rank in the step; 0 if unknown.
            features: what it worked on, the same numbers on every rank, for ``explain``; None if unknown.

        Returns:
            Scalars of the steps since the last exchange, on rank 0 after an exchange.
        """
        record = self.timeline.close_step(samples, features)
        self.timeline.open_step(record.end if record is not None else None)
        if record is None:
            return None
        self._seen += 1
        if self._watched.takes(record):
            self._pause(self._watched.end_step)
        elif self._seen > self.options.warmup_steps:
            self._records.append(record)
            if len(self._records) == self.options.every_n_steps + _LAG:
                return self._pause(self._come_together)
        return None

    def end_epoch(self) -> None:
        """A good moment to compare clocks, if it is time. Collective."""
        self._exchange.sync_if_due()

    # -- at the end

    def finish(self) -> BubbleReport | None:
        """The report, on rank 0, which writes its files; None if there is nothing to report. Collective."""
        self._exchange.sync()
        if self._records:
            self._add(self._records)
        traced, kineto, idle = self._watched.gathered(
            self._resolved, list(self._recent), self._exchange.alignment.to_rank_zero, self._exchange.group
        )
        if not self._leads or not self._history.steps:
            return None
        report = self._report(Status(warmup=self.options.warmup_steps), traced, idle)
        self.files.write(report, traced, kineto)
        return report

    def interrupted(self, reason: str) -> BubbleReport | None:
        """The report of the steps done so far, on rank 0, which writes its files; no other rank is asked for anything.

        Before the first exchange these are rank 0's own steps, whose waits are split by bandwidth.
        """
        self._watched.give_up()
        if not self._leads:
            return None
        left = len(self._records)
        if not self._history.steps and self._records:
            steps, left = self._resolved(self._records), 0
            why = "the run ended before the ranks exchanged anything: these are the steps of rank 0 alone"
            self._history.add([self._exchange.alone(steps, [record.features for record in self._records], why)])
            self._recent.extend(steps)
        if not self._history.steps:
            return None
        traced = [[step] for step in self._recent]
        report = self._report(Status(False, reason, self.options.warmup_steps, left), traced)
        self.files.write(report, traced)
        return report

    # -- parts

    def _pause(self, work: Any) -> Any:
        with self.timeline.span("pause", "profiler"):
            return work()

    def _come_together(self) -> dict[str, float] | None:
        self._add(self._records[:-_LAG])
        self._records = self._records[-_LAG:]
        self._watched.start()
        if not self._leads:
            return None
        self.files.refresh(lambda: self._report(Status(False, "still running", self.options.warmup_steps, _LAG)))
        return self._history.newest_scalars()

    def _add(self, records: Sequence[StepRecord]) -> None:
        steps = self._resolved(records)
        self._recent.extend(steps)
        windows = self._exchange.together(steps, [record.features for record in records])
        if windows is not None:
            self._history.add(windows)

    def _resolved(self, records: Sequence[StepRecord]) -> list[ResolvedStep]:
        background, to_rank_zero = list(self.timeline.background), self._exchange.alignment.to_rank_zero
        steps = [resolve(record, self._clock, to_rank_zero, background) for record in records]
        for record in records:
            self._clock.release(stamps_of(record))
        return steps

    def _report(self, status: Status, traced: Sequence[Any] | None = None, idle: Any = None) -> BubbleReport:
        overhead = Overhead(self._exchange.spent / self._seen, self.timeline.stamps * self._stamp_cost / self._seen)
        return self._history.report(status, self._exchange.waiting(), overhead, traced, idle)
