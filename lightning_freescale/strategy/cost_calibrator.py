"""Costs fitted to the compute times that the strategy measures while it trains."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale._lightning.loops import Trainer, rank_zero_info, rank_zero_warn
from lightning_freescale.balance.calibration import DISAGREEMENT, Calibration, imbalance_by_true_costs
from lightning_freescale.balance.cost import CostFit, CostModel
from lightning_freescale.data.map_style import MapStyleData
from lightning_freescale.strategy.compute_times import ComputeTimes

WINDOW = 15
"""Steps between two exchanges of measured times."""
LAG = 3
"""The newest steps wait for the next exchange: they may still be running on a device."""
COMPARED_STEPS = 8
"""Steps on which two cost models are compared."""


@dataclass(frozen=True)
class CalibrationResult:
    """What rank 0 has found out from the times so far.

    Attributes:
        fit: the model that explains them.
        imbalance_current: of the plan in use, scored by the fit.
        imbalance_fitted: of a plan made with the fit.
        frozen: whether the fit is final.
    """

    fit: CostFit
    imbalance_current: float
    imbalance_fitted: float
    frozen: bool

    def as_numbers(self) -> dict[str, Any]:
        """Return it as rank 0 tells the others."""
        return asdict(self)

    @classmethod
    def from_numbers(cls, told: dict[str, Any]) -> CalibrationResult:
        """Return what rank 0 has told by :meth:`as_numbers`."""
        fit = told["fit"]
        return cls(**{**told, "fit": CostFit(**{**fit, "model": CostModel(**fit["model"])})})


class CostCalibrator:
    """Measures every rank's compute time, fits on rank 0, and has the data module plan anew when that is worth it.

    Only on request: it makes the plan depend on the clock, and a run that nobody asked to be so should repeat.

    Args:
        trainer: the Trainer.
        data: its data module: ``balance_options``, and its ``train``.
        times: of the steps.
        gather: returns the values of all ranks, see :func:`.gather_objects`.
    """

    def __init__(self, trainer: Trainer, data: Any, times: ComputeTimes, gather: Callable[[Any], list[Any]]) -> None:
        self.trainer, self._data = trainer, data
        self._times, self._gather = times, gather
        self._costs: MapStyleData = data.train
        self._calibration, self._replanned = Calibration(), False
        self._sums: list[NDArray[np.float64]] = []
        self._reported_slow: set[int] = set()
        self.stopped = False
        """Whether the fit is final."""

    def start_step(self, sampler: Any, step: int) -> None:
        """Measure the ``step``-th batch of ``sampler``; call it before ``training_step``."""
        if self.stopped:
            return
        if len(self._sums) == WINDOW + LAG:
            self._exchange(sampler)
        self._sums.append(self._costs.features(sampler.plan(sampler.epoch, step)[sampler.rank]).sum(axis=0))

    def _exchange(self, sampler: Any) -> None:
        """Gather all ranks' windows, fit on rank 0, and follow its result on all."""
        first = self._times.step - len(self._sums)
        mine = np.stack(self._sums[:WINDOW]), np.array([self._times.seconds(first + index) for index in range(WINDOW)])
        everyone = self._gather(mine)
        self._sums = self._sums[WINDOW:]
        found, failed = None, ""
        # least squares on another processor may differ in the last digit: rank 0 fits, and tells the others
        if self.trainer.is_global_zero:
            try:
                found = self._fit(everyone, sampler)
            except Exception:  # the other ranks wait for an answer
                failed = traceback.format_exc()
        told, failed = self._gather((found and found.as_numbers(), failed))[0]
        if failed:
            raise RuntimeError(f"calibration failed on rank 0: {failed}")
        if told is not None:
            self._follow(CalibrationResult.from_numbers(told), sampler)

    def _fit(self, everyone: list[Any], sampler: Any) -> CalibrationResult | None:
        """Fit the times of all ranks, on rank 0; None if there are too few."""
        sums, seconds = (np.stack(values, axis=1) for values in zip(*everyone))
        fit = self._calibration.add_window(sums, seconds)
        if fit is None:
            return None
        steps = range(sampler.first_step, len(sampler))[:COMPARED_STEPS]
        batches = [sampler.global_batch(sampler.epoch, step) for step in steps]
        fitted = [self._costs.costs_by(fit.model, batch) for batch in batches]
        used = [sampler.costs[batch] for batch in batches]
        options = {name: value for name, value in sampler.options.items() if name != "max_tokens_per_rank"}

        def imbalance(costs: list[NDArray[np.float64]], **changed: Any) -> float:
            pairs = zip(costs, fitted)
            return imbalance_by_true_costs(pairs, fit.base, sampler.num_replicas, {**options, **changed}, fit.slowness)

        return CalibrationResult(fit, imbalance(used), imbalance(fitted, **self._speeds(fit)), self._calibration.frozen)

    def _speeds(self, fit: CostFit) -> dict[str, Any]:
        """Return the option of the assignment that gives slow ranks less work, if the user wants it."""
        return {"rank_speeds": fit.rank_speeds} if self._data.balance_options.slow_ranks == "rebalance" else {}

    def _follow(self, result: CalibrationResult, sampler: Any) -> None:
        """Do on every rank alike what the result says."""
        fit = result.fit
        self._replanned |= result.imbalance_current > result.imbalance_fitted * (1 + DISAGREEMENT)
        if self._replanned:
            self._data.train.replan(sampler.epoch + 1, fit.model, **self._speeds(fit))
        if self.trainer.is_global_zero:
            self._log(result, sampler)
        self.stopped = result.frozen

    def _log(self, result: CalibrationResult, sampler: Any) -> None:
        fit = result.fit
        scalars = {
            "freescale/calibration/residual": fit.residual,
            "freescale/calibration/imbalance_current": result.imbalance_current,
            "freescale/calibration/imbalance_fitted": result.imbalance_fitted,
        }
        for logger in self.trainer.loggers:
            logger.log_metrics(scalars, step=self.trainer.global_step)
        if result.frozen or self._replanned:
            rank_zero_info(
                f"strategy 'freescale': {fit.model} + {fit.base:.2g} s per step explains {fit.observations} times with "
                f"a median error of {fit.residual:.1%}; by it the plan in use has imbalance {result.imbalance_current:.3f}, "
                f"one made with it {result.imbalance_fitted:.3f}"
                + (f": used from epoch {sampler.epoch + 1} on" if self._replanned else "")
                + ("; the fit is final" if result.frozen else "")
            )
        for rank, times in fit.slow_ranks(sampler.options.get("rank_speeds")).items():
            if rank not in self._reported_slow:
                self._reported_slow.add(rank)
                rank_zero_warn(
                    f"rank {rank} takes {times:.2f} times what its samples explain: a slow or shared device? "
                    "BalanceOptions(slow_ranks='rebalance') would give it less work"
                )
