"""Owner of all measurements of a fit: compute times, calibration of costs, and the autopilot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_freescale._lightning.ddp import new_gloo_group
from lightning_freescale._lightning.loops import Trainer, rank_zero_info
from lightning_freescale._lightning.profiler import stages_on
from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.balance import MicroBatchSchedule
from lightning_freescale.data.map_style import MapStyleData
from lightning_freescale.datamodule import FreeScaleDataModule
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.tuning.autopilot import MICRO_BATCHES, SPLIT_BACKWARD, Autopilot
from lightning_freescale.strategy.tuning.cost_calibrator import ComputeTimes, CostCalibrator

if TYPE_CHECKING:
    from lightning_freescale.training.table_step import TableStep


class Tuner:
    """Measures the steps of a fit for the cost calibrator and for the autopilot.

    Creating it is collective. The strategy creates it at set-up and not at the start of training, where a failing hook of one
    rank would leave the other ranks waiting for a process group.
    """

    def __init__(self, trainer: Trainer, timeline: Timeline, timeout: timedelta, at_teardown: ExitStack) -> None:
        self._trainer, self._timeline, self._at_teardown = trainer, timeline, at_teardown
        # of all ranks, so that measurements do not queue behind collectives of training; None for a single rank
        self.group: dist.ProcessGroup | None = None
        self.autopilot: Autopilot | None = None
        self._times: ComputeTimes | None = None
        self._calibrator: CostCalibrator | None = None
        data: Any = getattr(trainer, "datamodule", None)
        several = trainer.world_size > 1  # a single rank has nothing to balance
        ours = several and isinstance(data, FreeScaleDataModule) and isinstance(data.train, MapStyleData)
        self._data: FreeScaleDataModule | None = data if ours and data.train.calibrates else None
        if dist.is_initialized() and several:
            self.group = new_gloo_group(timeout)
            at_teardown.callback(dist.destroy_process_group, self.group)
        if self._data is not None:
            self.record_steps()

    def record_steps(self) -> None:
        """Make the strategy record on the timeline from now on, unless a profiler already does."""
        if not self._timeline.enabled:
            self._timeline.enable(self._trainer.strategy.root_device)
            self._at_teardown.enter_context(stages_on(self._timeline, self._trainer.strategy))
            self._at_teardown.enter_context(collectives_on(self._timeline))

    def start(
        self, table_step: TableStep | None, target: float | None, hides_nothing: str, chosen: Mapping[str, Any]
    ) -> Autopilot | None:
        """Start measuring, after the Trainer has its loader, and return the autopilot if there is one.

        ``hides_nothing`` is the reason why compute does not hide the exchange of all collections, or empty. ``chosen`` is the
        state of the autopilot in the loaded checkpoint.
        """
        self._times = ComputeTimes(self._timeline) if self._timeline.enabled else None
        self._calibrator = None
        if self._data is not None and self._times is not None and self.group is not None:
            self._calibrator = CostCalibrator(self._trainer, self._data, self._times, self.group)
        self.autopilot = self._new_autopilot(table_step, target, hides_nothing)
        if self.autopilot is not None and target is not None:
            self.autopilot.load_state_dict(chosen)
        self._at_teardown.callback(self.stop)
        return self.autopilot

    def start_step(self, sampler: Any, step: int) -> None:
        """Begin the ``step``-th step of ``sampler``, before ``training_step``. Collective in steps that decide."""
        if self._times is not None:
            self._times.start_step()
        with self._timeline.span("pause", "calibration") if self._is_measuring else nullcontext():
            if self._calibrator is not None:
                self._calibrator.start_step(sampler, step)
            if self.autopilot is not None:
                cost = 0.0
                if not self.autopilot.frozen and hasattr(sampler, "balance"):
                    balance = sampler.balance(step)
                    # less padding must not lower the cost, because a candidate may save time by it
                    cost = balance.cost if balance.padding is not None else balance.balanced * balance.cost
                self.autopilot.start_step(getattr(sampler, "epoch", self._trainer.current_epoch), step, cost)
            if not self._is_measuring:
                self._stop_times()

    def end_training(self) -> None:
        """Log the results, and stop."""
        if self._calibrator is not None:
            self._calibrator.end_training()
        if self.autopilot is not None:
            self.autopilot.end_training()
        self.stop()

    def stop(self) -> None:
        """Stop measuring. It is also called after a failure."""
        self._stop_times()
        self._calibrator = None

    @property
    def _is_measuring(self) -> bool:
        calibrates = self._calibrator is not None and not self._calibrator.stopped
        return calibrates or (self.autopilot is not None and not self.autopilot.frozen)

    def _stop_times(self) -> None:
        if self._times is not None:
            self._times.stop()
            self._times = None

    def _new_autopilot(self, step: TableStep | None, target: float | None, hides_nothing: str) -> Autopilot | None:
        schedule = schedule_of(self._trainer.train_dataloader)
        settings: dict[str, Sequence[Any]] = {}  # allowed values of each; settings that keep results bitwise come first
        start: dict[str, Any] = {}
        if target is not None and step is not None and step.overlapped and step.looks_ahead:
            settings[SPLIT_BACKWARD], start[SPLIT_BACKWARD] = [False, True], step.split_backward
        if schedule is not None and target is None and not schedule.decided:
            settings[MICRO_BATCHES], start[MICRO_BATCHES] = schedule.candidates, 1
        elif schedule is not None and target is not None and len(schedule.candidates) > 1 and not hides_nothing:
            settings[MICRO_BATCHES], start[MICRO_BATCHES] = schedule.candidates, schedule.chosen
        if target is not None:
            _log_choice(target, settings, hides_nothing)
        if not settings:
            return None
        return Autopilot(
            self._trainer,
            settings,
            start,
            schedule=schedule,
            table_step=step,
            gather=None if self.group is None else partial(gather_objects, group=self.group),
            times=None if target is None else self._times,
            target=target,
        )


def schedule_of(loader: Any) -> MicroBatchSchedule | None:
    """Return the micro-batch schedule of a training loader, if there is one."""
    schedule = getattr(getattr(loader, "sampler", None), "micro_batches", None)
    return schedule if isinstance(schedule, MicroBatchSchedule) else None


def settle_without_exchange(loader: Any, reason: str) -> bool:
    """Choose one micro-batch for ``"auto"`` because of ``reason``, and return whether this changes the choice.

    It overrides the choice of a checkpoint, because the run that wrote it may have had an exchange to hide.
    """
    schedule = schedule_of(loader)
    if schedule is None or not schedule.auto or schedule.chosen == 1:
        return False
    schedule.settle(1)
    instead = f", and not {schedule.measured} as measured in the run that wrote the checkpoint" if schedule.measured else ""
    rank_zero_info(f"FreeScaleDataModule(micro_batches='auto'): 1, because {reason}{instead}")
    return True


def hold_micro_batches(loader: Any, kept: Mapping[str, Any]) -> None:
    """Fix the number of micro-batches of ``"auto"`` until the autopilot tries it: the number in ``kept``, or 1."""
    schedule = schedule_of(loader)
    if schedule is not None and schedule.auto:
        kept_number = kept.get(MICRO_BATCHES)
        if kept_number in schedule.candidates:
            schedule.settle(kept_number)
        elif not schedule.decided:
            schedule.settle(1)


def _log_choice(target: float, settings: Mapping[str, Sequence[Any]], hides_nothing: str) -> None:
    if not settings:
        rank_zero_info(
            f"FreeScaleStrategy(target_bubble_reduction={target:g}): there is nothing to choose from, because {hides_nothing}"
        )
        return
    values = "; ".join(f"{name} from {', '.join(map(str, values))}" for name, values in settings.items())
    why_not = hides_nothing or "FreeScaleDataModule(micro_batches='auto') is not set, or allows only one number"
    left_out = "" if MICRO_BATCHES in settings else f". Not micro_batches, because {why_not}"
    rank_zero_info(f"FreeScaleStrategy(target_bubble_reduction={target:g}): chooses {values}{left_out}")
