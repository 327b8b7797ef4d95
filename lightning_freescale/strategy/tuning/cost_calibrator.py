"""Fit the costs of samples to compute times that the strategy measures during training."""

from __future__ import annotations

import json
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, astuple
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_freescale._lightning.loops import Trainer, rank_zero_info, rank_zero_warn
from lightning_freescale._lightning.profiler import log_scalars
from lightning_freescale._runtime.object_gather import gather_bytes
from lightning_freescale.balance.calibration import Calibration, imbalance_by_true_costs
from lightning_freescale.balance.cost import CostFit, CostModel
from lightning_freescale.data.map_style import MapStyleData, Refit
from lightning_freescale.profiling.analysis.breakdown import attribute
from lightning_freescale.profiling.analysis.imbalance import split_imbalance
from lightning_freescale.profiling.recording.records import StepRecord, resolve
from lightning_freescale.profiling.recording.timeline import Timeline

WARMUP = 3  # first steps of a fit that are not measured, because they allocate and compile
WINDOW, FEW = 25, 5
"""Steps between two exchanges of measured times, and the smaller number that is enough at the end of an epoch."""
LAG = 3  # newest steps on a device that wait for the next exchange, because they may still be running
COMPARED_STEPS = 4  # steps on which two cost models are compared

_KEPT = 32  # steps whose records are kept
_JUDGED = 200  # newest steps of an epoch that show whether a rank is slow


class ComputeTimes:
    """Starts and ends the steps of an enabled timeline, unless a profiler does, and provides the last compute times."""

    def __init__(self, timeline: Timeline) -> None:
        self.step = -1  # the number of the current step, from 0 on
        self._timeline, self._drives = timeline, not timeline.driven
        self.on_host = timeline.on_host  # whether all work runs on the host, so that an ended step is also computed
        self._records: dict[int, StepRecord] = {}
        timeline.on_step = self._keep

    def start_step(self) -> None:
        """Begin the next step. Call it before ``training_step``."""
        if self._drives:
            self._timeline.close_step()
        self.step += 1
        if self._drives:
            self._timeline.open_step()

    def later(self, step: int) -> Callable[[], float]:
        """Return a function that returns the compute time of an ended step; 0 if the record is missing. It waits."""
        return partial(self._seconds, self._records.get(step))

    def _seconds(self, record: StepRecord | None) -> float:
        clock = self._timeline.clock
        if record is None or clock is None:
            return 0.0
        (resolved,) = resolve([record], clock)
        # with the rank's own arrivals, all time in collectives counts as waiting and not as compute
        return attribute(resolved, [collective.arrive for collective in resolved.collectives]).compute

    def stop(self) -> None:
        """Stop recording, and disable the timeline unless a profiler drives it."""
        self._timeline.on_step = None
        if self._drives:
            self._timeline.disable()

    def _keep(self, record: StepRecord) -> None:
        self._records[self.step] = record
        self._records.pop(self.step - _KEPT, None)


class PredictedAndMeasured:
    """The predicted and the measured imbalance (maximum / mean over ranks) of the newest epoch's measured steps.

    Both are means over steps, weighted by compute.
    """

    def __init__(self) -> None:
        self.epoch, self.steps, self.predicted, self.measured = -1, 0, 1.0, 1.0

    def add_steps(self, epoch: int, predicted: NDArray[np.float64], seconds: NDArray[np.float64]) -> None:
        """Add steps of an epoch: predicted load (any unit) and compute of each rank, both of shape ``[steps, ranks]``."""
        if epoch != self.epoch:
            self.epoch, self.steps, self._sums = epoch, 0, np.zeros(3)
        self.steps += len(seconds)
        mean = seconds.mean(axis=1)
        of_step = predicted.max(axis=1) / np.maximum(predicted.mean(axis=1), 1e-300)
        self._sums += [mean.sum(), of_step @ mean, seconds.max(axis=1).sum()]
        self.predicted, self.measured = (self._sums[1:] / self._sums[0]).tolist()

    def __str__(self) -> str:
        return (
            f"imbalance {self.predicted:.3f} predicted, {self.measured:.3f} measured in {self.steps} steps of epoch "
            f"{self.epoch}. BubbleProfiler() shows the cause of a difference"
        )


