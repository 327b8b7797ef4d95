"""Plans within a limit on tokens: balanced as well as the limit allows, in about the time of plans without one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import assign
from lightning_freescale.balance.assign import Assignment, imbalance
from lightning_freescale.balance.solver import swaps


def _lengths(seed: int, ranks: int) -> np.ndarray:
    return np.minimum(np.exp(np.random.RandomState(seed).normal(4, 1, ranks * 32)).astype(int) + 1, 2000).astype(float)


def _plan(lengths: np.ndarray, ranks: int, times: float, **options: Any) -> Assignment:
    """Plan with a limit of so many times a rank's fair share."""
    limit = max(lengths.sum() / ranks * times, lengths.max())
    plan = assign(lengths**2 + 320 * lengths, ranks, tokens=lengths, max_tokens_per_rank=limit, **options)
    assert np.bincount(plan.rank_of_sample, lengths, ranks).max() <= limit
    return plan


@pytest.mark.parametrize("mode", ["fixed", "slack", "free"])
@pytest.mark.parametrize(("ranks", "times"), [(4, 1.05), (16, 1.05), (64, 1.2)])
def test_no_other_names_of_the_ranks_are_better(ranks: int, times: float, mode: str) -> None:
    speeds = np.ones(ranks)
    speeds[::2] = 0.5
    for seed in range(2):
        lengths = _lengths(seed, ranks)
        plan = _plan(lengths, ranks, times, assignment_mode=mode, rank_speeds=speeds)
        costs = lengths**2 + 320 * lengths
        by_load = np.argsort(-np.bincount(plan.rank_of_sample, costs, ranks), kind="stable")
        renamed = np.empty(ranks, dtype=int)
        renamed[by_load] = np.argsort(-speeds, kind="stable")
        ours, other = (imbalance(costs, each, ranks, speeds) for each in (plan.rank_of_sample, renamed[plan.rank_of_sample]))
        assert ours <= other


@pytest.mark.parametrize("mode", ["fixed", "slack"])
@pytest.mark.parametrize(("ranks", "far"), [(16, 0.001), (64, 0.008)])
def test_a_tight_limit_costs_little(ranks: int, far: float, mode: str) -> None:
    for seed in range(4):
        assert _plan(_lengths(seed, ranks), ranks, 1.05, assignment_mode=mode).gap < far


def test_another_first_plan_is_tried_where_the_first_is_in_the_way() -> None:
    speeds = np.resize([0.5, 1.0], 16)
    for seed in range(4):
        assert _plan(_lengths(seed, 16), 16, 1.2, assignment_mode="free", rank_speeds=speeds).gap < 0.02


def test_speeds_and_a_limit_come_close_to_the_bound() -> None:
    speeds = np.resize([0.5, 1.0], 64)
    for seed in range(4):
        assert _plan(_lengths(seed, 64), 64, 1.2, rank_speeds=speeds).gap < 0.08


def test_a_limit_that_changes_nothing() -> None:
    lengths = _lengths(0, 16)
    bare = assign(lengths, 16)
    most = np.bincount(bare.rank_of_sample, lengths).max()
    limited = assign(lengths, 16, tokens=lengths, max_tokens_per_rank=float(most))
    np.testing.assert_array_equal(bare.rank_of_sample, limited.rank_of_sample)


def test_a_limit_takes_a_bounded_number_of_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module, name in (("search", "refine"), ("token_limit", "refine"), ("search", "exchange")):
        room = import_module(f"lightning_freescale.balance.solver.{module}")  # the package has a function of that name
        found = getattr(room, name)
        monkeypatch.setattr(room, name, lambda *given, found=found, name=name: calls.append(name) or found(*given))
    for ranks in (64, 256):
        calls.clear()
        _plan(_lengths(0, ranks), ranks, 1.01)
        assert 0 < len(calls) <= 12, "a plan without the limit, brought within it, or two other ways, and exchanges once"
        assert calls.count("exchange") <= 3


@pytest.mark.parametrize("options", [{}, {"assignment_mode": "free"}, {"rank_speeds": np.resize([0.5, 1.0], 80)}])
def test_numba_finds_the_identical_plan(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, plans = _lengths(0, 80), []
    for enabled in (True, False):
        monkeypatch.setattr(swaps, "numba_enabled", enabled)
        plans.append(_plan(lengths, 80, 1.05, **options).rank_of_sample)
    np.testing.assert_array_equal(*plans)
