"""The lower bound is a certificate: no plan beats it, and the plan reaches it; where it falls short, every plan was tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import assign
from lightning_freescale.balance.assign import assignment_bound, imbalance, load_imbalance
from tests.balance.test_assign import limits

MODES = ["fixed", "slack", "free"]
FAMILIES: dict[str, Callable[[np.random.RandomState, int], np.ndarray]] = {
    "short": lambda draw, count: draw.geometric(0.12, count).clip(3, 50),
    "heavy tail": lambda draw, count: np.minimum(np.ceil(10 * (1 + draw.pareto(1.1, count))), 1e6),
    "two clusters": lambda draw, count: np.where(
        draw.rand(count) < 0.1, draw.randint(900, 1100, count), draw.randint(5, 15, count)
    ),
}
COSTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"L": lambda length: length, "L squared": lambda length: length**2}


def _best(cost: np.ndarray, ranks: int, least: int, most: int, slow: np.ndarray) -> float:
    """The imbalance of the best of all plans."""
    plans = np.array(list(itertools.product(range(ranks), repeat=len(cost))))
    held = (plans[:, :, None] == np.arange(ranks)).sum(axis=1)
    plans = plans[(held.min(axis=1) >= least) & (held.max(axis=1) <= most)]
    loads = np.stack([np.where(plans == rank, cost, 0).sum(axis=1) for rank in range(ranks)], axis=1)
    return min(load_imbalance(load, slow) for load in loads)


@st.composite
def small(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Few values, so that they come twice, and a few large ones; whole numbers and others."""
    ranks = draw(st.integers(2, 4))
    values = st.sampled_from([1, 2, 3, 5, 7, 8, 20, 21, 100])
    cost = np.array(draw(st.lists(values, min_size=ranks, max_size={2: 10, 3: 8, 4: 7}[ranks])), dtype=float)
    return cost * draw(st.sampled_from([1.0, 3.0, 0.37])) + draw(st.sampled_from([0.0, 1.5])), ranks


