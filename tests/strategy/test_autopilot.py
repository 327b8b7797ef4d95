"""Settings that the autopilot tries, keeps and undoes, with a clock that the test advances."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_freescale.balance import MicroBatchSchedule
from lightning_freescale.strategy.tuning import autopilot
from lightning_freescale.strategy.tuning.autopilot import Autopilot
from lightning_freescale.strategy.tuning.setting_trial import LONGEST, MEASURED, Measurements, compare
from tests.strategy.test_balance_monitor import LogsAll

Seconds = Callable[[bool, int], float]
SPLIT = {"split_backward": [False, True]}
PARTS = {"micro_batches": [1, 2, 4]}
BOTH = {**SPLIT, **PARTS}


def plain(split: bool, parts: int) -> float:
    """Both settings help."""
    return 1.0 + 4.0 / parts - 0.5 * split


class Clock:
    """Advances only when a test says so."""

    now = 0.0

    def stamp(self) -> float:
        return self.now

    def seconds(self, stamp: float) -> float:
        return stamp


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(autopilot, "clock_for", lambda device: clock)
    return clock


class Run:
    """Steps whose seconds follow from their settings, ``compute`` of them compute; validation follows some of them."""

    def __init__(
        self,
        clock: Clock,
        seconds: Seconds,
        settings: dict[str, Any] = BOTH,
        target: float | None = 0.9,
        compute: float = 1.0,
        epoch_of: int = 10_000,
        validates: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.clock, self.seconds, self.epoch_of, self.validates = clock, seconds, epoch_of, validates
        self.schedule = MicroBatchSchedule("auto", 4)
        if target is not None:
            self.schedule.settle(1)
        self.table_step = SimpleNamespace(split_backward=False)
        self.logged: list[dict[str, float]] = []
        logger = SimpleNamespace(log_metrics=lambda scalars, step: self.logged.append(scalars))
        strategy = SimpleNamespace(root_device="cpu")
        trainer: Any = SimpleNamespace(strategy=strategy, loggers=[logger], callbacks=[LogsAll()], global_step=0, world_size=1)
        self.times: Any = SimpleNamespace(step=0, later=lambda step: lambda: compute)
        self.autopilot = Autopilot(
            trainer,
            settings,
            {name: values[0] for name, values in settings.items()},
            schedule=self.schedule,
            table_step=self.table_step,
            times=self.times,
            target=target,
        )
        self.seen: list[tuple[bool, int]] = []
        self.trials: list[tuple[dict[str, Any], ...]] = []
        self.decided_after = 0

    def train(self, steps: int = 400) -> None:
        for done in range(len(self.seen), steps):
            epoch, step = divmod(done, self.epoch_of)
            self.schedule.count(epoch, step + 2)  # a loader reads ahead
            count = self.schedule.count(epoch, step)
            self.times.step = done
            self.decided_after += not self.autopilot.frozen
            self.autopilot.start_step(epoch, step, 0.0)
            last = self.autopilot._turns.last
            if not self.trials or last is not self.trials[-1]:
                self.trials.append(last)
            self.seen.append((self.table_step.split_backward, count))
            self.clock.now += self.seconds(self.table_step.split_backward, count)
            if self.validates(step):
                self.autopilot.pause()
            if self.validates(step) or step == self.epoch_of - 1:
                self.clock.now += 1000.0  # not the time of a step

    @property
    def tried(self) -> list[str]:
        """The numbers of micro-batches that took turns in each trial, "s" beside those with split backward; last the choice."""
        return [
            " ".join(sorted(f"{each.get('micro_batches', 1)}{'s' * each['split_backward']}" for each in trial))
            for trial in self.trials
        ]

    def resumed(self, settings: dict[str, Any] = BOTH, **changed: Any) -> Run:
        """Return a run that resumes with the state of this one, with some items changed."""
        again = Run(self.clock, self.seconds, settings)
        again.schedule.settle(
            self.autopilot.state_dict()["kept"].get("micro_batches", 1)
        )  # as the strategy does before the loader is read
        again.autopilot.load_state_dict({**self.autopilot.state_dict(), **changed})
        return again


@pytest.mark.parametrize(
    ("seconds", "options", "tried", "reduction"),
    [
        # at last the choice takes turns with the beginning
        (lambda split, parts: {1: 5.0, 2: 2.5, 4: 3.0}[parts] - 0.5 * split, {}, ["1 1s", "1s 2s 4s", "1 2s", "2s"], 0.75),
        (lambda split, parts: 5.0 + split + parts, {}, ["1 1s", "1 2 4", "1"], 0.0),
        # split backward helps only beside micro-batches, and is tried again there
        (
            lambda split, parts: {1: 5.0, 2: 4.0, 4: 3.0}[parts] + (split if parts == 1 else -split),
            {},
            ["1 1s", "1 2 4", "4 4s", "1 4s", "4s"],
            0.75,
        ),
        # it hides all of the exchange, and takes longer: compute that a setting adds is lost
        (lambda split, parts: 3.5 if split else 3.0, {"settings": SPLIT}, ["1 1s", "1"], 0.0),
        *((plain, {"epoch_of": steps}, ["1 1s", "1s 2s 4s", "1 4s", "4s"], 0.875) for steps in (9, 40)),
    ],
)
def test_what_helps_is_kept_one_change_at_a_time(
    clock: Clock, seconds: Seconds, options: dict[str, Any], tried: list[str], reduction: float
) -> None:
    run = Run(clock, seconds, **options)
    run.train(1200)
    parts, split = int(tried[-1][0]), tried[-1].endswith("s")
    assert run.tried == tried and run.seen[-1] == (split, parts)
    assert run.autopilot.frozen
    assert run.autopilot.state_dict()["kept"] == {"split_backward": split} | (
        {} if "settings" in options else {"micro_batches": parts}
    )
    assert (run.schedule.chosen, run.schedule.measured) == (parts, None if "settings" in options else parts)
    assert run.logged[-1]["freescale/autopilot/reduction"] == pytest.approx(reduction)


def test_it_stops_when_the_target_is_met(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(clock, lambda split, parts: 1.0 + 1.0 / parts - 0.6 * split, target=0.5)
    with caplog.at_level(logging.INFO):
        run.train()
    assert run.autopilot.frozen and run.autopilot.state_dict()["kept"] == {"split_backward": True, "micro_batches": 1}
    assert {parts for _, parts in run.seen} == {1}
    # the bubble before and after, and the removed share
    assert all(fact in caplog.text for fact in ("50.0%", "28.6%", "60.0%", "split_backward=True, micro_batches=1"))


def test_what_seemed_to_help_and_does_not_is_undone(clock: Clock) -> None:
    run = Run(clock, lambda split, parts: 5.0 - split * (1 if len(run.trials) < 2 else -1), SPLIT)
    run.train()
    assert run.autopilot.frozen and run.autopilot.state_dict()["kept"] == {"split_backward": False}
    assert run.tried == ["1 1s", "1 1s", "1"]
    assert run.seen[-1] == (False, 1)
    assert [scalars["freescale/autopilot/reduction"] > 0.2 for scalars in run.logged] == [True, False]


def test_why_a_candidate_that_looks_faster_lost_is_one_sentence(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Let split backward be faster in three of five measured steps."""
    run = Run(clock, lambda split, parts: 4.0 - split * (0.1 if len(run.seen) % 6 in (2, 3, 4) else -0.5), SPLIT)
    with caplog.at_level(logging.INFO):
        run.train()
    assert run.autopilot.rejected == {"split_backward": [True]}
    off, on = "split_backward=False", "split_backward=True"
    assert (
        f"4000.0 ms with {off}, 3900.0 ms with {on}; {on} was faster than {off} in 9 of 15 pairs of steps (11 needed), "
        "by 100.0 ms in the median (40.0 needed), and the step times of one value spread by 600.0 ms; bubble 75.0% before"
    ) in caplog.text


