"""The assignment: a partition with equal counts, deterministic, never below its lower bound."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import CostModel, assign
from lightning_freescale.balance.assign import counts, deal, imbalance


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    ranks = draw(st.integers(1, 9))
    size = draw(st.integers(ranks, ranks * 6))
    return np.array(draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size)), dtype=float), ranks


@given(batches())
@settings(max_examples=200, deadline=None)
def test_properties(batch: tuple[np.ndarray, int]) -> None:
    cost, ranks = batch
    result = assign(cost, ranks)
    held = np.bincount(result.rank_of_sample, minlength=ranks)
    assert sorted(held, reverse=True) == counts(len(cost), ranks)
    assert held.min() >= 1
    assert result.imbalance >= result.lower_bound - 1e-12
    np.testing.assert_array_equal(result.rank_of_sample, assign(cost, ranks).rank_of_sample)
    order = np.random.RandomState(0).permutation(len(cost))
    loads = np.bincount(result.rank_of_sample, cost, ranks)
    np.testing.assert_allclose(
        sorted(np.bincount(assign(cost[order], ranks).rank_of_sample, cost[order], ranks)), sorted(loads)
    )


@given(batches())
@settings(max_examples=100, deadline=None)
def test_lower_bound_holds_for_every_assignment(batch: tuple[np.ndarray, int]) -> None:
    """Against all assignments with these counts, where there are few enough to try."""
    cost, ranks = batch
    cost, ranks = cost[:6], min(ranks, 3)
    if len(cost) < ranks:
        return
    quota = counts(len(cost), ranks)
    best = min(
        imbalance(cost, np.array(ranking), ranks)
        for ranking in itertools.product(range(ranks), repeat=len(cost))
        if sorted(np.bincount(ranking, minlength=ranks), reverse=True) == quota
    )
    assert assign(cost, ranks).lower_bound <= best + 1e-12


def test_long_tail_is_balanced() -> None:
    """Within a few per cent of the bound where the deal leaves a factor of two."""
    lengths = np.random.RandomState(0).lognormal(4, 1.0, size=64 * 32).clip(1, 600)
    cost = CostModel()(lengths)
    result = assign(cost, 64)
    assert result.imbalance < 1.05 * result.lower_bound
    assert imbalance(cost, deal(len(cost), 64), 64) > 1.5 * result.imbalance


def test_same_plan_in_another_process() -> None:
    code = "import numpy as np; from lightning_freescale.balance import assign;"
    code += "print(assign(np.random.RandomState(1).rand(500) ** 4, 7).rank_of_sample.tolist())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str(assign(np.random.RandomState(1).rand(500) ** 4, 7).rank_of_sample.tolist())


def test_all_costs_zero() -> None:
    result = assign(np.zeros(6), 3)
    assert (result.imbalance, result.lower_bound) == (1.0, 1.0)
    assert np.bincount(result.rank_of_sample).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("costs", "ranks", "message"),
    [
        ([1.0], 2, "1 samples for 2 ranks"),
        ([1.0], 0, "ranks=0"),
        ([1.0, -1.0], 1, "cost -1.0 of sample 1"),
        ([float("nan")], 1, "cost nan of sample 0"),
        ([[1.0]], 1, r"shape \(1, 1\)"),
    ],
)
def test_bad_input(costs: list, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(costs, ranks)


def test_cost_model() -> None:
    np.testing.assert_allclose(CostModel(2, 3, 4)([0, 1, 2]), [2, 9, 24])
    model = CostModel.from_config(dim=256, layers=3)
    assert model.linear / model.quadratic == 5 * 256
    with pytest.raises(ValueError, match="linear=-1"):
        CostModel(linear=-1)
    with pytest.raises(ValueError, match="dim=0"):
        CostModel.from_config(dim=0)