@given(small(), st.sampled_from(MODES), st.sampled_from([None, [1.0, 0.5, 0.8, 1.0], [0.53, 0.317, 1.0, 0.0713]]))
@settings(max_examples=300, deadline=None)
def test_no_plan_is_below_the_bound(case: tuple[np.ndarray, int], mode: str, speeds: list[float] | None) -> None:
    cost, ranks = case
    least, most = limits(len(cost), ranks, mode)
    options: dict[str, Any] = {} if speeds is None else {"rank_speeds": speeds[:ranks]}
    best = _best(cost, ranks, least, most, 1 / np.array([1.0] * ranks if speeds is None else speeds[:ranks]))
    result = assign(cost, ranks, assignment_mode=mode, **options)
    assert result.lower_bound <= best * (1 + 1e-6)
    assert result.imbalance >= best * (1 - 1e-6)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_two_ranks_with_few_samples_get_the_best_plan(seed: int) -> None:
    draw = np.random.RandomState(seed)
    cost = draw.lognormal(3, 1.2, draw.randint(2, 11))
    result = assign(cost, 2)
    assert result.imbalance <= _best(cost, 2, len(cost) // 2, -(-len(cost) // 2), np.ones(2)) * 1.0004
    assert result.gap <= 0.0003 + 1e-9


def test_the_bound_is_that_of_the_speeds_that_were_given() -> None:
    """All with all of their decimals, which the search does without."""
    for seed in range(40):
        draw = np.random.RandomState(seed)
        cost, speeds = draw.pareto(1.1, 7) + 0.1, draw.rand(3) + 0.05
        for mode in MODES:
            plan = assign(cost, 3, assignment_mode=mode, rank_speeds=speeds)
            assert plan.lower_bound <= _best(cost, 3, *limits(7, 3, mode), 1 / speeds) * (1 + 1e-9)
            assert plan.imbalance == pytest.approx(imbalance(cost, plan.rank_of_sample, 3, speeds), rel=1e-9)
            loads = np.bincount(plan.rank_of_sample, cost, 3)
            assert plan.imbalance == pytest.approx((loads / speeds).max() * speeds.sum() / cost.sum(), rel=1e-9)
            assert plan.lower_bound <= plan.imbalance


@pytest.mark.parametrize(
    ("cost", "ranks"),
    [
        ([2289, 969, 2289, 3300, 2624, 2289, 1296, 3641, 2961], 3),
        ([0.711, 0.322, 0.998, 0.349, 0.598, 0.302, 0.515, 0.780], 4),
    ],
)
def test_three_and_four_ranks_with_few_samples_get_the_best_plan(cost: list[float], ranks: int) -> None:
    for mode in MODES:
        best = _best(np.array(cost), ranks, *limits(len(cost), ranks, mode), np.ones(ranks))
        plan = assign(cost, ranks, assignment_mode=mode)
        assert plan.imbalance <= best * 1.0004
        assert plan.gap <= 0.0003 + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_few_samples_with_limits_and_speeds_get_the_best_plan(seed: int) -> None:
    draw = np.random.RandomState(seed)
    cost, tokens, speeds = draw.pareto(1.1, 8) + 0.1, draw.randint(1, 20, 8), draw.rand(3) + 0.05
    limit = float(np.sort(tokens)[::-1][[0, 5, 6]].sum() + 1)
    plans = np.array(list(itertools.product(range(3), repeat=8)))
    held, load = ((np.eye(3)[plans] * values[:, None]).sum(axis=1) for values in (tokens, cost))
    allowed = (held.max(axis=1) <= limit) & (np.eye(3)[plans].sum(axis=1).min(axis=1) > 0)
    options: dict[str, Any] = {"assignment_mode": "free", "tokens": tokens, "max_tokens_per_rank": limit, "rank_speeds": speeds}
    if not allowed.any():
        with pytest.raises(ValueError, match="no place was found"):
            assign(cost, 3, **options)
        return
    best = (load / speeds).max(axis=1)[allowed].min() * speeds.sum() / cost.sum()
    assert assign(cost, 3, **options).imbalance <= best * 1.0011  # what speeds in whole numbers may miss


def test_two_giants_share_the_cheapest_company() -> None:
    """The dearest alone would take all of it, and leave none to the second."""
    cost = np.concatenate([[2110.0, 2070.0], np.full(31, 10.0), np.full(64 * 32 - 33, 40.0)])
    result = assign(cost, 64)
    assert result.gap < 1e-3 and result.imbalance == pytest.approx(2.159, abs=1e-3)


@given(st.integers(0, 10**6), st.sampled_from(MODES))
@settings(max_examples=150, deadline=None)
def test_any_heavy_tail_is_planned(seed: int, mode: str) -> None:
    """Also where a single rank has what the bound is about."""
    draw = np.random.RandomState(seed)
    ranks = draw.randint(2, 9)
    cost = draw.pareto(draw.uniform(0.3, 1.5), draw.randint(ranks, 12 * ranks)) + 0.01
    result = assign(cost, ranks, assignment_mode=mode)
    assert result.gap >= 0 and len(np.unique(result.rank_of_sample)) == ranks


def test_whole_numbers_do_not_split() -> None:
    seven = assign(np.full(35, 7.0), 8)
    assert seven.gap == pytest.approx(0, abs=1e-6) and seven.imbalance == pytest.approx(5 * 8 / 35)
    fitted = assign(0.0317 * np.full(35, 7.0) + 0.4, 8)  # a cost that is none
    assert fitted.gap == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("counts", [(64, 32), (8, 40), (60, 33)], ids=str)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_is_as_good_as_its_bound(family: str, cost: str, counts: tuple[int, int]) -> None:
    ranks, each = counts
    for seed in range(3):
        lengths = FAMILIES[family](np.random.RandomState(seed), ranks * each - 5 * (ranks == 60)).astype(float)
        assert assign(COSTS[cost](lengths), ranks).gap < 1.2e-3


@pytest.mark.parametrize("mode", MODES)
def test_giants_in_numbers_that_do_not_divide(mode: str) -> None:
    """Of 205 on 64 ranks, 13 ranks must hold four: the cheapest four times 13."""
    draw = np.random.RandomState(0)
    cost = np.concatenate([draw.uniform(8e5, 1.2e6, 205), draw.uniform(25, 225, 64 * 32 - 205)])
    result = assign(cost, 64, assignment_mode=mode)
    assert result.lower_bound > 1.05 and result.gap < 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_expensive_samples_in_pairs(mode: str) -> None:
    """Of 14 on eight ranks, six ranks hold two: which two, the bound knows to the sample."""
    cost = np.concatenate([np.random.RandomState(3).normal(500, 40, 14) ** 2, np.full(50, 400.0)])
    result = assign(cost, 8, assignment_mode=mode)
    paired = np.sort(cost)[50:62]  # the two most expensive are alone
    largest = (paired + paired[::-1]).max() + (6 * 400 if mode == "fixed" else 0)
    assert result.lower_bound == pytest.approx(largest / cost.sum() * 8) and result.gap < 1e-3


def test_ranks_with_one_more_of_the_expensive_samples_hold_the_cheapest_of_them() -> None:
    """Though a few are so cheap that a rank could do with two more."""
    draw = np.random.RandomState(0)
    lengths = np.concatenate([draw.normal(500, 25, 424), draw.normal(20, 3, 64 * 32 - 424)]).round()
    result = assign(lengths**2 + 1280 * lengths, 64)
    assert result.gap < 1e-3


def test_what_nearly_comes_in_steps_is_rounded_up() -> None:
    """With 61.6 positions per rank, some rank has 62, whatever the small quadratic part of the cost."""
    lengths = np.array(([3, 4, 5, 6, 7, 8, 9, 11, 17] * 8)[:64], dtype=float)
    result = assign(1280 * lengths + lengths**2, 8)
    assert result.lower_bound > 1.003 and result.gap < 3e-3


def test_few_samples_are_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = np.maximum(1, np.floor(np.random.default_rng([2, 4, 8]).lognormal(3.5, 1.2, 32)))
    assert assign(cost, 4).gap < 1e-6
    monkeypatch.setattr(import_module("lightning_freescale.balance.solver.search"), "_BEGINNINGS", 0)  # not the function
    assert assign(cost, 4).gap > 1e-3


def test_planted_partitions_are_nearly_found() -> None:
    for ranks, size, most in ((8, 4, 0.01), (64, 8, 0.002), (256, 3, 0.02)):
        draw = np.random.RandomState(ranks)
        parts = draw.randint(1, 1000, (ranks, size)).astype(float)
        parts[:, -1] = 6000 - parts[:, :-1].sum(axis=1)
        assert assign(draw.permutation(parts.ravel()), ranks).imbalance < 1 + most


def test_exchanges_reach_what_swaps_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = FAMILIES["short"](np.random.RandomState(2), 64 * 32).astype(float)
    cost = lengths**2 + 1280 * lengths
    with_exchanges = assign(cost, 64).gap
    monkeypatch.setattr("lightning_freescale.balance.solver.exchanges._ROUNDS", 0)
    assert with_exchanges < 1e-3 < assign(cost, 64).gap


def test_bound_alone_is_that_of_the_plan() -> None:
    cost = np.random.RandomState(1).lognormal(4, 1.5, 300)
    for mode in MODES:
        plan = assign(cost, 10, assignment_mode=mode)
        assert assignment_bound(cost, 10, assignment_mode=mode) == (plan.lower_bound, plan.dominated)
        assert imbalance(cost, plan.rank_of_sample, 10) == pytest.approx(plan.imbalance)
