"""Watches the plan of the steps while it is trained on: equal on all ranks, how balanced, are its costs right?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from lightning_freescale._lightning.loops import Trainer, rank_zero_info
from lightning_freescale._object_gather import gather_objects
from lightning_freescale.balance import BalanceReport, StepBalance, advise
from lightning_freescale.balance.report import BalanceSums
from lightning_freescale.data.map_style import MapStyleData, map_style_data
from lightning_freescale.datamodule import FreeScaleDataModule
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.autopilot import Autopilot
from lightning_freescale.strategy.compute_times import ComputeTimes
from lightning_freescale.strategy.cost_calibrator import CostCalibrator
from lightning_freescale.strategy.padding_watch import PaddingWatch


class BalanceMonitor:
    """Compares, logs and calibrates the plan of the training loader's sampler, and has the autopilot follow the steps.

    Args:
        trainer: the Trainer, with its loader in place.
        timeline: where the strategy's compute times are recorded.
        group: gloo's, of all ranks, and nobody else's: what is exchanged here must not queue behind training's collectives.
            None for a single rank.
        new_autopilot: makes it, given how to gather and compute times; returns None if nothing is to be chosen.

    Attributes:
        autopilot: what it has made.
    """

    def __init__(
        self,
        trainer: Trainer,
        timeline: Timeline,
        group: dist.ProcessGroup | None,
        new_autopilot: Callable[[Callable[[Any], list[Any]], ComputeTimes | None], Autopilot | None],
    ) -> None:
        self.trainer = trainer
        self._timeline = timeline
        self._epoch: int | None = None
        self._planned_by: tuple[Any, dict[str, Any]] = None, {}  # costs and options of that epoch: the next may have others
        self._reported = False
        self._sums = BalanceSums()
        self._logged_step = -1
        self._group = group
        data = calibrated_data(trainer)
        self._times = ComputeTimes(timeline) if timeline.enabled else None
        self._calibrator = None
        if data is not None and self._times is not None and group is not None:
            self._calibrator = CostCalibrator(trainer, data, self._times, group)
        train = map_style_data(trainer)
        self._padding = None
        if train is not None and train.lengths is not None and not train.padding_is_known:
            self._padding = PaddingWatch(train, self._gather)
        self.autopilot = new_autopilot(self._gather, self._times)

    def start_step(self, step: int, batch: Any) -> float:
        """Follow the plan to its ``step``-th batch, before ``training_step``, and return the factor for this rank's loss."""
        sampler: Any = getattr(self.trainer.train_dataloader, "sampler", None)
        if hasattr(sampler, "balance"):
            if sampler.epoch != self._epoch:
                self._start_epoch(sampler)
            if self.trainer.is_global_zero:
                self._log_step(self._with_base(sampler, sampler.balance(step)))
        if self._times is not None:
            self._times.start_step()
        with self._timeline.span("pause", "calibration") if self._is_measuring else nullcontext():
            self._measure(sampler, step)
        if self._padding is not None and self._padding.observe(sampler, step, batch):
            self._padding = None
            if self._plans_padding:
                self._sums = BalanceSums()  # of the steps before, padding was unknown
        return float(sampler.loss_weight(step)) if hasattr(sampler, "loss_weight") else 1.0

    def pause(self) -> None:
        """Note that validation runs in the step which is under way."""
        if self.autopilot is not None:
            self.autopilot.pause()

    def end_training(self) -> None:
        """Report the last epoch, and stop."""
        self._end_epoch()
        if self._calibrator is not None:
            self._calibrator.end_training()
        if self.autopilot is not None:
            self.autopilot.end_training()
        self.stop()

    def stop(self) -> None:
        """Give up measurements; also after training that failed."""
        self._stop_times()
        self._calibrator = self._group = None

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank. Collective."""
        return [value] if self._group is None else gather_objects(value, self._group)

    def _measure(self, sampler: Any, step: int) -> None:
        """Have calibrator and autopilot note that a step begins."""
        if self._calibrator is not None:
            self._calibrator.start_step(sampler, step)
        if self.autopilot is not None:
            cost = 0.0
            if not self.autopilot.frozen and hasattr(sampler, "balance"):
                balance = sampler.balance(step)
                # a candidate must not be credited with less padding: that is what it is tried for
                cost = balance.cost if balance.padding is not None else balance.balanced * balance.cost
            self.autopilot.start_step(getattr(sampler, "epoch", self.trainer.current_epoch), step, cost)
        if not self._is_measuring:
            self._stop_times()

    @property
    def _is_measuring(self) -> bool:
        calibrates = self._calibrator is not None and not self._calibrator.stopped
        return calibrates or (self.autopilot is not None and not self.autopilot.frozen)

    def _stop_times(self) -> None:
        if self._times is not None:
            self._times.stop()
            self._times = None

    def _start_epoch(self, sampler: Any) -> None:
        """Report the epoch before, and raise if the ranks have not the same plan: samples would be lost and repeated."""
        self._end_epoch()
        self._epoch, self._planned_by = sampler.epoch, (getattr(sampler, "costs", None), getattr(sampler, "options", {}))
        if self._group is None or not hasattr(sampler, "digest"):
            return
        # here and not in the loader: a collective in an iterator would hang whoever looks at a loader on one rank
        with self._timeline.collective("plan"):
            digests = self._gather(sampler.digest())
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RuntimeError(
                f"the ranks plan epoch {sampler.epoch} differently: ranks {others} do not agree with rank 0, so samples would "
                "be lost and repeated. Give every rank the same lengths, cost, seed and options, and a cost function without "
                "randomness"
            )

    def _with_base(self, sampler: Any, balance: StepBalance) -> StepBalance:
        base = self._base_in(sampler.epoch)
        return balance.with_base(base, sampler.num_replicas) if base else balance

    @property
    def _plans_padding(self) -> bool:
        """Whether steps are planned for padded batches, these or later ones."""
        train = map_style_data(self.trainer)
        return train is not None and train.plans_padding

    def _base_in(self, epoch: int) -> float:
        train = map_style_data(self.trainer)
        return 0.0 if train is None else train.base_in(epoch)

    def _log_step(self, balance: StepBalance) -> None:
        if balance.padding is None and self._plans_padding:
            return  # the loader had read it before padding was known
        self._sums.add_step(balance)
        trainer: Any = self.trainer
        due = trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0
        if due and trainer.global_step != self._logged_step:  # several batches may make one step
            self._logged_step = trainer.global_step
            self._log_scalars(BalanceReport.from_steps([balance]).scalars("step"))

    def _end_epoch(self) -> None:
        sums, self._sums = self._sums, BalanceSums()
        if not sums.steps:
            return
        report = sums.report()
        self._log_scalars(report.scalars("epoch"))
        if not self._reported:
            self._reported = True
            rank_zero_info(f"strategy 'freescale': predicted {report}")
            if (advice := self._advice(report)) is not None:
                rank_zero_info(advice)

    def _advice(self, report: BalanceReport) -> str | None:
        sampler: Any = getattr(self.trainer.train_dataloader, "sampler", None)
        if not getattr(sampler, "balance_steps", False):
            return None
        train = map_style_data(self.trainer)
        lengths = None if train is None else train.lengths
        costs, given = self._planned_by
        options: dict[str, Any] = {"assignment_mode": given["assignment_mode"]}
        if sampler.budget is None:  # else it is the limit
            options |= {"max_tokens_per_rank": given.get("max_tokens_per_rank"), "tokens": sampler.tokens}
        if train is not None and sampler.budget is None:
            options["assignment_mode"] = train.assignment_mode
        if report.padding is not None:
            options["padded"] = True
        options["base"] = 0.0 if self._epoch is None else self._base_in(self._epoch)
        options |= {name: getattr(sampler, name) for name in ("window", "drop_last", "seed")}
        return advise(costs, sampler.num_replicas, sampler.batch_size, report, lengths, **options)

    def _log_scalars(self, scalars: dict[str, float]) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(scalars, step=self.trainer.global_step)


def calibrated_data(trainer: Trainer) -> FreeScaleDataModule | None:
    """Return the data module, if it is ours, its costs are to be fitted, and there are ranks to balance."""
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, FreeScaleDataModule) or trainer.world_size == 1:  # which has nothing to balance
        return None
    return data if isinstance(data.train, MapStyleData) and data.train.calibrates else None
