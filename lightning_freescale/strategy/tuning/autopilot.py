"""Autopilot: choose settings by measuring training steps, one change at a time and the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lightning_freescale._lightning.loops import Trainer, rank_zero_info
from lightning_freescale._lightning.profiler import log_scalars
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
_MARGIN = 8  # steps that a rank's loader may read ahead while the ranks agree
_MOST_TRIALS = 2
"""Trials of a setting. A setting that was rejected may help after another one was kept."""


@dataclass
class Progress:
    """The state of the choice; the same on every rank, and saved in checkpoints."""

    start: Values
    kept: Values  # the best values so far
    untried: list[str]  # in the order of the trials
    tried: Counter[str]
    remaining: float = 1.0  # share of the initial lost time that is still lost
    checked: Values | None = None  # the values that were last compared with the initial ones
    frozen: bool = False

    @property
    def reduction(self) -> float:
        """The share of the initial bubble time that is removed."""
        return 1.0 - self.remaining


class Autopilot:
    """Tries the values of one setting after the other, keeps values that make steps faster, and stops at the target.

    The last trial compares all changes with the initial values, and undoes them if they are not faster. Without a target,
    ``FreeScaleDataModule(micro_batches="auto")`` is one trial of one setting.

    Args:
        settings: the allowed values of each setting, by its name and in the order of the trials.
        start: the initial values.
        gather: returns the values of all ranks, see :func:`.gather_objects`; None for a single rank.
        times: compute times of the steps; needed with a target.
        target: share of the bubble to remove; None for one trial of each setting.
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
        self._gather = gather or (lambda value: [value])
        self._times = times
        self._clock = clock_for(torch.device(trainer.strategy.root_device))
        self._progress = Progress(dict(start), dict(start), list(settings), Counter())
        self._turns: Turns[Values] = Turns([self._progress.kept])
        self._trial: SettingTrial | None = None
        self._tries, self._unmeasured = "", False
        if self._target is None:  # candidates of the schedule alternate from the first step on
            self._tries = self._progress.untried.pop(0)
            self._turns = Turns(self._candidates())
            self._trial = self._new_trial()

    @property
    def frozen(self) -> bool:
        """Whether the choice is final."""
        return self._progress.frozen

    @property
    def rejected(self) -> dict[str, list[Any]]:
        """The values that lost against the kept ones, by the names of the settings that were tried."""
        kept = self._progress.kept
        return {name: [value for value in self._settings[name] if value != kept[name]] for name in self._progress.tried}

    def start_step(self, epoch: int, step: int, cost: float) -> None:
        """Begin a step with its settings. Collective in the first step and in steps that decide.

        ``cost`` is the predicted cost of the slowest rank; 0 if unknown.
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
        """Exclude the current step from the measurement, because validation runs inside it."""
        if self._trial is not None:
            self._trial.pause()

    def end_training(self) -> None:
        """Log the values so far if training has ended before the choice is final."""
        if not self.frozen and self._target is not None:
            rank_zero_info(
                f"{self._option}: training has ended before all settings were tried; {self._text(self._progress.kept)} so far. "
                "A run that resumes from a checkpoint continues the trials"
            )

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a run that resumes, in plain values; the same on every rank."""
        if self._target is None:
            return {}
        progress = vars(self._progress) | {"tried": dict(self._progress.tried)}
        current = [self._tries] if self._tries in self._settings else []
        progress["untried"] = current + self._progress.untried
        progress["frozen"] &= not self._unmeasured  # a run that resumes may have longer epochs
        return {"ranks": self._trainer.world_size, "target": self._target, **progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another run, if it had the same number of ranks, target and settings.

        Call it before the first step.
        """
        same_run = (state.get("ranks"), state.get("target")) == (self._trainer.world_size, self._target)
        if not same_run or state["kept"].keys() != self._settings.keys():
            return
        if not all(value in self._settings[name] for name, value in state["kept"].items()):
            return
        if self._schedule is not None and self._schedule.chosen != state["kept"][MICRO_BATCHES]:
            return  # the loader was read before the checkpoint
        known = {name: state[name] for name in ("start", "kept", "untried", "remaining", "checked", "frozen")}
        self._progress = Progress(tried=Counter(state["tried"]), **known)
        self._turns = Turns([self._progress.kept])

    # -- trials

    def _try_next(self, last: Place) -> Place:
        """Alternate the candidates of the next setting, from a step after ``last``, the last step that a loader has read."""
        progress = self._progress
        self._tries = progress.untried.pop(0) if progress.untried and not self._is_enough() else _CHECK
        self._trial = self._new_trial()
        return self._change(self._candidates(), last)

    def _candidates(self) -> list[Values]:
        """Return the values to compare; the first ones are the reference."""
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
        checks, self._tries = self._tries == _CHECK, ""
        # changes that were not compared with the initial values are still to be checked
        unchecked = progress.kept not in (progress.start, progress.checked)
        is_left = unchecked or (bool(progress.untried) and not self._is_enough())
        begin = self._try_next(last) if self._target is not None and is_left else self._freeze(last)
        self._log(candidates, chosen, found, begin, checks)

    def _count(self, chosen: int, found: SettingComparison) -> None:
        """Count the trial. If a value was kept, try settings again that were rejected before, because they may help now."""
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

    def _freeze(self, last: Place) -> Place:
        self._progress.frozen = True
        return self._change([self._progress.kept], last)

    def _end_unmeasured(self, steps: int, last: Place) -> None:
        self._unmeasured = True
        epoch, step = self._freeze(last)
        rank_zero_info(
            f"{self._option}: {self._text(self._progress.kept)} from step {step} of epoch {epoch} on, unmeasured. In {steps} "
            f"steps, fewer than {MEASURED} of each candidate could be timed, because epochs have fewer than 3 steps, or "
            "validation follows almost every step. Set the value yourself, or validate less often"
        )

    def _change(self, candidates: list[Values], last: Place) -> Place:
        """Alternate the candidates, or use a single one, from a step after ``last``, and return that step."""
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

    # -- messages

    @property
    def _option(self) -> str:
        if self._target is None:
            return "FreeScaleDataModule(micro_batches='auto')"
        return f"FreeScaleStrategy(target_bubble_reduction={self._target:g})"

    def _text(self, values: Values) -> str:
        return ", ".join(f"{name}={value}" for name, value in values.items())

    def _log(self, candidates: list[Values], chosen: int, found: SettingComparison, begin: Place, checks: bool) -> None:
        def differing(values: Values) -> str:
            names = [name for name in self._settings if len({str(each[name]) for each in candidates}) > 1]
            return self._text({name: values[name] for name in names})

        progress = self._progress
        names = [differing(each) for each in candidates]
        times = ", ".join(f"{1000 * time:.1f} ms with {name}" for name, time in zip(names, found.seconds))
        scalars = {f"freescale/{name}": float(value) for name, value in progress.kept.items()}
        text = f"{self._option}: {names[chosen]} from step {begin[1]} of epoch {begin[0]} on; a step took {times}"
        if reason := found.explain(chosen, names, checks):
            text += f"; {reason}"
        if self._target is not None:
            before, after = found.bubble(), found.bubble(chosen)
            text += (
                f"; bubble {before:.1%} before, {after:.1%} now; {progress.reduction:.1%} of the time lost initially is removed"
            )
            scalars |= {"freescale/autopilot/bubble_before": before, "freescale/autopilot/bubble_after": after}
            scalars |= {"freescale/autopilot/reduction": progress.reduction}
            if self.frozen:
                why = "the target is met" if self._is_enough() else "there is nothing left to try"
                text += f". The choice is final, because {why}: {self._text(progress.kept)}"
        rank_zero_info(text)
        log_scalars(self._trainer, scalars)
