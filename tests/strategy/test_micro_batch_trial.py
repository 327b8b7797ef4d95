"""The trial of ``micro_batches="auto"``: what it times, what it chooses, and that it comes to an end."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_freescale.balance import MicroBatchSchedule
from lightning_freescale.balance.turns import TRIAL_BLOCK
from lightning_freescale.strategy import autopilot
from lightning_freescale.strategy.autopilot import Autopilot
from lightning_freescale.strategy.setting_trial import LONGEST, MEASURED


class Stamp:
    """A moment, which can be seen to be kept."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept: weakref.WeakSet[Stamp] = weakref.WeakSet()

    def stamp(self) -> Stamp:
        stamp = Stamp(self.now)
        self.kept.add(stamp)
        return stamp

    def seconds(self, stamp: Stamp) -> float:
        return stamp.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(autopilot, "clock_for", lambda device: clock)
    return clock


class Run:
    """Trains, in epochs of as many steps, whose times are those of their numbers of micro-batches."""

    def __init__(self, clock: Clock, schedule: MicroBatchSchedule, seconds: dict[int, float], validates: Any = None) -> None:
        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device="cpu"), loggers=[], global_step=0)
        self.clock, self.schedule, self.seconds, self.validates = clock, schedule, seconds, validates
        counts = {"micro_batches": schedule.candidates}
        self.trial = Autopilot(trainer, counts, {"micro_batches": 1}, schedule=schedule)
        self.most_kept = 0

    def steps(self, most: int, epoch_of: int) -> int:
        """Return the steps until the trial has ended, or so many."""
        for done in range(most):
            epoch, step = divmod(done, epoch_of)
            count = self.schedule.count(epoch, step)
            self.trial.start_step(epoch, step, 0.0)
            if self.trial.frozen:
                return done + 1
            self.clock.now += self.seconds[count]
            if self.validates is not None and self.validates(step):
                self.trial.pause()
                self.clock.now += 1000.0  # what is counted is not this
            if step == epoch_of - 1:
                self.clock.now += 1000.0
            gc.collect(0)
            self.most_kept = max(self.most_kept, len(self.clock.kept))
        return most


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 4.0, 2: 2.0, 4: 3.0}, 2),
        ({1: 4.0, 2: 3.9, 4: 3.8}, 4),
        ({1: 4.0, 2: 3.99, 4: 3.98}, 1),  # not worth it
        ({1: 1.0, 2: 2.0, 4: 3.0}, 1),
    ],
)
@pytest.mark.parametrize(("epoch_of", "validates"), [(1000, None), (7, None), (3, None), (40, lambda step: step % 3 == 0)])
def test_the_quickest_is_chosen(clock: Clock, seconds: dict[int, float], chosen: int, epoch_of: int, validates: Any) -> None:
    schedule = MicroBatchSchedule("auto", 4)
    run = Run(clock, schedule, seconds, validates)
    assert run.steps(10_000, epoch_of) <= LONGEST * len(schedule.candidates)
    assert (schedule.chosen, schedule.measured) == (chosen, chosen)


@pytest.mark.parametrize(("epoch_of", "validates"), [(1, None), (2, None), (50, lambda step: True)])
def test_a_trial_that_can_time_nothing_ends_with_one(
    clock: Clock, caplog: pytest.LogCaptureFixture, epoch_of: int, validates: Any
) -> None:
    schedule = MicroBatchSchedule("auto", 4)
    run = Run(clock, schedule, {1: 4.0, 2: 2.0, 4: 3.0}, validates)
    with caplog.at_level(logging.INFO):
        assert run.steps(10_000, epoch_of) == LONGEST * 3
    assert schedule.chosen == 1
    assert schedule.measured is None, "a run that goes on may have longer epochs"
    assert "FreeScaleDataModule(micro_batches='auto'): 1 from step " in caplog.text
    assert f"{LONGEST * 3} steps" in caplog.text and "fewer than 3 steps" in caplog.text


NEVER_WITH_FOUR = lambda step: step // TRIAL_BLOCK % 3 == 2  # noqa: E731 (a parameter)


@pytest.mark.parametrize("validates", [None, lambda step: True, NEVER_WITH_FOUR])
def test_no_more_stamps_are_kept_than_are_needed(clock: Clock, validates: Any) -> None:
    schedule = MicroBatchSchedule("auto", 4)
    run = Run(clock, schedule, {1: 4.0, 2: 2.0, 4: 3.0}, validates)
    run.steps(10_000, 100 * TRIAL_BLOCK)
    assert schedule.decided
    assert run.most_kept <= 2 * MEASURED * len(schedule.candidates) + 1
