"""Chooses the settings of a run by what they do to its steps: one change at a time, on all ranks alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lightning_freescale._lightning.loops import Trainer, rank_zero_info
from lightning_freescale.balance import MicroBatchSchedule
from lightning_freescale.balance.micro_batches import Turns
from lightning_freescale.profiling.recording.records import clock_for
from lightning_freescale.strategy.tuning.cost_calibrator import ComputeTimes
from lightning_freescale.strategy.tuning.setting_trial import MEASURED, SettingComparison, SettingTrial, compare

if TYPE_CHECKING:
    from lightning_freescale.training.table_step import TableStep

SPLIT_BACKWARD, MICRO_BATCHES = "split_backward", "micro_batches"

Values: TypeAlias = dict[str, Any]
"""A value for each setting, by its name."""
Place: TypeAlias = tuple[int, int]
"""Epoch and step."""

_CHECK = "all changes"
_MARGIN = 8
"""Steps that a rank's loader may read while the ranks agree."""
_MOST_TRIALS = 2
"""Of a setting: one that was refused may help beside another that was kept."""


@dataclass
class Progress:
    """How far the choice has come; the same on every rank, and what a checkpoint has of it.

    Attributes:
        start: the values at the beginning.
        kept: those found best so far.
        untried: settings still to be tried, in this order.
        tried: how often each has been.
        remaining: share of the time lost at the beginning that is still lost.
        checked: the values that were compared with those at the beginning last.
        frozen: nothing will be changed any more.
    """

    start: Values
    kept: Values
    untried: list[str]
    tried: Counter[str]
    remaining: float = 1.0
    checked: Values | None = None
    frozen: bool = False

    @property
    def reduction(self) -> float:
        """Share of the bubble at the beginning that is gone."""
        return 1.0 - self.remaining