class SlowRanks:
    """Ranks that take longer than their samples explain in two consecutive epochs, each judged by its own steps."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[Any, Any]]] = defaultdict(lambda: deque(maxlen=_JUDGED))
        self._found: set[int] = set()

    def add_steps(self, epoch: int, sums: NDArray[np.float64], seconds: NDArray[np.float64]) -> None:
        """Add measured steps of an epoch: shapes ``[steps, ranks, 4]`` and ``[steps, ranks]``."""
        self._steps[epoch].extend(zip(sums, seconds))
        for earlier in [key for key in self._steps if key < epoch - 1]:
            del self._steps[earlier]

    def newly_found(self, fit: CostFit) -> dict[int, float]:
        """Return the smaller slowness of both epochs for each rank that was not returned before."""
        slow = []
        for steps in self._steps.values():
            sums, seconds = (np.array(values) for values in zip(*steps))
            slow.append(split_imbalance(seconds, fit.base + sums @ np.array(astuple(fit.model)), fit.slowness).slow)
        lasting = slow[0].keys() & slow[-1].keys() - self._found if len(slow) == 2 else set()
        self._found |= lasting
        return {rank: min(each[rank] for each in slow) for rank in sorted(lasting)}


class CostCalibrator:
    """Measures the compute time of every rank, fits costs on rank 0, and uses the fit for planning if it predicts better."""

    def __init__(self, trainer: Trainer, data: Any, times: ComputeTimes, group: dist.ProcessGroup) -> None:
        self.trainer = trainer
        self._times, self._group = times, group
        self._costs: MapStyleData = data.train
        self._calibration = Calibration(self._costs.newest_refit.model)
        self._lag = 0 if times.on_host else LAG
        self._rows: list[tuple[int, NDArray[np.float64]]] = []  # epoch; features, planned cost
        self._found = PredictedAndMeasured()
        self._logged_fit = False
        self._slow_ranks = SlowRanks()
        self.stopped = self._costs.costs_are_final
        """Whether measuring has ended."""

    def start_step(self, sampler: Any, step: int) -> None:
        """Measure the ``step``-th batch of ``sampler``. Call it before ``training_step``."""
        if self.stopped:
            return
        ended = len(self._rows) - self._lag
        if ended >= WINDOW or (ended >= FEW and step + 1 == self.trainer.num_training_batches):
            self._exchange(sampler, ended)
        if self._times.step >= WARMUP:
            data = self._costs
            *row, planned = sampler.load(
                sampler.epoch, step, lambda mine: np.column_stack([data.features(mine), sampler.costs[mine]])
            )
            self._rows.append((sampler.epoch, np.array([*row, planned + data.base_in(sampler.epoch)])))

    def end_training(self) -> None:
        """Log the predicted and the measured imbalance, unless they were logged with the final costs."""
        if not self.stopped and self._found.steps and self.trainer.is_global_zero:
            rank_zero_info(f"strategy 'freescale': {self._found}")

    def _exchange(self, sampler: Any, ended: int) -> None:
        """Gather ``ended`` steps of all ranks, fit on rank 0, and use the fit on all ranks from the next epoch on."""
        first = self._times.step - len(self._rows)
        seconds = np.array([self._times.later(first + index)() for index in range(ended)])
        window, self._rows = self._rows[:ended], self._rows[ended:]
        numbers = np.column_stack([np.stack([row for _, row in window]), seconds])
        gathered = gather_bytes(numbers.tobytes(), self._group, only_first=True)
        everyone = [np.frombuffer(of_rank).reshape(numbers.shape) for of_rank in gathered]
        fit, result, failed = None, None, ""
        # only rank 0 fits, because least squares may differ in the last digit on another processor
        if self.trainer.is_global_zero:
            calibration = self._calibration
            try:
                fit = self._fit([epoch for epoch, _ in window], everyone)
                imbalances = (0.0, 0.0) if fit is None else self._imbalances(fit, sampler)
                if fit is not None:
                    result = asdict(calibration.in_use), calibration.base, calibration.frozen
            except Exception:  # the other ranks wait for an answer
                failed = traceback.format_exc()
        result, failed = json.loads(gather_bytes(json.dumps((result, failed)).encode(), self._group)[0])
        if failed:
            self.stopped = True
            rank_zero_warn(f"calibration failed on rank 0, so the costs do not change: {failed}")
        elif result is not None:
            model, base, frozen = result
            self._costs.replan(sampler.epoch + 1, Refit(CostModel(**model), base))
            self.stopped = self._costs.costs_are_final = frozen
            if fit is not None:
                self._log(fit, *imbalances, sampler)

    def _fit(self, epochs: list[int], everyone: list[NDArray[np.float64]]) -> CostFit | None:
        """Fit the times of all ranks; None if there are too few."""
        rows = np.stack(everyone, axis=1)
        seconds = rows[..., -1]
        for epoch in sorted(set(epochs)):
            measured = (np.array(epochs) == epoch) & (seconds > 0).all(axis=1)
            if measured.any():
                self._found.add_steps(epoch, rows[measured, :, 4], seconds[measured])
                self._slow_ranks.add_steps(epoch, rows[measured, :, :4], seconds[measured])
        return self._calibration.add_window(rows[..., :4], seconds)

    def _imbalances(self, fit: CostFit, sampler: Any) -> tuple[float, float]:
        """Return the imbalance of the current plans and of plans by the fit, both with the costs of the fit."""
        steps = range(sampler.first_step, len(sampler))[:COMPARED_STEPS]
        batches = [sampler.global_batch(sampler.epoch, step) for step in steps]
        fitted = [self._costs.costs_by(fit.model, batch) for batch in batches]
        used = [sampler.costs[batch] for batch in batches]
        options = sampler.options_in(sampler.epoch, sampler.handed_out[1])
        options.pop("max_tokens_per_rank", None)

        def imbalance(costs: list[NDArray[np.float64]]) -> float:
            return imbalance_by_true_costs(zip(costs, fitted), fit.base, sampler.num_replicas, options, fit.slowness)

        return imbalance(used), imbalance(fitted)

    def _log(self, fit: CostFit, imbalance_current: float, imbalance_fitted: float, sampler: Any) -> None:
        scalars = {
            "freescale/calibration/residual": fit.residual,
            "freescale/calibration/imbalance_current": imbalance_current,
            "freescale/calibration/imbalance_fitted": imbalance_fitted,
            "freescale/calibration/imbalance_predicted": self._found.predicted,
            "freescale/calibration/imbalance_measured": self._found.measured,
        }
        log_scalars(self.trainer, scalars)
        if self._calibration.improved and not self._logged_fit:
            self._logged_fit = True
            short = CostModel(*(float(f"{value:.4g}") for value in astuple(fit.model)))
            rank_zero_info(
                f"strategy 'freescale': {short} + {fit.base:.2g} s per step predicts compute times better than the current "
                f"costs, with a median error of {fit.residual:.1%} over {fit.observations} compute times, one per rank and "
                f"step. It is used from epoch {sampler.epoch + 1} on. According to it, the current plan has imbalance "
                f"{imbalance_current:.3f} and a plan made with it {imbalance_fitted:.3f}. For bitwise repeatable runs pass "
                "cost=CostModel()"
            )
        if self._calibration.frozen:
            rank_zero_info(f"strategy 'freescale': the costs are final. Measuring has ended: {self._found}")
        for rank, times in self._slow_ranks.newly_found(fit).items():
            rank_zero_warn(
                f"in two epochs, rank {rank} took {times:.2f} times as long as its samples explain. Is its device slow or "
                "shared?"
            )
