"""Callbacks that measure how every rank spends the time of its training steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_freescale._lightning.ddp import new_gloo_group, process_group_timeout
from lightning_freescale._lightning.loops import (
    Callback,
    LightningModule,
    PyTorchProfiler,
    Trainer,
    around_saving,
    around_validation,
    before_batches,
    rank_zero_info,
)
from lightning_freescale._lightning.profiler import ProfilerCallback, ProgressLine, log_but_on_terminal, log_scalars, stages_on
from lightning_freescale._runtime.error_text import error_text
from lightning_freescale.callbacks.advice import advise
from lightning_freescale.callbacks.loggers import log_report
from lightning_freescale.callbacks.workload import describe_run, fit_costs, plan_of_step, settings_of, work_of_step, workload_of
from lightning_freescale.profiling.hang_watch import HangWatch
from lightning_freescale.profiling.profiler import ProfilerOptions, StepProfiler
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.profiling.reporting.text import summary
from lightning_freescale.profiling.reporting.verdict import verdict_line

_FOLDER = "bubbles"
_CAUSES = ("data_wait", "straggler_wait", "transfer", "wait", "host_overhead", "unexplained")


class BubbleProfiler(ProfilerCallback):
    """Splits every training step of every rank into data wait, compute, straggler wait, transfer and host overhead.

    The callback works with any strategy that runs one process per device, such as ``"ddp"``. It does not change the results of
    training. It never synchronizes the device within an epoch, and its collectives use a separate process group.

    - During training, it logs the bubble and the imbalance of compute to the Trainer's loggers and updates ``report.json``.
    - At the end of training, it prints a summary and writes ``report.json``, ``report.html`` and ``trace.json``. It also sends
      the report to loggers of Weights & Biases, MLflow and TensorBoard.
    - If no step ends for a while, or a rank receives SIGUSR2, one rank prints the position of all ranks and writes
      ``hang.json``. See :class:`~lightning_freescale.profiling.HangWatch`.

    The report omits the first 5 steps of a fit and covers the last 2000 of the others. Its label is the name of the folder
    ``dirpath``, or the name of the strategy if that folder is called ``bubbles``.

    Args:
        dirpath: folder for the files. Default: ``bubbles`` in the logger's folder.
        every_n_steps: number of steps between two exchanges of records among the ranks, which are followed by logging.
        trace_steps: number of steps in the trace, counted from the end; 0 disables the trace. With more than 64 ranks, the
            trace has fewer steps: at most 3200 steps times ranks.
        torch_profiler_steps: number of steps, after the first exchange, that ``torch.profiler`` records. These steps are part
            of the trace, but not of the report. Each rank also writes torch's own file to the folder ``torch_profiler``.
        lengths_fn: function from a batch to the history lengths of its samples. The report needs the lengths to compute which
            part of the imbalance the data cause. :class:`FreeScaleDataModule` provides them.
        verbose: None shows the bubble of the last ``every_n_steps`` steps beside the progress bar. At the end, it prints the
            verdict, the table of the ranks and the path of the full report, and logs the verdict if Lightning's log also has a
            destination other than the terminal. True also prints all other figures and the paths of all files, and logs
            all scalars of the profiler and of strategy ``"freescale"``. False prints no report and no verdict.

    Attributes:
        report: the :class:`~lightning_freescale.profiling.BubbleReport` on rank 0 after training; None before, and on the other
            ranks.
        overlap: the :class:`~lightning_freescale.embeddings.overlap.OverlapReport` of the fit; None if nothing was overlapped.
        files: paths of the written files by name: ``"report"``, ``"page"``, ``"trace"``, and ``"hang"`` on the rank that
            reported a hang.

    Raises:
        ValueError: an argument is invalid, or the Trainer has another BubbleProfiler.
        OSError: the folder is not writable.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        every_n_steps: int = 50,
        trace_steps: int = 50,
        torch_profiler_steps: int = 0,
        lengths_fn: Callable[[Any], Any] | None = None,
        verbose: bool | None = None,
    ) -> None:
        self.options = ProfilerOptions(
            every_n_steps=every_n_steps, trace_steps=trace_steps, torch_profiler_steps=torch_profiler_steps
        )
        self.dirpath, self.lengths_fn, self.verbose = dirpath, lengths_fn, verbose
        self._own_options = {"lengths": lengths_fn is not None, "torch_profiler_steps": torch_profiler_steps}
        self.report: BubbleReport | None = None
        self.overlap: Any = None
        self.files: dict[str, Path] = {}
        self._timeline = Timeline()
        self._profiler: StepProfiler | None = None
        self._group: dist.ProcessGroup | None = None
        self._observing = ExitStack()
        self._line = ProgressLine()
        self._to_log: BubbleReport | None = None
        self._watch: HangWatch | None = None

    # -- before and after

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self.options.torch_profiler_steps and isinstance(getattr(trainer, "profiler", None), PyTorchProfiler):
            raise ValueError(
                f"BubbleProfiler(torch_profiler_steps={self.options.torch_profiler_steps}) cannot be combined with "
                "Trainer(profiler='pytorch'), because torch allows one profiler per process. Remove one of them"
            )
        if sum(isinstance(callback, BubbleProfiler) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Trainer(callbacks=...) contains several BubbleProfilers. Pass one, which records the whole step")
        self.report = self.overlap = None
        self.files = {}
        own = getattr(trainer.strategy, "timeline", None)  # strategies of this package record more spans on their timeline
        self._timeline = own if isinstance(own, Timeline) else Timeline()
        self._timeline.enable(trainer.strategy.root_device)
        self._timeline.driven = True
        self._observing.enter_context(stages_on(self._timeline, trainer.strategy))
        # A separate group: the profiler's exchanges must neither queue behind those of training nor delay them. The group is
        # created before training starts. Later, a failing hook of another callback would let the other ranks wait for it.
        self._group = None
        if trainer.world_size > 1:
            self._group = new_gloo_group(process_group_timeout(trainer.strategy))
            self._observing.callback(dist.destroy_process_group, self._group)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        dirpath = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / _FOLDER)
        group = self._group
        self._observing.enter_context(collectives_on(self._timeline, ignored_groups=() if group is None else (group,)))
        self._observing.enter_context(around_validation(trainer, lambda: self._timeline.span("pause", "validation")))
        self._observing.enter_context(around_saving(trainer, lambda: self._timeline.span("pause", "checkpoint")))
        self._observing.enter_context(before_batches(trainer, self._open_first_step))
        run = describe_run(trainer, pl_module, None if dirpath.name == _FOLDER else dirpath.name, **self._own_options)
        device = trainer.strategy.root_device
        self._seen: deque[Any] = deque(maxlen=self.options.max_steps)  # lengths of this rank's samples, by lengths_fn
        self._profiler = StepProfiler(self._timeline, device, group, self.options, run, dirpath, fit_costs, advise)
        if self.verbose is not False and trainer.is_global_zero:
            self._observing.enter_context(self._line.beside_bar(trainer))
        self._watch = self._observing.enter_context(HangWatch(self._timeline, dirpath))
        if self._watch.problem is not None:
            rank_zero_info(f"BubbleProfiler does not handle SIGUSR2: {self._watch.problem}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        finish = getattr(trainer.strategy, "finish_overlap", None)
        self.overlap = finish() if finish is not None else None
        self._note_outcome(trainer, pl_module)
        report = self._running().write_report()  # if this fails, on_exception writes the report of the last exchange
        self._stop_profiling(report)
        self._to_log = report
        if trainer.is_global_zero and report is None:
            rank_zero_info(f"BubbleProfiler: no report, because no step followed the {self.options.warmup_steps} warm-up steps")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        reason, report = error_text(exception), None
        try:
            if self._profiler is not None:  # otherwise training has not started
                self._note_outcome(trainer, pl_module)
                report = self._profiler.write_interrupted_report(reason)
        finally:
            self._stop_profiling(report)

    def _note_outcome(self, trainer: Trainer, pl_module: LightningModule) -> None:
        settings, heat = settings_of(trainer, **self._own_options), getattr(self.overlap, "heat", None)
        workload = workload_of(trainer, pl_module, self._seen, self.overlap)
        self._running().history.note_outcome(settings, heat=None if heat is None else vars(heat), workload=workload)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_profiling(None)  # in a fit without steps, neither on_train_start nor on_train_end was called
        report, self._to_log = self._to_log, None
        if report is not None:  # in teardown, so that a slow server does not delay the last checkpoint
            log_report(trainer.loggers, report, self.files, trainer.global_step)

    def _stop_profiling(self, report: BubbleReport | None) -> None:
        profiler, watch = self._profiler, self._watch
        self._profiler = self._watch = self._group = None  # a group listens as long as there is a reference to it
        self._timeline.disable()
        self._observing.close()
        if watch is not None and watch.file is not None:
            self.files["hang"] = watch.file
        if profiler is None or report is None:
            return
        self.report, self.files = report, {**profiler.files, **self.files}
        if self.verbose is not False:
            self._print(report)

    def _print(self, report: BubbleReport) -> None:
        document = report.document(series=False)
        log_but_on_terminal(verdict_line(document))
        print(summary(document, brief=not self.verbose))
        if not self.verbose:
            path = self.files.get("page", self.files.get("report"))
            if path is not None:
                here = Path.cwd()
                print(f"full report: {path.relative_to(here) if path.is_relative_to(here) else path}")
            return
        if self.overlap is not None:
            print(self.overlap)
        for path in self.files.values():
            print(f"written: {path}")

    # -- while training

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timeline.open_step()

    def _open_first_step(self) -> None:
        if not self._timeline.recording:  # the fit resumes inside an epoch
            self._timeline.open_step()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        work = work_of_step(trainer, batch, batch_idx, self.lengths_fn, self._seen)
        self._log(trainer, self._running().end_step(*work, plan_of_step(trainer, batch_idx)))

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.note_progress()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, self._running().end_epoch())

    def _log(self, trainer: Trainer, scalars: dict[str, float] | None) -> None:
        if scalars is not None:
            self._line.show(_live_text(scalars))
            with self._timeline.span("pause", "loggers"):
                log_scalars(trainer, scalars)

    def _running(self) -> StepProfiler:
        assert self._profiler is not None
        return self._profiler


