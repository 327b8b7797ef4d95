"""Why ranks compute longer than others, where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance.cost import CostModel, sample_features
from lightning_freescale.profiling.analysis.imbalance import Imbalance, split_imbalance

SIGMA = 1.5


def _lengths(rng: np.random.Generator, ranks: int, steps: int, samples: int = 16) -> np.ndarray:
    """Heavy-tailed history lengths."""
    return np.clip(rng.lognormal(4.0, SIGMA, (steps, ranks, samples)), 4, 4096).astype(int)


def _compute(rng: np.random.Generator, lengths: np.ndarray, speed: np.ndarray, noise: float = 0.05) -> np.ndarray:
    cost = (1e-4 + 4e-6 * lengths + 3e-9 * lengths.astype(float) ** 2).sum(axis=2) + 2e-3
    return cost * speed * (1 + noise * rng.standard_normal(cost.shape)).clip(0.5)


def _split(lengths: np.ndarray, compute: np.ndarray) -> Imbalance:
    """As the callback does it."""
    steps, ranks = compute.shape
    sums = sample_features(lengths).sum(axis=2).reshape(-1, 4)
    fit = CostModel.fit(sums, compute.reshape(-1), np.tile(np.arange(ranks), steps))
    coefficients = [fit.model.constant, fit.model.linear, fit.model.quadratic, fit.model.unique]
    expected = (fit.base + sums @ coefficients).reshape(steps, ranks)
    slowest = np.quantile(fit.slowness, 0.5, method="lower")
    return split_imbalance(compute, expected, fit.slowness / slowest)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_slow_rank_is_named_and_nobody_else(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    lengths = _lengths(rng, ranks, 200)
    speed = np.ones(ranks)
    speed[1] = 1.3
    found = _split(lengths, _compute(rng, lengths, speed))
    assert list(found.slow) == [1]
    assert found.slow[1] == pytest.approx(1.3, abs=0.05)
    assert found.scores[1] == found.slow[1]
    assert found.method == "cost model"
    assert found.hardware > 0 and found.data > 0
    assert found.residual == pytest.approx(0.6745 * 0.05, rel=0.2)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_rank_that_draws_the_longest_is_not_slow(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    lengths = _lengths(rng, ranks, 200)
    longest = lengths.sum(axis=2).argmax(axis=1)
    for step, rank in enumerate(longest):
        lengths[step, [0, rank]] = lengths[step, [rank, 0]]
    compute = _compute(rng, lengths, np.ones(ranks))
    found = _split(lengths, compute)
    assert found.slow == {}
    assert found.scores[0] == pytest.approx(1.0, abs=0.05)
    assert abs(found.hardware) < 0.1 * found.data
    assert abs(found.jitter) < 0.15 * found.data
    if ranks > 2:
        blind = split_imbalance(compute)
        assert list(blind.slow) == [0], "without a cost model there is no knowing"


def test_slow_rank_with_less_work_is_named() -> None:
    """Rebalanced: all ranks take equally long."""
    rng = np.random.default_rng(3)
    lengths = _lengths(rng, 8, 300)
    speed = np.ones(8)
    speed[5] = 1.3
    lengths[:, 5] = (lengths[:, 5] / 1.4).astype(int)
    compute = _compute(rng, lengths, speed)
    found = _split(lengths, compute)
    assert list(found.slow) == [5]
    assert not split_imbalance(compute).slow


@given(st.integers(0, 10_000), st.integers(2, 9), st.booleans())
@settings(deadline=None, max_examples=40)
def test_causes_add_up(seed: int, ranks: int, known: bool) -> None:
    rng = np.random.default_rng(seed)
    compute, expected = rng.lognormal(0, 1, (20, ranks)), rng.lognormal(0, 1, (20, ranks))
    found = split_imbalance(compute, expected, rng.uniform(0.9, 1.5, ranks)) if known else split_imbalance(compute)
    excess = (compute.max(axis=1) - compute.mean(axis=1)).mean()
    assert found.data + found.hardware + found.jitter == pytest.approx(excess)
    assert np.isfinite(found.scores).all()


def test_causes_of_known_size() -> None:
    """Two ranks: samples cost 2 and 4, the second is half as fast, and takes 1 s more in every step."""
    expected = np.tile([2.0, 4.0], (10, 1))
    found = split_imbalance(expected * [1, 2] + [0, 1], expected, np.array([1.0, 2.0]))
    assert (found.data, found.hardware, found.jitter) == (pytest.approx(1), pytest.approx(2), pytest.approx(0.5))
    less = split_imbalance(np.full((10, 2), 4.0), np.tile([4.0, 2.0], (10, 1)), np.array([1.0, 2.0]))
    assert (less.data, less.hardware, less.jitter) == (1, -1, 0), "slowness takes away what less work would bring"


def test_without_a_cost_model_what_persists_is_hardware() -> None:
    rng = np.random.default_rng(0)
    steps = rng.uniform(1, 3, (100, 1))
    found = split_imbalance(steps * [1.0, 1.0, 1.5, 1.0])
    assert found.method == "ranks"
    assert found.hardware == pytest.approx((1.5 - 1.125) * steps.mean())
    assert (found.data, found.jitter) == (0, pytest.approx(0))
    assert found.slow == {2: pytest.approx(1.5)}
    assert split_imbalance(steps * [1.5, 1.0]).scores == (pytest.approx(1.5), 1.0)
    assert split_imbalance(steps * [1.0, 1.05, 1.0]).slow == {}
    drawn = rng.lognormal(0, 0.5, (400, 4))
    assert split_imbalance(drawn).jitter > 0.7 * (drawn.max(axis=1) - drawn.mean(axis=1)).mean()
    assert split_imbalance(drawn).slow == {}


@pytest.mark.parametrize("known", [True, False])
def test_outlier_steps_name_nobody(known: bool) -> None:
    """A rank that hangs for a while now and then is not slow."""
    rng = np.random.default_rng(0)
    expected = rng.uniform(1, 2, (100, 8)) if known else np.broadcast_to(rng.uniform(1, 2, (100, 1)), (100, 8))
    compute = expected * (1 + 0.05 * rng.standard_normal((100, 8)))
    compute[::5, 3] *= 20
    found = split_imbalance(compute, expected, np.ones(8)) if known else split_imbalance(compute)
    assert found.slow == {}
    assert found.jitter > 5 * (found.data + found.hardware)
    assert found.residual is not None and found.residual < 0.06


def test_noise_seldom_names_anybody() -> None:
    """Few steps and much noise make scores above 1.1 that mean nothing."""
    named = above = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        compute = np.exp(rng.uniform(0.05, 0.6) * rng.standard_normal((12, rng.integers(2, 9))))
        scores = np.median(compute, axis=0)
        scores /= np.quantile(scores, 0.5, method="lower")
        named += len(split_imbalance(compute, np.ones(compute.shape), scores).slow)
        above += int((scores > 1.1).sum())
    assert above > 300, "or there is nothing to see"
    assert named < 0.1 * above


def test_ranks_of_two_makes() -> None:
    """Three of eight are slow: the others are the measure. Speeds that are spread evenly name nobody."""
    rng = np.random.default_rng(0)
    even = np.ones((50, 8))
    speed = np.array([1.3, 1, 1, 1.3, 1, 1.3, 1, 1])
    compute = even * speed * (1 + 0.02 * rng.standard_normal((50, 8)))
    assert set(split_imbalance(compute, even, speed).slow) == {0, 3, 5}
    spread = np.linspace(1, 1.4, 8)
    spread /= np.quantile(spread, 0.5, method="lower")
    assert split_imbalance(even * spread, even, spread).slow == {}


def test_steps_without_samples() -> None:
    expected = np.tile([1.0, 0.0], (10, 1))
    found = split_imbalance(expected.copy(), expected, np.array([1.0, 1.0]))
    assert (found.data, found.hardware, found.jitter, found.slow) == (0.5, 0, 0, {})
    assert split_imbalance(np.zeros((3, 2)), np.zeros((3, 2)), np.ones(2)).residual is None
    assert np.isfinite(split_imbalance(np.zeros((3, 2))).scores).all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="both expected and slowness"):
        split_imbalance(np.ones((3, 2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="shapes"):
        split_imbalance(np.ones((3, 2)), np.ones((3, 1)), np.ones(2))
