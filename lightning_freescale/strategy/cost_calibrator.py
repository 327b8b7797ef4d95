"""Costs fitted to the compute times that the strategy measures while it trains."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_freescale._lightning.loops import Trainer, rank_zero_info, rank_zero_warn
from lightning_freescale.balance.calibration import DISAGREEMENT, Calibration, imbalance_seen, slow_ranks, speeds_of
from lightning_freescale.balance.fit import CostFit
from lightning_freescale.data.map_style import MapStyleData
from lightning_freescale.profiling.analysis.breakdown import attribute
from lightning_freescale.profiling.recording.records import StepRecord
from lightning_freescale.profiling.recording.resolve import resolve
from lightning_freescale.profiling.recording.timeline import Timeline

WINDOW = 15
"""Steps between two exchanges of measured times."""
LAG = 3
"""The newest steps wait for the next exchange: they may still be running on a device."""
JUDGED = 8
"""Steps on which two cost models are compared."""


@dataclass(frozen=True)
class CalibrationResult:
    """What rank 0 makes of the times so far.

    Attributes:
        fit: the model that explains them.
        now: imbalance of the plan in use, scored by the fit.
        then: imbalance of a plan made with the fit.
        replan: whether to use it from the next epoch on.
        frozen: whether the fit is final.
    """

    fit: CostFit
    now: float
    then: float
    replan: bool
    frozen: bool


class Calibrator:
    """Measures every rank's compute time, fits on rank 0, and has the data module plan anew when that is worth it.

    Args:
        trainer: the Trainer.
        data: its data module: ``balance_options``, and its ``train``.
        timeline: records the steps, which are opened and closed here unless a profiler does it.
        group: a gloo group of all ranks, or None if there is one rank.
    """

    def __init__(self, trainer: Trainer, data: Any, timeline: Timeline, group: dist.ProcessGroup | None) -> None:
        self.trainer, self._data, self._timeline, self._group = trainer, data, timeline, group
        self._costs: MapStyleData = data.train
        self._calibration, self._replanned = Calibration(), False
        self._sums: list[NDArray[np.float64]] = []
        self._records: dict[int, StepRecord] = {}
        self._drives, self._closed = not timeline.driven, False
        self._slow: set[int] = set()
        timeline.on_step = self._measured

    def begin_step(self, sampler: Any, step: int) -> None:
        """Before ``training_step``."""
        if self._closed:
            return
        if self._drives:
            self._timeline.close_step()
        if len(self._sums) == WINDOW + LAG:
            with self._timeline.span("pause", "calibration"):
                self._exchange(sampler)
        self._sums.append(self._costs.features(sampler.plan(sampler.epoch, step)[sampler.rank]).sum(axis=0))
        if self._drives and not self._closed:
            self._timeline.open_step()

    def close(self) -> None:
        """Stop measuring."""
        self._closed, self._timeline.on_step = True, None
        if self._drives:
            self._timeline.disable()

    def _measured(self, record: StepRecord) -> None:
        self._records[len(self._sums) - 1] = record

    def _exchange(self, sampler: Any) -> None:
        """All ranks' window to rank 0, its verdict back to all."""
        seconds = [self._compute(index) for index in range(WINDOW)]
        everyone: list[Any] = [(np.stack(self._sums[:WINDOW]), np.array(seconds))]
        self._sums = self._sums[WINDOW:]
        self._records = {index - WINDOW: record for index, record in self._records.items() if index >= WINDOW}
        if self._group is not None:
            mine, everyone = everyone[0], [None] * self._group.size()
            dist.gather_object(mine, everyone if self.trainer.is_global_zero else None, dst=0, group=self._group)
        verdict: list[Any] = [self._judged(everyone, sampler) if self.trainer.is_global_zero else None]
        if self._group is not None:
            dist.broadcast_object_list(verdict, src=0, group=self._group)
        if isinstance(verdict[0], str):
            raise RuntimeError(f"calibration failed on rank 0: {verdict[0]}")
        if verdict[0] is not None:
            self._follow(verdict[0], sampler)

    def _compute(self, index: int) -> float:
        """Seconds of this rank's step, 0 if it was not measured."""
        record, clock = self._records.get(index), self._timeline.clock
        if record is None or clock is None:
            return 0.0
        (step,) = resolve([record], clock)
        # the rank's own arrivals: whatever it waited for, it did not compute
        return attribute(step, [collective.arrive for collective in step.collectives]).compute

    def _judged(self, everyone: list[Any], sampler: Any) -> CalibrationResult | str | None:
        """A failure is a verdict, too: the other ranks wait for one."""
        try:
            return self._judge(everyone, sampler)
        except Exception:
            return traceback.format_exc()

    def _judge(self, everyone: list[Any], sampler: Any) -> CalibrationResult | None:
        """On rank 0."""
        sums, seconds = (np.stack(values, axis=1) for values in zip(*everyone))
        fit = self._calibration.add(sums, seconds)
        if fit is None:
            return None
        batches = [sampler.global_batch(sampler.epoch, step) for step in range(sampler.first_step, len(sampler))[:JUDGED]]
        fitted = [self._costs.costs_by(fit.model, batch) for batch in batches]
        used = [sampler.costs[batch] for batch in batches]
        options = {name: value for name, value in sampler.options.items() if name in ("mode", "count_slack", "rank_speeds")}

        def imbalance(costs: list[NDArray[np.float64]], **changed: Any) -> float:
            return imbalance_seen(zip(costs, fitted), fit.base, sampler.num_replicas, {**options, **changed}, fit.slowness)

        now, then = imbalance(used), imbalance(fitted, **self._speeds(fit))
        return CalibrationResult(fit, now, then, self._replanned or now > then * (1 + DISAGREEMENT), self._calibration.frozen)

    def _speeds(self, fit: CostFit) -> dict[str, Any]:
        """The option of the assignment that gives slow ranks less work, if that was asked for."""
        return {"rank_speeds": speeds_of(fit)} if self._data.balance_options.slow_ranks == "rebalance" else {}

    def _follow(self, verdict: CalibrationResult, sampler: Any) -> None:
        """On every rank alike."""
        fit = verdict.fit
        if verdict.replan:
            self._replanned = True
            self._data.train.replan(sampler.epoch + 1, fit.model, **self._speeds(fit))
        if self.trainer.is_global_zero:
            self._tell(verdict, sampler)
        if verdict.frozen:
            self.close()

    def _tell(self, verdict: CalibrationResult, sampler: Any) -> None:
        fit = verdict.fit
        scalars = {"cost_residual": fit.residual, "imbalance_plan_in_use": verdict.now, "imbalance_fitted_plan": verdict.then}
        for logger in self.trainer.loggers:
            logger.log_metrics({f"freescale/{name}": value for name, value in scalars.items()}, step=self.trainer.global_step)
        if verdict.frozen or verdict.replan:
            rank_zero_info(
                f"strategy 'freescale': {fit.model} + {fit.base:.2g} s per step explains {fit.observations} times with "
                f"a median error of {fit.residual:.1%}; by it the plan in use has imbalance {verdict.now:.3f}, one made with "
                f"it {verdict.then:.3f}"
                + (f": used from epoch {sampler.epoch + 1} on" if verdict.replan else "")
                + ("; the fit is final" if verdict.frozen else "")
            )
        for rank, times in slow_ranks(fit, sampler.options.get("rank_speeds")).items():
            if rank not in self._slow:
                self._slow.add(rank)
                rank_zero_warn(
                    f"rank {rank} takes {times:.2f} times what its samples explain: a slow or shared device? "
                    "BalanceOptions(slow_ranks='rebalance') would give it less work"
                )