@pytest.mark.parametrize(
    ("seconds", "chosen", "checks", "reason"),
    [
        ([[4.0, 4.1], [3.9, 3.9]], 1, False, None),
        ([[5.0, 6.0, 7.0, 8.0], [7.0, 5.9, 6.8, 4.0]], 0, True, "3 of 4 pairs of steps, by 150.0 ms in the median (more than"),
        ([[5.0, 6.0], [5.5, 4.0]], 0, True, "b was faster than a in 1 of 2 pairs of steps, by 750.0"),
        ([[1.0, 2.0, 3.0], [2.5, 0.5, 2.9]], 1, False, "2 of 3 pairs of steps (3 needed), by 100.0 ms in the median (20.0"),
        ([[1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [1.4, 1.4, 2.9]], 1, False, "by 100.0 ms in the median (500.0 needed)"),
    ],
)
def test_what_is_said_of_the_lowest_median(seconds: Any, chosen: int, checks: bool, reason: str | None) -> None:
    found = compare([_rank([[(each, 0.0) for each in of_candidate] for of_candidate in seconds])])
    said = found.explain(chosen, "abc", checks)
    assert reason in said if reason else said == ""


def test_steps_that_cannot_be_timed_end_it(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(clock, lambda split, parts: 1.0 + 4.0 / parts, validates=lambda step: True)
    with caplog.at_level(logging.INFO):
        run.train(2 * LONGEST + 20)
    assert run.autopilot.frozen and run.autopilot.state_dict()["kept"] == {"split_backward": False, "micro_batches": 1}
    assert run.schedule.measured is None
    assert f"In {2 * LONGEST} steps, fewer than {MEASURED} of each" in caplog.text
    again = run.resumed()
    again.train()
    assert again.autopilot.state_dict()["kept"] == {"split_backward": False, "micro_batches": 4}, (
        "it may have steps that can be timed"
    )


# -- resuming


def test_a_run_that_resumes_goes_on_where_it_was(clock: Clock) -> None:
    run = Run(clock, plain)
    run.train(60)
    assert run.autopilot.state_dict()["kept"]["split_backward"] and not run.autopilot.frozen
    again = run.resumed()
    again.train()
    assert again.seen[0] == (True, 1)
    assert again.tried[0] == "1s 2s 4s", "the trial under way begins anew, what is kept stays"
    assert again.autopilot.frozen and again.autopilot.state_dict()["kept"] == {"split_backward": True, "micro_batches": 4}
    third = again.resumed()
    assert third.autopilot.frozen
    third.train(100)
    assert set(third.seen) == {(True, 4)}, "nothing is tried"


@pytest.mark.parametrize("changed", [{"ranks": 2}, {"target": 0.5}, {"kept": {"split_backward": True}}])
def test_what_another_run_has_found_counts_for_nothing(clock: Clock, changed: dict[str, Any]) -> None:
    run = Run(clock, lambda split, parts: 4.0 - split, SPLIT)
    run.train()
    again = run.resumed(SPLIT if "kept" not in changed else BOTH, **changed)
    assert not again.autopilot.frozen and not again.autopilot.state_dict()["kept"]["split_backward"]


# -- without a target: FreeScaleDataModule(micro_batches="auto")

OF_PARTS = {1: 4.0, 2: 2.0, 4: 3.0}


@pytest.mark.parametrize(("epoch_of", "validates"), [(1000, 1001), (3, 4), (40, 3)])
def test_the_quickest_micro_batches_are_chosen(clock: Clock, epoch_of: int, validates: int) -> None:
    """Validation follows every step whose number is divisible by ``validates``."""

    def after(step: int) -> bool:
        return step % validates == 0 and validates < epoch_of

    run = Run(clock, lambda split, parts: OF_PARTS[parts], PARTS, None, epoch_of=epoch_of, validates=after)
    run.train(LONGEST * 3)
    assert run.autopilot.frozen
    assert (run.schedule.chosen, run.schedule.measured) == (2, 2)


@pytest.mark.parametrize(("epoch_of", "validates"), [(2, False), (50, True)])
def test_a_trial_that_can_time_nothing_ends_with_one(
    clock: Clock, caplog: pytest.LogCaptureFixture, epoch_of: int, validates: bool
) -> None:
    run = Run(clock, lambda split, parts: OF_PARTS[parts], PARTS, None, epoch_of=epoch_of, validates=lambda step: validates)
    with caplog.at_level(logging.INFO):
        run.train(LONGEST * 4)
    assert run.decided_after == LONGEST * 3
    assert run.schedule.chosen == 1
    assert run.schedule.measured is None, "a run that goes on may have longer epochs"
    assert f"{LONGEST * 3} steps" in caplog.text


# -- candidates compared by the times of steps


def _rank(candidates: list[list[tuple[float, float]]], compute: float = 0.0) -> Measurements:
    """Measured steps of one rank, of pairs of seconds and cost."""
    return candidates, [compute] * len(candidates[0])


def _times(*seconds: float) -> list[list[tuple[float, float]]]:
    return [[(each, 0.0)] * MEASURED for each in seconds]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [((4.0, 2.0, 3.0), 1), ((4.0, 3.9, 3.8), 2), ((4.0, 3.99, 3.98), 0), ((1.0, 2.0, 3.0), 0)],
)
def test_the_quickest_by_enough_is_best(seconds: tuple[float, ...], best: int) -> None:
    assert compare([_rank(_times(*seconds))]).best == best


def test_means_over_ranks_decide() -> None:
    found = compare([_rank(_times(4.0, 3.0)), _rank(_times(4.0, 6.0))])
    assert found.best == 0
    assert found.seconds == [4.0, 4.5]


def test_what_is_quicker_in_too_few_pairs_is_not_better() -> None:
    first = [(4.0, 0.0)] * MEASURED
    other = [(2.0, 0.0)] * 8 + [(4.5, 0.0)] * (MEASURED - 8)
    found = compare([_rank([first, other])])
    assert found.saved[1] == 2.0
    assert found.best == 0


def test_batches_of_other_costs_do_not_decide() -> None:
    """Give the second candidate, which saves 5 %, the more expensive batches."""
    draw = random.Random(0)

    def steps(saves: float, dearer: float) -> list[tuple[float, float]]:
        costs = [dearer + draw.random() for _ in range(MEASURED)]
        return [(10.0 + 5.0 * cost - saves + 0.01 * draw.random(), cost) for cost in costs]

    found = compare([_rank([steps(0.0, 0.0), steps(0.5, 0.4)])])
    assert found.best == 1
    assert found.saved[1] == pytest.approx(0.5, abs=0.05)


def test_costs_that_explain_nothing_change_nothing() -> None:
    draw = random.Random(0)
    steps = [[(seconds, draw.random()) for _ in range(MEASURED)] for seconds in (4.0, 3.0)]
    assert compare([_rank(steps)]).saved == [0.0, 1.0]


def test_a_drift_is_in_both() -> None:
    """Steps begin to take ten times as long in the middle of the trial, with either candidate."""
    first = [(1.0 if k < 8 else 10.0, 0.0) for k in range(MEASURED)]
    other = [(0.9 if k < 7 else 9.9, 0.0) for k in range(MEASURED)]
    found = compare([_rank([first, other])])
    assert found.saved[1] == pytest.approx(0.1)
    assert found.best == 1


def test_what_is_lost_is_not_the_compute_of_the_first() -> None:
    found = compare([_rank(_times(4.0, 2.0), compute=1.0), _rank(_times(4.0, 2.0), compute=2.0)])
    assert (found.lost(), found.lost(1)) == (2.5, 0.5)
    assert (found.bubble(), found.bubble(1)) == (2.5 / 4, 0.25)
    assert found.remaining(1) == 0.2
