"""Profile a training loop: record steps, exchange them between the ranks, and write the report."""

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
from lightning_freescale.profiling.collection.rank_exchange import RankExchange, StepBuffer, gather_to_all, gather_trace
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
"""The newest steps wait for the next exchange, because the device may still run them."""
_MAX_TRACED = 3200
"""The largest number of steps times ranks in a trace, which is about 20 MB."""
_PATIENCE = 2.0
"""Seconds to wait for a pending exchange when the run ends. Only an exchange with a lost rank takes longer."""
_NO_EXCHANGE: Future[dict[str, float] | None] = Future()
_NO_EXCHANGE.set_result(None)
_LEAST = {"every_n_steps": 1, "warmup_steps": 0, "max_steps": 1, "trace_steps": 0, "torch_profiler_steps": 0}
_REFRESH_SHARE = 0.002
"""The largest share of the run that interim reports may take."""


@dataclass(frozen=True)
class ProfilerOptions:
    """Options of the profiler. :class:`lightning_freescale.BubbleProfiler` describes those that it has, too.

    Attributes:
        warmup_steps: number of first steps that are left out.
        max_steps: largest number of steps in the report, counted from the end.

    Raises:
        ValueError: a value is invalid.
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
                raise ValueError(f"{name}={value!r} is invalid. Pass a whole number of at least {least}")


class StepProfiler:
    """Profiles one run on one rank. The training loop stamps the steps; ``docs/profiler.md`` shows a plain loop.

    Args:
        timeline: enabled timeline on which the run is recorded.
        device: device of the rank.
        group: gloo group of all ranks that has no other use; None with one rank. All collectives use it.
        options: number of steps per exchange, report and trace.
        run: description of the run.
        dirpath: folder for the files.
        fit_costs: function that fits the features of the ranks to their compute times.
        advise: function that returns advice for the verdict, based on the settings of the run.

    Raises:
        OSError: rank 0 cannot write to the folder. All ranks raise it.

    Attributes:
        files: paths of the written files by name; empty on ranks other than 0.
        history: steps of all ranks on rank 0.
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
        problems = gather_to_all(self.files.problem() if self._leads else None, group)  # all ranks raise the error of rank 0
        if problems[0] is not None:
            raise OSError(problems[0])
        if self._leads and not has_plotly():
            warnings.warn(WITHOUT_PLOTLY, stacklevel=2)  # now, and not after days of training
        self.history = History(run, options.max_steps, fit_costs, advise)
        file = self.files.kineto_file(0 if group is None else group.rank())
        self._kineto = KinetoWindow(options.torch_profiler_steps, device, file)
        self._kineto_steps: list[ResolvedStep] = []
        self._buffer = StepBuffer(timeline, min(options.trace_steps, max(1, _MAX_TRACED // run.world_size)))
        self._exchange = RankExchange(group, timeline.clock)
        self._ended_steps = 0
        self._stamp_cost = seconds_per_stamp(device)
        self._read_memory: Callable[[], MemoryReading | None] = memory_reader(device) or (lambda: None)
        # on the training thread an exchange takes up to 100 ms with 8 ranks on two cores, most of it waiting for ranks without
        # a core; on a separate thread it runs while training waits or a device computes
        self._worker = WorkerThread("freescale-profiler")
        self._pending = _NO_EXCHANGE

    # -- during training

    def end_step(
        self, samples: int = 0, features: Any = None, predicted: float | None = None, plan: PlannedStep | None = None
    ) -> dict[str, float] | None:
        """End the step in progress and open the next. Every few steps, the ranks exchange their records in the background.

        Args:
            samples: number of samples of this rank in the step; 0 if unknown.
            features: numbers that describe the work of this rank for ``fit_costs``, as many on every rank; None if unknown.
            predicted: predicted compute, in a unit that all ranks share in this step; None if unknown.
            plan: balance of all ranks in the plan of the step, passed on rank 0; None if unknown.

        Returns:
            On rank 0, after an exchange, scalars of its steps; otherwise None.

        Raises:
            RuntimeError: an exchange has failed because a rank is lost.
        """
        record = self.timeline.close_step(samples, features, predicted, plan)
        self.timeline.open_step(record.end if record is not None else None)
        if record is None:
            return None
        self._ended_steps += 1
        if self._kineto.running:
            self._kineto.records.append(record)
            if len(self._kineto.records) == self._kineto.steps:
                self._pause(self._kineto.stop)
        elif self._ended_steps > self.options.warmup_steps:
            self._buffer.add_step(record)
            if len(self._buffer.waiting) == self.options.every_n_steps + _LAG:
                return self._start_exchange()
        return self._new_scalars()

    def end_epoch(self) -> dict[str, float] | None:
        """Compare the ranks' clocks if it is time, and return scalars like :meth:`end_step`. Collective."""
        self._pending.exception()  # after the same exchanges, all ranks agree on whether it is time
        scalars = self._new_scalars()
        self._exchange.sync_clocks_if_due()
        return scalars

    # -- at the end

    def write_report(self) -> BubbleReport | None:
        """Return the report on rank 0 and write its files; return None if there is nothing to report. Collective.

        Raises:
            RuntimeError: an exchange has failed because a rank is lost. :meth:`write_interrupted_report` needs no other rank.
        """
        self._pending.result()
        self._kineto.stop()
        self._exchange.sync_clocks()
        if self._buffer.waiting:
            self._exchange_steps(self._buffer.take_steps(0), self._read_memory())
        to_rank_zero = self._exchange.alignment.to_rank_zero
        self._resolve_kineto_steps()
        steps = [*self._kineto_steps, *self._buffer.recent]
        traced, events, idle = gather_trace(self._kineto, steps, to_rank_zero, self._exchange.group)
        self._worker.stop(_PATIENCE)
        if not self._leads or not self.history.added:
            return None
        status = Status(warmup=self.options.warmup_steps)
        return self.files.write(lambda: self._report(status, traced, idle), traced, events)

    def write_interrupted_report(self, reason: str) -> BubbleReport | None:
        """Return the report of the steps so far on rank 0 and write its files, without any communication.

        Before the first exchange, the report has the steps of rank 0 alone, and waits are not divided.
        """
        self._kineto.stop()
        self._worker.stop(_PATIENCE)
        if not self._leads:
            return None
        if not self.history.added and self._buffer.count:
            why = "the run ended before the first exchange of records, so the report has the steps of rank 0 alone"
            records, steps = self._buffer.resolve_rest(self._exchange.alignment.to_rank_zero)
            window = self._exchange.own_window(steps, why)
            self.history.add_windows([window], [record.plan for record in records])
        if not self.history.added:
            return None
        left = self._buffer.count - self.history.added
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
        # memory is read here, at the end of a step: on the worker the next step would have begun
        self._pending = self._worker.submit(self._run_exchange, self._buffer.take_steps(_LAG), self._read_memory())
        if self._kineto.steps and not self._kineto.running and not self._kineto.records:
            self._pause(self._kineto.start)
        return scalars

    def _new_scalars(self) -> dict[str, float] | None:
        if not self._pending.done():
            return None
        pending, self._pending = self._pending, _NO_EXCHANGE
        return pending.result()

    def _run_exchange(self, records: list[StepRecord], memory: MemoryReading | None) -> dict[str, float] | None:
        """Run on the worker: exchange the records; on rank 0, refresh the report and return its scalars."""
        self._exchange.spent_here = self._worker.cpu_seconds
        self._exchange_steps(records, memory)
        if not self._leads:
            return None
        self.files.refresh(lambda: self._report(Status(False, "still running", self.options.warmup_steps, _LAG)))
        return self.history.newest_scalars()

    def _exchange_steps(self, records: list[StepRecord], memory: MemoryReading | None) -> None:
        self._resolve_kineto_steps()
        steps = self._buffer.resolve_taken(records, self._exchange.alignment.to_rank_zero)
        windows = self._exchange.exchange_steps(steps, memory)
        if windows is not None:
            self.history.add_windows(windows, [record.plan for record in records])

    def _resolve_kineto_steps(self) -> None:
        """Resolve the steps of a window that has stopped, before their stamps are released."""
        if not self._kineto.running and len(self._kineto_steps) < len(self._kineto.records):
            self._kineto_steps = self._buffer.resolve_only(self._kineto.records, self._exchange.alignment.to_rank_zero)

    def _report(self, status: Status, traced: Sequence[Any] | None = None, idle: Any = None) -> BubbleReport:
        steps = self._ended_steps
        overhead = Overhead(self._exchange.spent / steps, self.timeline.stamps * self._stamp_cost / steps)
        return self.history.build_report(status, self._exchange.wait_attribution(), overhead, traced, idle)


class ReportFiles(dict[str, Path]):
    """The paths of the files that have been written: ``"report"``, ``"page"`` and ``"trace"``.

    A file that cannot be written causes a warning and does not end training.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._refreshed_at = self._refresh_s = 0.0
        self._final = False
        self._lock = threading.Lock()  # the worker may refresh while the training thread writes the final report

    def kineto_file(self, rank: int) -> Path:
        """Return the path of torch.profiler's file of a rank, in a separate folder for other tools."""
        return self.folder / "torch_profiler" / f"rank_{rank}.json.gz"

    def problem(self) -> str | None:
        """Create the folder and delete torch.profiler's files of an earlier run, which may have had more ranks.

        Returns:
            The reason why the folder is not writable; None if it is.
        """
        probe = self.folder / ".writable"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
            for earlier in self.kineto_file(0).parent.glob("rank_*.json.gz"):
                earlier.unlink()
        except OSError as error:
            return f"the profiler cannot write to dirpath={str(self.folder)!r}: {error}. Pass another folder"
        return None

    def write(
        self, new_report: Callable[[], BubbleReport], traced: Sequence[Sequence[ResolvedStep]], kineto: Sequence[Any] = ()
    ) -> BubbleReport:
        """Build the final report and write all files. There is no trace without steps."""
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
        """Write an interim ``report.json`` in case the run is killed, if the time since the last one allows it."""
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
                warnings.warn(f"the profiler cannot write its files to {self.folder}: {error}", stacklevel=2)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection, which took a third of the time: it scans millions of new lists again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
