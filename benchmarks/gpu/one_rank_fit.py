"""A fit that records the step time, the processor time of all threads, and optionally a profile of the last steps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import one_rank
import torch
from one_rank_trace import Profiling, Trace
from one_rank_workload import Batch, Loader
from typing_extensions import override

from lightning_freescale import FreeScaleStrategy


@dataclass
class Fit:
    """The measurements of a fit.

    Attributes:
        step_ms: wall time of a step, mean over the timed steps.
        cpu_ms: processor time of a step by thread: ``training``, ``engine``, and ``others``.
        predicted: share of the lookups whose ids were known ahead; None without overlap.
        trace: trace of the steps after the timed ones; None if there are none.
    """

    step_ms: float = 0.0
    cpu_ms: dict[str, float] = field(default_factory=dict)
    predicted: float | None = None
    trace: Trace | None = None


@dataclass(frozen=True)
class Steps:
    """Numbers of steps that warm up, are timed, and are profiled; one more step follows at the end."""

    warmup: int
    timed: int
    profiled: int = 0

    @property
    def total(self) -> int:
        """The number of all steps."""
        return self.warmup + self.timed + self.profiled + 1  # the last one has no next batch to fetch


def fit(module: Any, data: list[Batch], steps: Steps, device: torch.device, overlap: bool, callbacks: tuple = ()) -> Fit:
    """Train ``module`` on ``data`` in bf16, for as many batches as ``steps`` has."""
    measured = Measured(steps, device)
    fitting = one_rank.trainer(
        device,
        strategy=FreeScaleStrategy(overlap=overlap or "torchrec"),
        precision="bf16-mixed",
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[measured, *callbacks],
    )
    if len(data) != steps.total:
        raise ValueError(f"{len(data)} batches for {steps.total} steps: pass one batch per step")
    fitting.fit(module, Loader(data))
    return measured.found


class Measured(L.Callback):
    """Reads the clocks while the device is idle: before the first and after the last timed step."""

    def __init__(self, steps: Steps, device: torch.device) -> None:
        self.found = Fit()
        self._steps, self._on_gpu = steps, device.type == "cuda"
        self._began: dict[str, float] = {}
        self._profiling: Profiling | None = None

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done, steps = batch_idx + 1, self._steps
        if self._profiling is not None:
            self._profiling.mark()
        if done == steps.warmup:
            self._began = self._clocks()
        if done == steps.warmup + steps.timed:
            self._keep(self._clocks())
            if steps.profiled:
                self._profiling = Profiling(self._on_gpu)
                self._profiling.start()
        if done == steps.warmup + steps.timed + steps.profiled and self._profiling is not None:
            self._synchronize()
            self.found.trace, self._profiling = self._profiling.stop(), None

    @override
    def on_train_end(self, trainer: Any, module: Any) -> None:
        engine = trainer.strategy.engine
        if engine is not None:
            counts = engine.statistics()
            kinds = [counts[f"{kind}_lookups"] for kind in ("predicted", "unpredicted", "mispredicted")]
            self.found.predicted = kinds[0] / sum(kinds)

    def _keep(self, ended: dict[str, float]) -> None:
        taken = {name: 1e3 * (ended[name] - began) / self._steps.timed for name, began in self._began.items()}
        self.found.step_ms = taken.pop("wall")
        taken["others"] = max(0.0, taken.pop("process") - taken["training"] - taken["engine"])
        self.found.cpu_ms = taken

    def _clocks(self) -> dict[str, float]:
        """Return seconds: wall time, and processor time of the process, of this thread and of the engine's thread."""
        self._synchronize()
        engine = [thread for thread in threading.enumerate() if thread.name.startswith("freescale-") and thread.is_alive()]
        return {
            "wall": time.perf_counter(),
            "process": time.process_time(),
            "training": time.thread_time(),
            "engine": sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in engine if thread.ident),
        }

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
