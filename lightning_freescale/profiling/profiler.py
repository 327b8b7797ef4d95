"""Profile a training loop: record steps, bring those of all ranks together now and then, and write the report."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale._runtime.worker import WorkerThread
from lightning_freescale.profiling.analysis.imbalance import PlannedStep
from lightning_freescale.profiling.collection.history import FitCosts, History
from lightning_freescale.profiling.collection.rank_exchange import KinetoSteps, RankExchange, StepBuffer, gather_to_all
from lightning_freescale.profiling.recording.memory import MemoryReading, memory_reader
from lightning_freescale.profiling.recording.records import ResolvedStep, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline, seconds_per_stamp
from lightning_freescale.profiling.reporting.document import Overhead, RunInfo, Status, write
from lightning_freescale.profiling.reporting.kineto import KinetoWindow
from lightning_freescale.profiling.reporting.page import WITHOUT_PLOTLY, has_plotly, write_page
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.profiling.reporting.trace import write_trace
from lightning_freescale.profiling.reporting.verdict import Advise

_LAG = 2
"""The newest steps wait for the next exchange: they may still run on a device, and nothing should wait for it."""
_MAX_TRACED = 3200
"""Steps times ranks of a trace, which make some 20 MB."""
_PATIENCE = 2.0
"""Seconds for an exchange that is under way when the run ends; longer only takes one that waits for a rank that is gone."""
_NO_EXCHANGE: Future[dict[str, float] | None] = Future()
_NO_EXCHANGE.set_result(None)
_LEAST = {"every_n_steps": 1, "warmup_steps": 0, "max_steps": 1, "trace_steps": 0, "torch_profiler_steps": 0}
_REFRESH_SHARE = 0.002
"""Share of the run that writing the report again and again may take."""


@dataclass(frozen=True)
class ProfilerOptions:
    """How often and how much to profile.

    Attributes:
        every_n_steps: how often the ranks exchange what they recorded.
        warmup_steps: first steps to leave out.
        max_steps: the report covers this many steps at most, the last ones.
        trace_steps: how many of the last steps keep all their stamps, for the trace; 0 for no trace. With more than 64 ranks
            fewer, 3200 steps times ranks in all.
        torch_profiler_steps: how many steps after the first exchange torch.profiler watches; they are in the trace, not in the
            report, and whole, as torch writes them, in a file per rank of the folder ``torch_profiler``.

    Raises:
        ValueError: a value does not fit.
    """

    every_n_steps: int = 50
    warmup_steps: int = 5
    max_steps: int = 2000
    trace_steps: int = 50
    torch_profiler_steps: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: pass a whole number, {least} or more")


class StepProfiler:
    """One run on one rank. The training loop stamps the steps; ``docs/profiler.md`` shows a plain loop.

    Args:
        timeline: that the run is recorded on, enabled.
        device: of the run.
        group: a gloo group of all ranks that serves nothing else, or None if there is one rank; every collective here is on it.
        options: how often and how much.
        run: what is run.
        dirpath: where rank 0 writes its files, and every rank its window of torch.profiler.
        fit_costs: fits what the ranks worked on to their compute times.
        advise: knows how the run was set up, for the advice of the verdict.

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
        options: ProfilerOptions,
        run: RunInfo,
        dirpath: Path,
        fit_costs: FitCosts | None = None,
        advise: Advise | None = None,
    ) -> None:
        assert timeline.clock is not None
        self.timeline, self.options = timeline, options
        self.files = ReportFiles(dirpath)
        self._leads = group is None or group.rank() == 0
        problems = gather_to_all(self.files.problem() if self._leads else None, group)  # an error of one rank is one of all
        if problems[0] is not None:
            raise OSError(problems[0])
        if self._leads and not has_plotly():
            warnings.warn(WITHOUT_PLOTLY, stacklevel=2)  # now, not when days of training have ended
        self._history = History(run, options.max_steps, fit_costs, advise)
        watched, window = options.torch_profiler_steps, self.files.window(0 if group is None else group.rank())
        self._kineto = KinetoSteps(KinetoWindow(watched, device, window) if watched else None)
        self._buffer = StepBuffer(timeline, min(options.trace_steps, max(1, _MAX_TRACED // run.world_size)))
        self._exchange = RankExchange(group, timeline.clock)
        self._ended_steps = 0
        self._stamp_cost = seconds_per_stamp(device)
        self._read_memory: Callable[[], MemoryReading | None] = memory_reader(device) or (lambda: None)
        # on the training thread an exchange takes up to 100 ms with 8 ranks on two cores, most of it waiting for ranks whose
        # turn on a core has not come; on its own thread it runs while training waits or a device computes
        self._worker = WorkerThread("freescale-profiler")
        self._pending = _NO_EXCHANGE

    # -- while training

    def end_step(
        self, samples: int = 0, features: Any = None, predicted: float | None = None, plan: PlannedStep | None = None
    ) -> dict[str, float] | None:
        """End the step in progress and open the next. Every now and then the ranks exchange their records, in the background.

        Args:
            samples: of this rank in the step; 0 if unknown.
            features: what it worked on, as many numbers on every rank, for ``fit_costs``; None if unknown.
            predicted: how long that should take, in any unit that the ranks share in a step; None if unknown.
            plan: on rank 0, what the step's plan says of the balance of all ranks; None if unknown.

        Returns:
            On rank 0, after an exchange, scalars of the steps that it was about.

        Raises:
            RuntimeError: an exchange has failed, because a rank is gone.
        """
        record = self.timeline.close_step(samples, features, predicted, plan)
        self.timeline.open_step(record.end if record is not None else None)
        if record is None:
            return None
        self._ended_steps += 1
        if self._kineto.keep_watched(record):
            self._pause(self._kineto.stop_after_last)
        elif self._ended_steps > self.options.warmup_steps:
            self._buffer.add_step(record)
            if len(self._buffer.waiting) == self.options.every_n_steps + _LAG:
                return self._start_exchange()
        return self._new_scalars()

    def end_epoch(self) -> dict[str, float] | None:
        """Compare the ranks' clocks if it is time, which is a good moment; return scalars as :meth:`end_step`. Collective."""
        self._pending.exception()  # after the same exchanges all ranks agree on whether it is
        scalars = self._new_scalars()
        self._exchange.sync_clocks_if_due()
        return scalars

    def note_assignment(self, assignment: str | None) -> None:
        """Note how samples are assigned to the ranks, where that was chosen while training."""
        self._history.note_assignment(assignment)

    # -- at the end

    def write_report(self) -> BubbleReport | None:
        """Return the report, on rank 0, which writes its files; None if there is nothing to report. Collective.

        Raises:
            RuntimeError: an exchange has failed, because a rank is gone; :meth:`write_interrupted_report` needs no other rank.
        """
        self._pending.result()
        self._kineto.stop_early()
        self._exchange.sync_clocks()
        if self._buffer.waiting:
            self._exchange_steps(self._buffer.take_steps(0), self._read_memory())
        to_rank_zero = self._exchange.alignment.to_rank_zero
        self._kineto.resolve_watched(self._buffer, to_rank_zero)
        traced, events, idle = self._kineto.gather_trace(list(self._buffer.recent), to_rank_zero, self._exchange.group)
        self._worker.stop(_PATIENCE)
        if not self._leads or not self._history.added:
            return None
        status = Status(warmup=self.options.warmup_steps)
        return self.files.write(lambda: self._report(status, traced, idle), traced, events)

    def write_interrupted_report(self, reason: str) -> BubbleReport | None:
        """Return the report of the steps done so far, on rank 0, which writes its files; no other rank is asked for anything.

        Before the first exchange these are rank 0's own steps, whose waits are not divided.
        """
        self._kineto.stop_early()
        self._worker.stop(_PATIENCE)
        if not self._leads:
            return None
        if not self._history.added and self._buffer.count:
            why = "the run ended before the ranks exchanged anything: these are the steps of rank 0 alone"
            records, steps = self._buffer.resolve_rest(self._exchange.alignment.to_rank_zero)
            window = self._exchange.own_window(steps, *_work_of(records), why)
            self._history.add_windows([window], [record.plan for record in records])
        if not self._history.added:
            return None
        left = self._buffer.count - self._history.added
        traced = [[step] for step in self._buffer.recent]
        status = Status(False, reason, self.options.warmup_steps, left)
        return self.files.write(lambda: self._report(status, traced), traced)

    # -- the exchange of records

    def _pause(self, work: Callable[[], Any]) -> None:
        with self.timeline.span("pause", "profiler"):
            work()

    def _start_exchange(self) -> dict[str, float] | None:
        if not self._pending.done():
            self._pause(self._pending.result)
        scalars = self._new_scalars()
        # here, at the end of a step: on its thread the next step would be half done
        self._pending = self._worker.submit(self._run_exchange, self._buffer.take_steps(_LAG), self._read_memory())
        self._pause(self._kineto.start_once)
        return scalars

    def _new_scalars(self) -> dict[str, float] | None:
        if not self._pending.done():
            return None
        pending, self._pending = self._pending, _NO_EXCHANGE
        return pending.result()

    def _run_exchange(self, records: list[StepRecord], memory: MemoryReading | None) -> dict[str, float] | None:
        """Exchange the records on the worker's thread; on rank 0 refresh the report and return its scalars."""
        self._exchange.spent_here = self._worker.cpu_seconds
        self._exchange_steps(records, memory)
        if not self._leads:
            return None
        self.files.refresh(lambda: self._report(Status(False, "still running", self.options.warmup_steps, _LAG)))
        return self._history.newest_scalars()

    def _exchange_steps(self, records: list[StepRecord], memory: MemoryReading | None) -> None:
        to_rank_zero = self._exchange.alignment.to_rank_zero
        self._kineto.resolve_watched(self._buffer, to_rank_zero)
        steps = self._buffer.resolve_taken(records, to_rank_zero)
        windows = self._exchange.exchange_steps(steps, *_work_of(records), memory)
        if windows is not None:
            self._history.add_windows(windows, [record.plan for record in records])

    def _report(self, status: Status, traced: Sequence[Any] | None = None, idle: Any = None) -> BubbleReport:
        steps = self._ended_steps
        overhead = Overhead(self._exchange.spent / steps, self.timeline.stamps * self._stamp_cost / steps)
        return self._history.build_report(status, self._exchange.wait_attribution(), overhead, traced, idle)


def _work_of(records: Sequence[StepRecord]) -> tuple[list[Any], list[float | None]]:
    return [record.features for record in records], [record.predicted for record in records]


class ReportFiles(dict[str, Path]):
    """``report.json``, ``report.html`` and ``trace.json``, by ``"report"``, ``"page"`` and ``"trace"`` once they are written.

    A file that cannot be written is a warning, not the end of a training run.

    Args:
        folder: where.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._refreshed_at = self._refresh_s = 0.0
        self._final = False
        self._lock = threading.Lock()  # the thread aside refreshes while the training thread may write the last report

    def window(self, rank: int) -> Path:
        """Return the file for what torch.profiler writes on a rank, in a folder of its own for other tools."""
        return self.folder / "torch_profiler" / f"rank_{rank}.json.gz"

    def problem(self) -> str | None:
        """Make the folder, without windows of an earlier run, which may have had more ranks.

        Returns:
            why nothing can be written there; None if files can.
        """
        probe = self.folder / ".writable"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
            for earlier in self.window(0).parent.glob("rank_*.json.gz"):
                earlier.unlink()
        except OSError as error:
            return f"the profiler cannot write to dirpath={str(self.folder)!r}: {error}; pass another one"
        return None

    def write(
        self, new_report: Callable[[], BubbleReport], traced: Sequence[Sequence[ResolvedStep]], kineto: Sequence[Any] = ()
    ) -> BubbleReport:
        """Make the last report and write all files; no trace without steps."""
        with _collector_paused():
            report = new_report()
            with self._writing():
                self._final = True
                document = report.document()
                self["report"] = write(document, self.folder / "report.json")
                self["page"] = write_page(self.folder / "report.html", [document])
                if traced:
                    aligned = report.wait_attribution.aligned
                    self["trace"] = write_trace(self.folder / "trace.json", traced, kineto, aligned=aligned)
        return report

    def refresh(self, new_report: Callable[[], BubbleReport]) -> None:
        """Write the report alone, in case the run is killed; as often as costs next to nothing."""
        began = time.perf_counter()
        if began - self._refreshed_at < self._refresh_s / _REFRESH_SHARE:
            return
        with self._writing():
            if not self._final:
                self["report"] = new_report().write(self.folder / "report.json")
        self._refreshed_at = time.perf_counter()
        self._refresh_s = self._refreshed_at - began

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                warnings.warn(f"the profiler could not write its files to {self.folder}: {error}", stacklevel=2)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Looking again and again through millions of new lists, none of them garbage, took a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