def _live_text(scalars: Mapping[str, float]) -> str:
    """Return the bubble, its largest cause and the slowest rank as text."""
    figures = {name.removeprefix("freescale/bubble/"): value for name, value in scalars.items()}
    cause = max(_CAUSES, key=figures.__getitem__)
    named = "wait for peers" if cause == "wait" else cause.replace("_", " ")
    slowest = f", slowest rank {figures['slowest_rank']:.0f}" if "slowest_rank" in figures else ""
    return f"{figures['fraction']:.1%} ({named} {figures[cause]:.1%}{slowest})"


class AddedProfiler(Callback):
    """Adds a :class:`BubbleProfiler` to the Trainer of a script that ``freescale profile run`` runs.

    The profiler is added at the beginning of a fit, because ``configure_callbacks`` may add another one until then. It writes
    each further fit of the Trainer to a new folder.

    Args:
        options: arguments of the BubbleProfiler.
        fits: file to which each rank adds a line with its number in each fit.
    """

    def __init__(self, options: dict[str, Any], fits: str) -> None:
        self.options, self.fits = options, Path(fits)
        self._profiler: BubbleProfiler | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if stage != "fit" or self not in callbacks:  # two Trainers that share a list of callbacks add two of these to it
            return
        # The number of rank 0: a rank that Lightning has started counts its own fits, and may have more of them.
        number = trainer.strategy.broadcast(self._count_fit(trainer.global_rank))
        folder = self._folder(trainer.log_dir or trainer.default_root_dir, number)
        if self._profiler is not None and self._profiler in callbacks:
            self._profiler.dirpath = folder
            return
        if any(isinstance(callback, BubbleProfiler) for callback in callbacks):
            rank_zero_info("freescale profile: the script's own BubbleProfiler is used for this fit; the options are ignored")
            return
        self._profiler = profiler = BubbleProfiler(**self.options | {"dirpath": folder})
        kept = [callback for callback in callbacks if callback is self or not isinstance(callback, AddedProfiler)]
        at = kept.index(self)
        trainer.callbacks = [*kept[:at], profiler, *kept[at:]]  # type: ignore[attr-defined]
        profiler.setup(trainer, pl_module, stage)

    def _count_fit(self, rank: int) -> int:
        with self.fits.open("a+") as file:
            file.write(f"{rank}\n")
            file.seek(0)
            return file.read().split().count(str(rank))

    def _folder(self, log_dir: str, number: int) -> Path | None:
        """Return the folder of the fit with this number, counted from 1; None for the profiler's default."""
        given = self.options["dirpath"]
        if number == 1:
            return given and Path(given)
        base = Path(given) if given else Path(log_dir) / _FOLDER
        return base.with_name(f"{base.name}_{number}")
