"""Profile a training loop: record steps, bring those of all ranks together now and then, and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.profiling.aside import Aside
from lightning_freescale.profiling.collection.gather import to_all
from lightning_freescale.profiling.collection.history import Explain, History
from lightning_freescale.profiling.collection.kineto_steps import KinetoSteps
from lightning_freescale.profiling.collection.rank_exchange import RankExchange
from lightning_freescale.profiling.collection.step_buffer import StepBuffer
from lightning_freescale.profiling.options import Options
from lightning_freescale.profiling.recording.cost import seconds_per_stamp
from lightning_freescale.profiling.recording.records import StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.facts import Overhead, RunInfo, Status
from lightning_freescale.profiling.reporting.files import ReportFiles
from lightning_freescale.profiling.reporting.kineto import KinetoWindow
from lightning_freescale.profiling.reporting.report import BubbleReport

_LAG = 2
"""The newest steps wait for the next exchange: they may still be running on a device."""
_TRACED = 3200
"""Steps times ranks of a trace, which make some 20 MB."""
_PATIENCE = 2.0
"""Seconds for an exchange that is under way when the run ends; longer only takes one that waits for a rank that is gone."""


class StepProfiler:
    """One run on one rank. Steps are stamped by whoever trains; ``docs/profiler.md`` shows a plain loop.

    Args:
        timeline: that the run is recorded on, enabled.
        device: of the run.
        group: a gloo group of all ranks for nobody else, or None if there is one rank; every collective here is on it.
        options: how.
        about: what is run.
        folder: where rank 0 writes its files.
        explain: fits what the ranks worked on to their compute times.

    Raises:
        OSError: rank 0 cannot write to the folder; on every rank.

    Attributes:
        files: what was written; nothing on other ranks than 0.
    """

    def __init__(
        self,
        timeline: Timeline,
        device: torch.device,
        group: dist.ProcessGroup | None,
        options: Options,
        about: RunInfo,
        folder: Path,
        explain: Explain | None = None,
    ) -> None:
        assert timeline.clock is not None
        self.timeline, self.options, self.files = timeline, options, ReportFiles(folder)
        self._leads = group is None or group.rank() == 0
        problems = to_all(self.files.problem() if self._leads else None, group)  # an error of one rank is one of all
        if problems[0] is not None:
            raise OSError(problems[0])
        self._history = History(about, options.keep_steps, explain)
        self._watched = KinetoSteps(KinetoWindow(options.kineto_steps, device) if options.kineto_steps else None)
        self._recorded = StepBuffer(timeline, min(options.trace_steps, max(1, _TRACED // about.world_size)))
        self._exchange = RankExchange(group, timeline.clock, options)
        self._seen, self._stamp_cost = 0, seconds_per_stamp(device)
        self._aside, self._pending = Aside(), _nothing()

    # -- while training

    def end_step(self, samples: int = 0, features: Any = None) -> dict[str, float] | None:
        """Close the step in progress and open the next. Every now and then the ranks exchange their records, on a thread aside.

        Args:
            samples: of this rank in the step; 0 if unknown.
            features: what it worked on, the same numbers on every rank, for ``explain``; None if unknown.

        Returns:
            On rank 0, after an exchange, scalars of the steps that it was about.

        Raises:
            RuntimeError: an exchange has failed, because a rank is gone.
        """
        record = self.timeline.close_step(samples, features)
        self.timeline.open_step(record.end if record is not None else None)
        if record is None:
            return None
        self._seen += 1
        if self._watched.takes(record):
            self._pause(self._watched.end_step)
        elif self._seen > self.options.warmup_steps:
            self._recorded.add(record)
            if len(self._recorded.waiting) == self.options.every_n_steps + _LAG:
                return self._begin_exchange()
        return self._news()

    def end_epoch(self) -> dict[str, float] | None:
        """A good moment to compare clocks, if it is time; scalars as :meth:`end_step`. Collective."""
        self._pending.exception()  # after the same exchanges all ranks agree on whether it is
        news = self._news()
        self._exchange.sync_if_due()
        return news

    # -- at the end

    def finish(self) -> BubbleReport | None:
        """The report, on rank 0, which writes its files; None if there is nothing to report. Collective."""
        self._pending.result()
        self._watched.give_up()
        self._exchange.sync()
        if self._recorded.waiting:
            self._come_together(self._recorded.take(0))
        to_rank_zero = self._exchange.alignment.to_rank_zero
        self._watched.settle(self._recorded, to_rank_zero)
        traced, kineto, idle = self._watched.gathered(list(self._recorded.recent), to_rank_zero, self._exchange.group)
        self._aside.close(_PATIENCE)
        if not self._leads or not self._history.added:
            return None
        report = self._report(Status(warmup=self.options.warmup_steps), traced, idle)
        self.files.write(report, traced, kineto)
        return report

    def interrupted(self, reason: str) -> BubbleReport | None:
        """The report of the steps done so far, on rank 0, which writes its files; no other rank is asked for anything.

        Before the first exchange these are rank 0's own steps, whose waits are split by bandwidth.
        """
        self._watched.give_up()
        self._aside.close(_PATIENCE)
        if not self._leads:
            return None
        if not self._history.added and self._recorded.count:
            why = "the run ended before the ranks exchanged anything: these are the steps of rank 0 alone"
            records, steps = self._recorded.resolve_rest(self._exchange.alignment.to_rank_zero)
            self._history.add([self._exchange.alone(steps, [record.features for record in records], why)])
        if not self._history.added:
            return None
        left = self._recorded.count - self._history.added
        traced = [[step] for step in self._recorded.recent]
        report = self._report(Status(False, reason, self.options.warmup_steps, left), traced)
        self.files.write(report, traced)
        return report

    # -- parts

    def _pause(self, work: Callable[[], Any]) -> None:
        with self.timeline.span("pause", "profiler"):
            work()

    def _begin_exchange(self) -> dict[str, float] | None:
        if not self._pending.done():
            self._pause(self._pending.result)
        news = self._news()
        self._pending = self._aside.submit(self._exchanged, self._recorded.take(_LAG))
        self._pause(self._watched.start)
        return news

    def _news(self) -> dict[str, float] | None:
        if not self._pending.done():
            return None
        pending, self._pending = self._pending, _nothing()
        return pending.result()

    def _exchanged(self, records: list[StepRecord]) -> dict[str, float] | None:
        self._exchange.spent_here = self._aside.seconds
        self._come_together(records)
        if not self._leads:
            return None
        self.files.refresh(lambda: self._report(Status(False, "still running", self.options.warmup_steps, _LAG)))
        return self._history.newest_scalars()

    def _come_together(self, records: list[StepRecord]) -> None:
        to_rank_zero = self._exchange.alignment.to_rank_zero
        self._watched.settle(self._recorded, to_rank_zero)
        steps = self._recorded.resolve(records, to_rank_zero)
        windows = self._exchange.together(steps, [record.features for record in records])
        if windows is not None:
            self._history.add(windows)

    def _report(self, status: Status, traced: Sequence[Any] | None = None, idle: Any = None) -> BubbleReport:
        overhead = Overhead(self._exchange.spent / self._seen, self.timeline.stamps * self._stamp_cost / self._seen)
        return self._history.report(status, self._exchange.waiting(), overhead, traced, idle)


def _nothing() -> Future[dict[str, float] | None]:
    """A job that is done."""
    done: Future[dict[str, float] | None] = Future()
    done.set_result(None)
    return done
