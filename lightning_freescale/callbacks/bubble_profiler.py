"""BubbleProfiler: where the time of every rank's training step went."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

from lightning_freescale._lightning import Callback, LightningModule, Trainer, rank_zero_info
from lightning_freescale.profiling.attribution import ResolvedStep, resolve
from lightning_freescale.profiling.clock import offset_to_rank_zero
from lightning_freescale.profiling.gather import gather_parts, gather_steps
from lightning_freescale.profiling.report import BubbleReport
from lightning_freescale.profiling.timeline import StepRecord, Timeline
from lightning_freescale.profiling.trace import write_trace


class BubbleProfiler(Callback):
    """Splits every training step of every rank into data wait, compute, straggler wait, transfer and host overhead.

    Needs ``strategy="freescale"``. Prints a table when training ends, logs ``freescale/...`` scalars through the Trainer's
    loggers, and writes a Chrome trace of the last steps. It never synchronizes the device.

    Args:
        every_n_steps: how often the ranks exchange their records (two small collectives) and log.
        warmup_steps: first steps to leave out.
        keep_steps: the report covers this many steps at most, the last ones.
        trace_steps: how many of the last steps go into the trace; 0 for no trace.
        trace_path: where to write it; ``freescale_trace.json`` in the logger's folder if not given.
        verbose: print the table and where the trace is.

    Attributes:
        report: the :class:`~lightning_freescale.profiling.BubbleReport` so far, the same on every rank; None before the
            first exchange.
        overlap: the :class:`~lightning_freescale.embeddings.overlap.OverlapReport` of the fit, None if nothing was overlapped.
        trace: path of the written trace, or None.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        warmup_steps: int = 5,
        keep_steps: int = 2000,
        trace_steps: int = 50,
        trace_path: str | Path | None = None,
        verbose: bool = True,
    ) -> None:
        for name, value, least in (
            ("every_n_steps", every_n_steps, 1),
            ("warmup_steps", warmup_steps, 0),
            ("keep_steps", keep_steps, 1),
            ("trace_steps", trace_steps, 0),
        ):
            if value < least:
                raise ValueError(f"BubbleProfiler({name}={value!r}): pass {least} or more")
        self.every_n_steps, self.warmup_steps, self.keep_steps = every_n_steps, warmup_steps, keep_steps
        self.trace_steps, self.trace_path, self.verbose = trace_steps, trace_path, verbose
        self.report: BubbleReport | None = None
        self.trace: Path | None = None
        self.overlap: Any = None
        self._pause = ExitStack()
        self._reset()

    def _reset(self) -> None:
        self._seen, self._overhead, self._offset = 0, 0.0, 0.0
        self._records: list[StepRecord] = []
        self._recent: deque[ResolvedStep] = deque(maxlen=self.trace_steps)
        self._parts: deque[NDArray[np.float64]] = deque(maxlen=self.keep_steps)
        self._samples: deque[NDArray[np.int64]] = deque(maxlen=self.keep_steps)

    # -- hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(getattr(trainer.strategy, "timeline", None), Timeline):
            raise ValueError(
                f"BubbleProfiler needs Trainer(strategy='freescale'), not {type(trainer.strategy).__name__}: the strategy "
                "records the timeline"
            )
        self._reset()
        self._timeline: Timeline = trainer.strategy.timeline  # type: ignore[attr-defined]
        self._timeline.enable(trainer.strategy.root_device)
        self._timeline.driven = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # its own gloo group: the exchange must not queue behind training's collectives
        timeout: timedelta | None = trainer.strategy._timeout  # type: ignore[attr-defined]
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        self._offset = offset_to_rank_zero(self._group)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timeline.open_step()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        samples = sampler.counts(batch_idx)[sampler.rank] if hasattr(sampler, "counts") else 0  # type: ignore[union-attr]
        record = self._timeline.close_step(samples)
        if record is None:  # Lightning opens no epoch when it resumes inside one
            self._timeline.open_step()
            return
        self._timeline.open_step(record.end)
        self._seen += 1
        if self._seen <= self.warmup_steps:
            return
        self._records.append(record)
        if len(self._records) > self.every_n_steps:
            with self._timeline.span("pause", "profiler"):
                self._exchange(trainer, self._records[:-1])  # the newest may still be running on a device
            self._records = self._records[-1:]

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._pause.enter_context(self._timeline.span("pause", "validation"))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause.close()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._records:
            self._exchange(trainer, self._records)
        finish = getattr(trainer.strategy, "finish_overlap", None)
        self.overlap = finish() if finish is not None else None
        steps = gather_steps(list(self._recent), self._group) if self.trace_steps else []
        self._stop()
        path = self._path(trainer)  # on every rank: Lightning agrees on its folder by a broadcast
        if not trainer.is_global_zero:
            return
        if self.report is None:
            rank_zero_info(f"BubbleProfiler: no step after the {self.warmup_steps} warm-up steps, nothing to report")
            return
        if steps:
            self.trace = write_trace(path, steps)
        if self.verbose:
            print(self.report)
            if self.overlap is not None:
                print(self.overlap)
            if self.trace is not None:
                print(f"trace of the last {len(steps)} steps: {self.trace} (open it at https://ui.perfetto.dev)")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._pause.close()
        if hasattr(self, "_timeline"):
            self._timeline.disable()

    # -- the exchange

    def _exchange(self, trainer: Trainer, records: list[StepRecord]) -> None:
        began = time.perf_counter()
        assert self._timeline.clock is not None
        steps = [resolve(record, self._timeline.clock, self._offset) for record in records]
        self._recent.extend(steps)
        parts, samples = gather_parts(steps, self._group)
        self._parts.extend(parts)
        self._samples.extend(samples)
        window = BubbleReport(parts, samples)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.log_metrics(window.scalars(), step=trainer.global_step)
        self._overhead += time.perf_counter() - began
        self.report = BubbleReport(
            np.stack(self._parts), np.stack(self._samples), self.warmup_steps, self._overhead / self._seen
        )

    def _stop(self) -> None:
        self._timeline.disable()
        dist.destroy_process_group(self._group)

    def _path(self, trainer: Trainer) -> Path:
        return Path(self.trace_path or Path(trainer.log_dir or trainer.default_root_dir) / "freescale_trace.json")
