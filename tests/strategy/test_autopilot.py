"""What the autopilot tries, keeps and undoes, by a clock that is told what steps take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_freescale.balance import MicroBatchSchedule
from lightning_freescale.strategy import autopilot as autopilot_room
from lightning_freescale.strategy.autopilot import Autopilot
from lightning_freescale.strategy.setting_trial import LONGEST, MEASURED

Seconds = Callable[[bool, int], float]
SPLIT = {"split_backward": [False, True]}
BOTH = {**SPLIT, "micro_batches": [1, 2, 4]}


class Clock:
    """Goes on when it is told to."""

    now = 0.0

    def stamp(self) -> float:
        return self.now

    def seconds(self, stamp: float) -> float:
        return stamp


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(autopilot_room, "clock_for", lambda device: clock)
    return clock


class Run:
    """Steps whose times follow from their settings; ``compute`` of each is compute."""

    def __init__(
        self, clock: Clock, seconds: Seconds, settings: dict[str, Any] = BOTH, target: float = 0.9, compute: float = 1.0
    ) -> None:
        self.clock, self.seconds, self.epoch_of = clock, seconds, 10_000
        self.schedule = MicroBatchSchedule("auto", 4)
        self.controller = SimpleNamespace(split_backward=False, overlapped=["bags", "items"])
        self.schedule.settle(1)
        self.logged: list[dict[str, float]] = []
        logger = SimpleNamespace(log_metrics=lambda scalars, step: self.logged.append(scalars))
        strategy = SimpleNamespace(root_device="cpu")
        trainer: Any = SimpleNamespace(strategy=strategy, loggers=[logger], global_step=0, world_size=1)
        times: Any = SimpleNamespace(step=0, later=lambda step: lambda: compute)
        self.times = times
        self.autopilot = Autopilot(
            trainer,
            settings,
            {name: values[0] for name, values in settings.items()},
            schedule=self.schedule,
            controller=self.controller,
            times=times,
            target=target,
        )
        self.seen: list[tuple[bool, int]] = []

    def train(self, most: int = 3000, validates: bool = False, goes_on: bool = False) -> int:
        """Return the steps until all was decided, unless training ``goes_on``, or so many."""
        for done in range(len(self.seen), most):
            epoch, step = divmod(done, self.epoch_of)
            self.schedule.count(epoch, step + 2)  # a loader reads ahead
            count = self.schedule._turns.candidate(epoch, step)
            self.times.step = done
            self.autopilot.start_step(epoch, step, 0.0)
            if self.autopilot.frozen and self._has_begun(done) and not goes_on:
                return done
            self.seen.append((self.controller.split_backward, count))
            self.clock.now += self.seconds(self.controller.split_backward, count)
            if validates:
                self.autopilot.pause()
        return most

    def _has_begun(self, done: int) -> bool:
        return self.schedule._turns._phases[-1][0] <= divmod(done, self.epoch_of)

    @property
    def changes(self) -> list[set[tuple[bool, int]]]:
        """What took turns, trial by trial: sets of (split_backward, micro_batches)."""
        return [
            set(zip((each["split_backward"] for each in phase), (each.get("micro_batches", 1) for each in phase)))
            for _, phase in self.autopilot._turns._phases
        ]


def test_what_helps_is_kept_one_change_at_a_time(clock: Clock) -> None:
    run = Run(clock, lambda split, parts: 1.0 + {1: 4.0, 2: 1.5, 4: 2.0}[parts] - 0.5 * split)
    assert run.train() < 3000
    assert run.autopilot.values == {"split_backward": True, "micro_batches": 2}
    assert run.changes == [
        {(False, 1)},
        {(False, 1), (True, 1)},
        {(True, 1), (True, 2), (True, 4)},
        {(False, 1), (True, 2)},  # all of it against the beginning
        {(True, 2)},
    ]
    assert (run.controller.split_backward, run.schedule.chosen, run.schedule.measured) == (True, 2, 2)
    assert run.logged[-1]["freescale/autopilot/reduction"] == pytest.approx(0.75)


def test_what_harms_is_tried_once_and_refused(clock: Clock) -> None:
    run = Run(clock, lambda split, parts: 5.0 + split + parts)
    assert run.train() < 3000
    assert run.autopilot.values == {"split_backward": False, "micro_batches": 1}
    assert run.changes == [
        {(False, 1)},
        {(False, 1), (True, 1)},
        {(False, 1), (False, 2), (False, 4)},
        {(False, 1)},
    ]
    assert run.logged[-1]["freescale/autopilot/reduction"] == 0.0


def test_it_stops_when_the_target_is_met(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(clock, lambda split, parts: 1.0 + 1.0 / parts - 0.6 * split, target=0.5)
    with caplog.at_level(logging.INFO):
        assert run.train() < 3000
    assert run.autopilot.values == {"split_backward": True, "micro_batches": 1}
    assert {parts for _, parts in run.seen} == {1}, "nobody has asked for more"
    assert "the bubble was 50.0% before, is 28.6%; of the time lost at the beginning 60.0% is gone" in caplog.text
    assert "Final, as the target is met: split_backward=True, micro_batches=1" in caplog.text


def test_a_setting_that_was_refused_is_tried_again_beside_another(clock: Clock) -> None:
    """Gradients of the weights at the end help only where there are micro-batches."""
    run = Run(clock, lambda split, parts: {1: 5.0, 2: 4.0, 4: 3.0}[parts] + (split if parts == 1 else -split))
    assert run.train() < 3000
    assert run.autopilot.values == {"split_backward": True, "micro_batches": 4}
    trials = run.changes[1:-2]
    assert len(trials) == 3
    assert trials[-1] == {(False, 4), (True, 4)}


def test_what_seemed_to_help_and_does_not_is_undone(clock: Clock) -> None:
    run = Run(clock, lambda split, parts: 5.0 - split * (1 if len(run.changes) < 3 else -1), SPLIT)
    assert run.train() < 3000
    assert run.autopilot.values == {"split_backward": False}
    assert run.changes[1:] == [{(False, 1), (True, 1)}, {(False, 1), (True, 1)}, {(False, 1)}]
    assert run.controller.split_backward is False
    assert run.logged[-2]["freescale/autopilot/reduction"] > 0.2
    assert run.logged[-1]["freescale/autopilot/reduction"] == 0.0


def test_compute_that_a_setting_adds_is_lost(clock: Clock) -> None:
    """It hides all of the exchange, and takes longer."""
    run = Run(clock, lambda split, parts: 3.5 if split else 3.0, SPLIT, compute=1.0)
    run.train()
    assert run.autopilot.values == {"split_backward": False}


@pytest.mark.parametrize("epoch_of", [9, 40])
def test_in_short_epochs(clock: Clock, epoch_of: int) -> None:
    run = Run(clock, lambda split, parts: 1.0 + 4.0 / parts - 0.5 * split)
    run.epoch_of = epoch_of
    assert run.train() < 3000
    assert run.autopilot.values == {"split_backward": True, "micro_batches": 4}


def test_steps_that_cannot_be_timed_end_it(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(clock, lambda split, parts: 1.0 + 4.0 / parts)
    with caplog.at_level(logging.INFO):
        assert run.train(validates=True) <= 2 * LONGEST + 20
    assert run.autopilot.values == {"split_backward": False, "micro_batches": 1}
    assert run.schedule.measured is None
    assert run.autopilot.frozen
    again = _resumed(run, clock)
    again.train(goes_on=True)
    assert again.autopilot.values == {"split_backward": False, "micro_batches": 4}, "it may have steps that can be timed"
    assert f"unmeasured: of {2 * LONGEST} steps not {MEASURED} of each candidate could be timed" in caplog.text


def _resumed(run: Run, clock: Clock, **changed: Any) -> Run:
    again = Run(clock, run.seconds)
    again.schedule.settle(run.autopilot.values["micro_batches"])  # as the strategy does before the loader is read
    again.autopilot.load_state_dict({**run.autopilot.state_dict(), **changed})
    return again


def test_a_run_that_resumes_goes_on_where_it_was(clock: Clock) -> None:
    seconds: Seconds = lambda split, parts: 1.0 + 4.0 / parts - 0.5 * split  # noqa: E731
    run = Run(clock, seconds)
    run.train(most=60)
    assert run.autopilot.values["split_backward"] and not run.autopilot.frozen
    again = _resumed(run, clock)
    again.train()
    assert again.seen[0] == (True, 1)
    assert again.changes[1] == {(True, 1), (True, 2), (True, 4)}, "what was under way is tried anew, what is kept is not"
    assert again.autopilot.values == {"split_backward": True, "micro_batches": 4}
    third = _resumed(again, clock)
    assert third.autopilot.frozen
    third.train(most=100, goes_on=True)
    assert set(third.seen) == {(True, 4)}, "nothing is tried"


@pytest.mark.parametrize("changed", [{"ranks": 2}, {"target": 0.5}, {"kept": {"split_backward": True}}])
def test_what_another_run_has_found_counts_for_nothing(clock: Clock, changed: dict[str, Any]) -> None:
    run = Run(clock, lambda split, parts: 4.0 - split, SPLIT)
    run.train()
    again = Run(clock, run.seconds)
    again.autopilot.load_state_dict({**run.autopilot.state_dict(), **changed})
    assert again.autopilot.values == {"split_backward": False, "micro_batches": 1}
    assert not again.autopilot.frozen


# -- bags that are left to TorchRec meanwhile


def _run_in_which_bags_are_left(clock: Clock, step: int, overlapped: list[str]) -> Run:
    """Before a step begins some bags are left; until then the split backward helps, and afterwards it harms."""

    def seconds(split: bool, parts: int) -> float:
        if len(run.seen) == step:  # those begun so far
            run.controller.overlapped = overlapped
        return 9.0 + 2 * split if len(run.seen) > step else 5.0 - 2 * split

    run = Run(clock, seconds, SPLIT)
    return run


@pytest.mark.parametrize("step", [9, 25, 60])
def test_it_measures_anew_when_bags_are_left(clock: Clock, caplog: pytest.LogCaptureFixture, step: int) -> None:
    """In the first trial, near its end, and in the last one, when the split backward has been kept."""
    run = _run_in_which_bags_are_left(clock, step, ["items"])
    with caplog.at_level(logging.INFO):
        assert run.train() < 3000
    assert run.autopilot.values == {"split_backward": False}
    assert run.autopilot._progress.tried == {"split_backward": 1}, "what was tried before counts for nothing"
    *_, (begin, candidates), (_, last) = run.autopilot._turns._phases
    assert begin == (0, step + 1) and len(candidates) == 2
    assert last == ({"split_backward": False},)
    why = "as the exchange of ['items'] is overlapped now, and was of ['bags', 'items'] in what"
    assert caplog.text.count(f"begins anew from step {step + 1} of epoch 0 on, {why}") == 1
    last_told = [record.getMessage() for record in caplog.records][-1]
    assert "9000.0 ms with split_backward=False, 11000.0 ms with split_backward=True" in last_told


def test_without_any_exchange_there_is_no_split_backward(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run = _run_in_which_bags_are_left(clock, 25, [])
    with caplog.at_level(logging.INFO):
        run.train(most=100, goes_on=True)
    assert {split for split, _ in run.seen[:25]} == {False, True}
    assert {split for split, _ in run.seen[25:]} == {False}
    assert run.autopilot.frozen and run.autopilot.values == {}
    assert run.autopilot.state_dict()["kept"] == {}
    assert caplog.text.count("there is nothing to choose from, because no exchange is overlapped any more") == 1


def test_what_was_kept_goes_with_the_exchange(clock: Clock) -> None:
    run = _run_in_which_bags_are_left(clock, 200, [])
    run.train(most=190, goes_on=True)
    assert run.autopilot.frozen and run.autopilot.values == {"split_backward": True}
    run.train(most=210, goes_on=True)
    assert run.autopilot.values == {} and not run.controller.split_backward


def test_what_is_final_is_not_tried_again(clock: Clock) -> None:
    run = _run_in_which_bags_are_left(clock, 200, ["items"])
    run.train(most=300, goes_on=True)
    assert run.autopilot.frozen and run.autopilot.values == {"split_backward": True}
    assert {split for split, _ in run.seen[190:]} == {True}


@pytest.mark.parametrize(("overlapped", "first"), [(["items"], True), (["bags", "items"], False)])
def test_a_run_that_resumes_goes_on_if_the_same_is_overlapped(clock: Clock, overlapped: list[str], first: bool) -> None:
    """Bags that the run before has left are left in the first step, before the autopilot hears of it."""
    run = Run(clock, lambda split, parts: 5.0 - 2 * split, SPLIT)
    run.controller.overlapped = ["items"]
    run.train(most=50)
    assert run.autopilot.values == {"split_backward": True} and not run.autopilot.frozen
    again = Run(clock, run.seconds, SPLIT)
    again.autopilot.load_state_dict(run.autopilot.state_dict())
    again.controller.overlapped = overlapped
    again.train(most=5)
    assert again.autopilot.values == {"split_backward": first}
