"""BubbleProfiler: where the time of every rank's training step went."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_freescale._lightning.ddp import process_group_timeout
from lightning_freescale._lightning.loops import (
    Callback,
    LightningModule,
    PyTorchProfiler,
    Trainer,
    around_validation,
    rank_zero_info,
)
from lightning_freescale._lightning.stages import stages_on
from lightning_freescale.callbacks.workload import describe_run, fit_costs, work_of_step
from lightning_freescale.profiling.profiler import ProfilerOptions, StepProfiler
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.report import BubbleReport


class BubbleProfiler(Callback):
    """Splits every training step of every rank into data wait, compute, straggler wait, transfer and host overhead.

    Works under any strategy that runs one process per device, such as ``"ddp"``, and changes no number. When training ends it
    prints a summary and writes ``report.json``, ``report.html`` and ``trace.json``; meanwhile it logs
    ``freescale/bubble/...`` scalars through the Trainer's loggers and keeps ``report.json`` up to date. It never synchronizes
    the device within an epoch, and its collectives are on a process group of its own.

    Args:
        dirpath: folder to write to; ``bubbles`` in the logger's folder if not given.
        label: name of the run in its report; the strategy's if not given.
        every_n_steps: how often the ranks exchange their records, and log.
        warmup_steps: first steps to leave out.
        max_steps: the report covers this many steps at most, the last ones.
        trace_steps: how many of the last steps go into the trace; 0 for no trace. With more than 64 ranks fewer, 3200 steps
            times ranks in all.
        torch_profiler_steps: run ``torch.profiler`` over this many steps after the first exchange; they are in the trace, and
            out of the report.
        lengths_fn: gives the history lengths of a batch's samples, to tell what of the imbalance lies in the data; with
            :class:`FreeScaleDataModule` they are known.
        verbose: print the summary and where the files are.

    Attributes:
        report: the :class:`~lightning_freescale.profiling.BubbleReport` on rank 0 once training has ended; None before, and on
            the other ranks.
        overlap: the :class:`~lightning_freescale.embeddings.overlap.OverlapReport` of the fit; None if nothing was overlapped.
        files: what was written, by ``"report"``, ``"page"`` and ``"trace"``.

    Raises:
        ValueError: an argument does not fit, or the Trainer has another BubbleProfiler.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        label: str | None = None,
        every_n_steps: int = 50,
        warmup_steps: int = 5,
        max_steps: int = 2000,
        trace_steps: int = 50,
        torch_profiler_steps: int = 0,
        lengths_fn: Callable[[Any], Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.options = ProfilerOptions(every_n_steps, warmup_steps, max_steps, trace_steps, torch_profiler_steps)
        self.dirpath, self.label = dirpath, label
        self.lengths_fn, self.verbose = lengths_fn, verbose
        self.report: BubbleReport | None = None
        self.overlap: Any = None
        self.files: dict[str, Path] = {}
        self._timeline = Timeline()
        self._profiler: StepProfiler | None = None
        self._group: dist.ProcessGroup | None = None
        self._observing = ExitStack()

    # -- before and after

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self.options.torch_profiler_steps and isinstance(getattr(trainer, "profiler", None), PyTorchProfiler):
            raise ValueError(
                f"BubbleProfiler(torch_profiler_steps={self.options.torch_profiler_steps}) and Trainer(profiler='pytorch'): "
                "torch allows one profiler per process, leave out one of them"
            )
        if sum(isinstance(callback, BubbleProfiler) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Trainer(callbacks=...) holds several BubbleProfilers: one sees everything, pass one")
        self.report = self.overlap = None
        self.files = {}
        own = getattr(trainer.strategy, "timeline", None)  # on which a strategy of ours has more to tell
        self._timeline = own if isinstance(own, Timeline) else Timeline()
        self._timeline.enable(trainer.strategy.root_device)
        self._timeline.driven = True
        self._observing.enter_context(stages_on(self._timeline, trainer.strategy))
        # the profiler's alone: its exchanges must not queue behind training's, nor delay them; and made before training starts,
        # where the hook of another callback that fails on one rank would leave the others waiting for it
        self._group = None
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=process_group_timeout(trainer.strategy))
            self._observing.callback(dist.destroy_process_group, self._group)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        dirpath = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "bubbles")
        group = self._group
        self._observing.enter_context(collectives_on(self._timeline, ignored_groups=() if group is None else (group,)))
        self._observing.enter_context(around_validation(trainer, lambda: self._timeline.span("pause", "validation")))
        run = describe_run(trainer, pl_module, self.label)
        device = trainer.strategy.root_device
        self._profiler = StepProfiler(self._timeline, device, group, self.options, run, dirpath, fit_costs)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        report = self._running().write_report()  # if it fails, on_exception reports what there is
        finish = getattr(trainer.strategy, "finish_overlap", None)
        self.overlap = finish() if finish is not None else None
        self._stop_profiling(report)
        if trainer.is_global_zero and report is None:
            rank_zero_info(f"BubbleProfiler: no step after the {self.options.warmup_steps} warm-up steps, nothing to report")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        reason, report = f"{type(exception).__name__}: {exception}".strip(": "), None
        try:
            if self._profiler is not None:  # else the run was not training
                report = self._profiler.write_interrupted_report(reason)
        finally:
            self._stop_profiling(report)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_profiling(None)  # a fit without a step has neither begun nor ended

    def _stop_profiling(self, report: BubbleReport | None) -> None:
        profiler, self._profiler, self._group = self._profiler, None, None  # a group listens as long as anybody knows it
        self._timeline.disable()
        self._observing.close()
        if profiler is None or report is None:
            return
        self.report, self.files = report, dict(profiler.files)
        if self.verbose:
            print(report, *([] if self.overlap is None else [self.overlap]), sep="\n")
            for path in self.files.values():
                print(f"written: {path}")

    # -- while training

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timeline.open_step()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        work = work_of_step(trainer, batch, batch_idx, self.lengths_fn)
        self._log(trainer, self._running().end_step(*work))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, self._running().end_epoch())

    def _log(self, trainer: Trainer, scalars: dict[str, float] | None) -> None:
        if scalars is not None:
            with self._timeline.span("pause", "loggers"):
                for logger in trainer.loggers:
                    logger.log_metrics(scalars, step=trainer.global_step)

    def _running(self) -> StepProfiler:
        assert self._profiler is not None, "Lightning calls on_train_start before"
        return self._profiler
