"""How many micro-batches a step should have, measured in the first steps of a fit."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale._lightning.loops import Trainer, rank_zero_info
from lightning_freescale._objects import gather_objects
from lightning_freescale.balance import MicroBatchSchedule
from lightning_freescale.profiling.recording.clocks import clock_for

MEASURED = 15
"""Steps of each candidate."""
LONGEST = 100
"""Steps of a trial for each candidate, those that cannot be timed included; then it ends without a result."""
WORTH_IT = 0.99
"""Share of the time with one micro-batch that another number must stay below."""
_MARGIN = 8
"""Steps that a rank's loader may read while the ranks agree."""


def schedule_of(loader: Any) -> MicroBatchSchedule | None:
    """Return the schedule that a training loader cuts its batches by, if there is one."""
    schedule = getattr(getattr(loader, "sampler", None), "micro_batches", None)
    return schedule if isinstance(schedule, MicroBatchSchedule) else None


def settle_without_exchange(loader: Any, reason: str) -> bool:
    """Choose one micro-batch for ``"auto"``, if there is a ``reason`` why more cannot help; return whether that was news.

    Whatever a checkpoint has brought: in the run that wrote it, there may have been something to hide.
    """
    schedule = schedule_of(loader)
    if not reason or schedule is None or not schedule.auto or schedule.chosen == 1:
        return False
    schedule.settle(1)
    instead = f", and not {schedule.measured} as measured in the run that wrote the checkpoint" if schedule.measured else ""
    rank_zero_info(f"FreeScaleDataModule(micro_batches='auto'): 1, because {reason}{instead}")
    return True


@dataclass
class _Step:
    """A step that has begun: its place, the candidate that it measures, if any, and when it began."""

    epoch: int
    step: int
    candidate: int | None
    start: Any

    def is_followed_by(self, other: _Step) -> bool:
        """Whether the time between the two is that of one step."""
        return (other.epoch, other.step) == (self.epoch, self.step + 1)


class MicroBatchTrial:
    """Times the candidates of a schedule as they take turns, and decides for the quickest, on all ranks alike.

    Where they cannot be timed, it decides for 1 after :data:`LONGEST` steps for each.

    Args:
        trainer: the Trainer.
        schedule: not decided.
        group: a gloo group of all ranks; None if there is one rank.
    """

    def __init__(self, trainer: Trainer, schedule: MicroBatchSchedule, group: dist.ProcessGroup | None) -> None:
        self._trainer, self._schedule, self._group = trainer, schedule, group
        self._clock = clock_for(torch.device(trainer.strategy.root_device))
        self._under_way: _Step | None = None
        self._steps = 0
        # stamps, as the clock tells their seconds only when they are long past
        self._measured: dict[int, list[tuple[Any, Any]]] = {candidate: [] for candidate in schedule.candidates}

    def start_step(self, epoch: int, step: int) -> bool:
        """Note that a step begins; return False once all is decided. Collective when it decides."""
        before, now = self._under_way, _Step(epoch, step, self._schedule.is_measured(epoch, step), self._clock.stamp())
        if before is not None and before.candidate is not None and before.is_followed_by(now):
            measured = self._measured[before.candidate]
            if len(measured) < MEASURED:
                measured.append((before.start, now.start))
        self._under_way = now
        self._steps += 1
        if not self._is_complete() and self._steps < LONGEST * len(self._measured):
            return True
        self._decide()
        return False

    def pause(self) -> None:
        """Leave the step that was under way out: something else ran in it."""
        if self._under_way is not None:
            self._under_way.candidate = None

    def _is_complete(self) -> bool:
        return all(len(measured) == MEASURED for measured in self._measured.values())

    def _decide(self) -> None:
        seconds, complete = self._clock.seconds, self._is_complete()
        mine = {
            candidate: median(seconds(end) - seconds(start) for start, end in measured)
            for candidate, measured in self._measured.items()
            if complete
        }
        mine_and_read = mine, self._schedule.handed_out
        everyone = [mine_and_read] if self._group is None else gather_objects(mine_and_read, self._group)
        epoch, last_step = max(handed_out for _, handed_out in everyone)
        step, chosen = last_step + _MARGIN, 1
        if complete:
            mean = {each: sum(found[each] for found, _ in everyone) / len(everyone) for each in mine}
            best = min(mean, key=lambda each: mean[each])
            chosen = best if mean[best] < WORTH_IT * mean[1] else 1
            told = ", ".join(f"{1000 * time:.1f} ms with {each}" for each, time in mean.items())
            rank_zero_info(
                f"FreeScaleDataModule(micro_batches='auto'): {chosen} from step {step} of epoch {epoch} on; a step took {told}"
            )
        else:
            rank_zero_info(
                f"FreeScaleDataModule(micro_batches='auto'): 1 from step {step} of epoch {epoch} on, unmeasured: of "
                f"{self._steps} steps not {MEASURED} of each number could be timed, as epochs have fewer than 3 steps, or "
                "validation follows on nearly every step. Pass a number, or validate less often"
            )
        self._schedule.decide(chosen, epoch, step, measured=complete)
        for logger in self._trainer.loggers:
            logger.log_metrics({"freescale/micro_batches": chosen}, step=self._trainer.global_step)