class Autopilot:
    """Tries the values of one setting after the other, keeps what makes steps quicker, and stops when that is enough.

    It ends with a trial of all that it has changed against what there was at the beginning: what does not win that is undone.
    ``FreeScaleDataModule(micro_batches="auto")`` alone is one trial of one setting, without a target.

    Args:
        trainer: the Trainer.
        settings: the values that each setting may have, by its name and in the order in which they are tried.
        start: the values at the beginning.
        schedule: of the micro-batches, if they are among the settings.
        table_step: its ``split_backward`` is switched.
        gather: returns the values of all ranks, see :func:`.gather_objects`; None if there is one rank.
        times: tell what part of a step is compute; needed for a target.
        target: share of the bubble that is enough to remove; None for one trial of each setting.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: Mapping[str, Sequence[Any]],
        start: Values,
        *,
        schedule: MicroBatchSchedule | None = None,
        table_step: TableStep | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        times: ComputeTimes | None = None,
        target: float | None = None,
    ) -> None:
        self._trainer, self._settings, self._target = trainer, settings, target
        self._schedule = schedule if MICRO_BATCHES in settings else None
        self._table_step = table_step if SPLIT_BACKWARD in settings else None
        self._gather_objects, self._times = gather, times
        self._clock = clock_for(torch.device(trainer.strategy.root_device))
        self._progress = Progress(dict(start), dict(start), list(settings), Counter())
        self._turns: Turns[Values] = Turns([self._progress.kept])
        self._trial: SettingTrial | None = None
        self._tries, self._unmeasured = "", False
        if self._target is None:  # the schedule has its candidates take turns from the first step on
            self._tries = self._progress.untried.pop(0)
            self._turns = Turns(self._candidates())
            self._trial = self._new_trial()

    @property
    def frozen(self) -> bool:
        """Whether all is decided."""
        return self._progress.frozen

    @property
    def values(self) -> Values:
        """The values found best so far."""
        return dict(self._progress.kept)

    def start_step(self, epoch: int, step: int, cost: float) -> None:
        """Begin a step with its settings. Collective when it decides, and in the first step.

        Args:
            epoch: of the step.
            step: of the epoch.
            cost: predicted, of the rank that has most to compute; 0 if unknown.
        """
        if not self.frozen and self._trial is None:
            self._try_next(max(self._gather(self._handed_out(epoch, step))))
        elif self._trial is not None:
            measured, number = self._turns.measured(epoch, step), 0 if self._times is None else self._times.step
            if not self._trial.start_step(epoch, step, measured, cost, number):
                self._decide(epoch, step)
        if self._table_step is not None:
            self._table_step.split_backward = self._turns.candidate(epoch, step)[SPLIT_BACKWARD]

    def pause(self) -> None:
        """Leave the step that is under way out: something else runs in it."""
        if self._trial is not None:
            self._trial.pause()

    def end_training(self) -> None:
        """Say so where training has ended before the choice."""
        if not self.frozen and self._target is not None:
            rank_zero_info(
                f"FreeScaleStrategy(target_bubble_reduction={self._target:g}): training has ended before all was tried; "
                f"{self._told(self._progress.kept)} so far. A run that resumes from a checkpoint goes on there"
            )

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that resumes goes on with, in plain values; the same on every rank."""
        if self._target is None:
            return {}
        progress = vars(self._progress) | {"tried": dict(self._progress.tried)}
        under_way = [self._tries] if self._tries in self._settings else []
        progress["untried"] = under_way + self._progress.untried
        progress["frozen"] &= not self._unmeasured  # a run that goes on may have longer epochs
        return {"ranks": self._trainer.world_size, "target": self._target, **progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what an earlier run has found, if it had as many ranks, this target and these settings to choose from.

        Call it before the first step.
        """
        if not fits(state, self._trainer.world_size, self._target, self._settings):
            return
        if self._schedule is not None and self._schedule.chosen != state["kept"][MICRO_BATCHES]:
            return  # the loader was read before the checkpoint
        known = {name: state[name] for name in ("start", "kept", "untried", "remaining", "checked", "frozen")}
        self._progress = Progress(tried=Counter(state["tried"]), **known)
        self._turns = Turns([self._progress.kept])

    # -- trials

    def _try_next(self, last: Place) -> Place:
        """Let the candidates for the next setting take turns, some steps after the last one that any loader has read."""
        progress = self._progress
        self._tries = progress.untried.pop(0) if progress.untried and not self._is_enough() else _CHECK
        self._trial = self._new_trial()
        return self._change(self._candidates(), last)

    def _candidates(self) -> list[Values]:
        """Return what is compared; the first is what all others are compared with."""
        kept, name = self._progress.kept, self._tries
        if name == _CHECK:
            return [self._progress.start, kept]
        return [kept, *({**kept, name: value} for value in self._settings[name] if value != kept[name])]

    def _new_trial(self) -> SettingTrial:
        return SettingTrial(len(self._candidates()), self._clock, None if self._times is None else self._times.later)

    def _decide(self, epoch: int, step: int) -> None:
        assert self._trial is not None
        trial, self._trial, candidates, progress = self._trial, None, self._candidates(), self._progress
        mine = trial.measurements() if trial.is_complete else None
        everyone = self._gather((mine, self._handed_out(epoch, step)))
        last = max(handed_out for _, handed_out in everyone)
        if mine is None:
            self._end_unmeasured(trial.steps, last)
            return
        found = compare([measured for measured, _ in everyone])
        if self._tries == _CHECK:
            chosen = int(found.saved[1] > 0)
            progress.remaining, progress.checked = found.remaining(chosen), candidates[chosen]
        else:
            chosen = found.best
            self._count(chosen, found)
        progress.kept = candidates[chosen]
        self._tries = ""
        goes_on = self._target is not None and self._is_left()
        begin = self._try_next(last) if goes_on else self._freeze(last)
        self._tell(candidates, chosen, found, begin)

    def _count(self, chosen: int, found: SettingComparison) -> None:
        """Note that a setting was tried; those refused before may help beside what is kept now."""
        progress = self._progress
        progress.tried[self._tries] += 1
        if not chosen:
            return
        progress.remaining *= found.remaining(chosen)
        progress.untried += [
            name
            for name in self._settings
            if name not in (*progress.untried, self._tries)
            and progress.kept[name] == progress.start[name]
            and progress.tried[name] < _MOST_TRIALS
        ]

    def _is_enough(self) -> bool:
        return self._target is None or self._progress.reduction >= self._target

    def _is_left(self) -> bool:
        """Whether something is still to be tried, or to be checked."""
        progress = self._progress
        unchecked = progress.kept not in (progress.start, progress.checked)
        return unchecked or (bool(progress.untried) and not self._is_enough())

    def _freeze(self, last: Place) -> Place:
        self._progress.frozen = True
        return self._change([self._progress.kept], last)

    def _end_unmeasured(self, steps: int, last: Place) -> None:
        self._unmeasured = True
        epoch, step = self._freeze(last)
        rank_zero_info(
            f"{self._asked}: {self._told(self._progress.kept)} from step {step} of epoch {epoch} on, unmeasured: of {steps} "
            f"steps not {MEASURED} of each candidate could be timed, as epochs have fewer than 3 steps, or validation follows "
            "on nearly every step. Choose by hand, or validate less often"
        )

    def _change(self, candidates: list[Values], last: Place) -> Place:
        """Let candidates take turns, or have one for good, some steps after the last one that any loader has read."""
        epoch, step = last[0], last[1] + (1 if self._schedule is None else _MARGIN)
        self._turns.change(candidates, epoch, step)
        if self._schedule is not None:
            counts = [each[MICRO_BATCHES] for each in candidates]
            if self.frozen:
                self._schedule.decide(counts[0], epoch, step, measured=not self._unmeasured)
            else:
                self._schedule.take_turns(counts, epoch, step)
        return epoch, step

    def _handed_out(self, epoch: int, step: int) -> Place:
        return (epoch, step) if self._schedule is None else max((epoch, step), self._schedule.handed_out)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._gather_objects is None else self._gather_objects(value)

    # -- messages

    @property
    def _asked(self) -> str:
        if self._target is None:
            return "FreeScaleDataModule(micro_batches='auto')"
        return f"FreeScaleStrategy(target_bubble_reduction={self._target:g})"

    def _told(self, values: Values) -> str:
        if self._target is None:
            return str(values[MICRO_BATCHES])
        return ", ".join(f"{name}={value}" for name, value in values.items())

    def _tell(self, candidates: list[Values], chosen: int, found: SettingComparison, begin: Place) -> None:
        def differing(values: Values) -> str:
            names = [name for name in self._settings if len({str(each[name]) for each in candidates}) > 1]
            return self._told({name: values[name] for name in names})

        progress = self._progress
        decided = differing(candidates[chosen])
        took = ", ".join(f"{1000 * time:.1f} ms with {differing(each)}" for each, time in zip(candidates, found.seconds))
        scalars = {f"freescale/{name}": float(value) for name, value in progress.kept.items()}
        if self._target is None:
            text = (
                f"FreeScaleDataModule(micro_batches='auto'): {decided} from step {begin[1]} of epoch {begin[0]} on; a step "
                f"took {took}"
            )
        else:
            before, after = found.bubble(), found.bubble(chosen)
            text = (
                f"FreeScaleStrategy(target_bubble_reduction={self._target:g}): {decided} from step {begin[1]} of epoch "
                f"{begin[0]} on; a step took {took}; the bubble was {before:.1%} before, is {after:.1%}; of the time lost at "
                f"the beginning {progress.reduction:.1%} is gone"
            )
            scalars |= {"freescale/autopilot/bubble_before": before, "freescale/autopilot/bubble_after": after}
            scalars |= {"freescale/autopilot/reduction": progress.reduction}
            if self.frozen:
                why = "the target is met" if self._is_enough() else "nothing else is left to try"
                text += f". Final, as {why}: {self._told(progress.kept)}"
        rank_zero_info(text)
        for logger in self._trainer.loggers:
            logger.log_metrics(scalars, step=self._trainer.global_step)


def fits(state: Mapping[str, Any], ranks: int, target: float | None, settings: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether the state of a checkpoint's run applies to this run."""
    return (
        (state.get("ranks"), state.get("target")) == (ranks, target)
        and state["kept"].keys() == settings.keys()
        and all(value in settings[name] for name, value in state["kept"].items())
    )
