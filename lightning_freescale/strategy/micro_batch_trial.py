"""How many micro-batches a step should have, measured in the first steps of a fit."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale._lightning.loops import Trainer, rank_zero_info
from lightning_freescale._objects import gather_objects
from lightning_freescale.balance import MicroBatchSchedule
from lightning_freescale.datamodule import FreeScaleDataModule
from lightning_freescale.profiling.recording.clocks import clock_for

MEASURED = 15
"""Steps of each candidate."""
WORTH_IT = 0.99
"""Share of the time with one micro-batch that another number must stay below."""
_MARGIN = 8
"""Steps that a rank's loader may read while the ranks agree."""


def settle_without_exchange(trainer: Trainer, reason: str) -> None:
    """Choose one micro-batch for ``"auto"``, if there is a ``reason`` why more cannot help."""
    schedule = schedule_of(trainer)
    if reason and schedule is not None and not schedule.decided:
        schedule.decide(1)
        rank_zero_info(f"FreeScaleDataModule(micro_batches='auto'): 1, because {reason}")


def schedule_of(trainer: Trainer) -> MicroBatchSchedule | None:
    """Return the schedule of the Trainer's data module, if that is ours."""
    data = getattr(trainer, "datamodule", None)
    return data.train.micro_batches if isinstance(data, FreeScaleDataModule) else None


class MicroBatchTrial:
    """Times the candidates of a schedule as they take turns, and decides for the quickest, on all ranks alike.

    Args:
        trainer: the Trainer.
        schedule: not decided.
        group: a gloo group of all ranks; None if there is one rank.
    """

    def __init__(self, trainer: Trainer, schedule: MicroBatchSchedule, group: dist.ProcessGroup | None) -> None:
        self._trainer, self._schedule, self._group = trainer, schedule, group
        self._clock = clock_for(torch.device(trainer.strategy.root_device))
        self._stamps: list[tuple[tuple[int, int], int, Any]] = []  # (epoch, step), candidate or 0, start
        self._measured: dict[int, int] = defaultdict(int)

    def start_step(self, epoch: int, step: int) -> bool:
        """Note that a step begins; return False once all is decided. Collective when it decides."""
        self._stamps.append(((epoch, step), self._schedule.is_measured(epoch, step) or 0, self._clock.stamp()))
        if len(self._stamps) > 1 and self._follows(len(self._stamps) - 1):
            self._measured[self._stamps[-2][1]] += 1
        if any(self._measured[candidate] < MEASURED for candidate in self._schedule.candidates):
            return True
        self._decide(epoch, step)
        return False

    def pause(self) -> None:
        """Leave the step that was under way out: something else ran in it."""
        if self._stamps:
            self._stamps[-1] = (self._stamps[-1][0], 0, self._stamps[-1][2])

    def _follows(self, index: int) -> bool:
        """Whether the time between a stamp and the one before is that of one step."""
        (before, _, _), (now, _, _) = self._stamps[index - 1], self._stamps[index]
        return now == (before[0], before[1] + 1)

    def _decide(self, epoch: int, step: int) -> None:
        times = defaultdict(list)
        seconds = [self._clock.seconds(stamp) for *_, stamp in self._stamps]
        for index in range(1, len(self._stamps)):
            candidate = self._stamps[index - 1][1]
            if candidate and self._follows(index):
                times[candidate].append(seconds[index] - seconds[index - 1])
        mine = {candidate: median(found) for candidate, found in times.items()}, self._schedule.handed_out
        everyone = [mine] if self._group is None else gather_objects(mine, self._group)
        mean = {each: sum(found[each] for found, _ in everyone) / len(everyone) for each in self._schedule.candidates}
        best = min(mean, key=lambda each: mean[each])
        chosen = best if mean[best] < WORTH_IT * mean[1] else 1
        last_epoch, last_step = max(handed_out for _, handed_out in everyone)
        self._schedule.decide(chosen, last_epoch, last_step + _MARGIN)
        told = ", ".join(f"{1000 * seconds:.1f} ms with {each}" for each, seconds in mean.items())
        rank_zero_info(
            f"FreeScaleDataModule(micro_batches='auto'): {chosen} from step {last_step + _MARGIN} of epoch {last_epoch} on; a "
            f"step took {told}"
        )
        for logger in self._trainer.loggers:
            logger.log_metrics({"freescale/micro_batches": chosen}, step=self._trainer.global_step)
