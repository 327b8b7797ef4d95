"""Candidates compared by the time of steps: what decides, and what does not."""

from __future__ import annotations

import random

import pytest

from lightning_freescale.strategy.setting_trial import MEASURED, Measured, Measurements, compare


def _rank(candidates: list[list[tuple[float, float]]], compute: float = 0.0) -> Measurements:
    """Measured steps of one rank, of pairs of seconds and cost."""
    return Measurements([[Measured(*step) for step in each] for each in candidates], [compute] * len(candidates[0]))


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
    """The second one saves 5 % and happens to have the dearer batches."""
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
