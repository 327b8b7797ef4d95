"""The searches that plans are held against: of an exact solver, and a long one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest


@pytest.mark.parametrize("seed", range(4))
def test_exact_solver_finds_the_best_of_all_plans(seed: int) -> None:
    pytest.importorskip("ortools")
    from exact import best_imbalance

    draw = np.random.RandomState(seed)
    cost = draw.lognormal(3, 1, 9) if seed % 2 else draw.randint(1, 5, 9).astype(float)
    for limits in ((3, 3), (1, 4), (1, 9)):
        plans = (np.array(plan) for plan in itertools.product(range(3), repeat=9))
        kept = [plan for plan in plans if all(limits[0] <= part <= limits[1] for part in np.bincount(plan, minlength=3))]
        times = [np.bincount(plan, cost, 3).max() / cost.sum() * 3 for plan in kept]
        for start in (int(np.argmin(times)), int(np.argmax(times))):
            best = best_imbalance(cost, kept[start], 3, limits, seconds=30)
            assert best.found == pytest.approx(min(times), rel=2e-5)
            assert min(times) * (1 - 2e-5) <= best.proved <= min(times) * (1 + 1e-12)


@pytest.mark.slow
def test_long_search_finds_a_planted_plan() -> None:
    pytest.importorskip("numba")
    from long_search import search

    plan = np.repeat(np.arange(4), 4)
    cost = np.array([9.0, 5, 4, 2, 8, 7, 3, 2, 10, 6, 3, 1, 7, 6, 5, 2])  # 20 on every rank as they stand
    worse = plan[np.random.RandomState(0).permutation(16)]
    assert np.bincount(worse, cost).max() > 20
    assert search(cost, worse, 4, (4, 4), 1.0, seconds=20) == pytest.approx(1.0)


@pytest.mark.slow
def test_long_search_keeps_the_limits_on_the_counts() -> None:
    pytest.importorskip("numba")
    from long_search import search

    cost, plan = np.array([10.0, 1, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    assert search(cost, plan, 2, (3, 3), 11 / 7.5, seconds=0.3) == pytest.approx(12 / 7.5)
    assert search(cost, plan, 2, (3, 6), 11 / 7.5, seconds=0.3) == pytest.approx(12 / 7.5)
    assert search(cost, plan, 2, (2, 4), 11 / 7.5, seconds=20) == pytest.approx(11 / 7.5)
