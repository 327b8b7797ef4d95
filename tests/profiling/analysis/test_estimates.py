"""Estimates from noisy measurements: causes of imbalance, growing memory, and planned balance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_freescale.balance.cost import CostModel, sample_features
from lightning_freescale.profiling import PlannedStep
from lightning_freescale.profiling.analysis.imbalance import Imbalance, planned_balance, planned_padding, split_imbalance
from lightning_freescale.profiling.recording.memory import MemoryWindows


def _lengths(rng: np.random.Generator, ranks: int, steps: int) -> np.ndarray:
    """Heavy-tailed history lengths of 16 samples on each rank in each step."""
    return np.clip(rng.lognormal(4.0, 1.5, (steps, ranks, 16)), 4, 4096).astype(int)


def _compute(rng: np.random.Generator, lengths: np.ndarray, speed: np.ndarray) -> np.ndarray:
    cost = (1e-4 + 4e-6 * lengths + 3e-9 * lengths.astype(float) ** 2).sum(axis=2) + 2e-3
    return cost * speed * (1 + 0.05 * rng.standard_normal(cost.shape)).clip(0.5)


def _split(lengths: np.ndarray, compute: np.ndarray) -> Imbalance:
    """As the callback does it."""
    steps, ranks = compute.shape
    sums = sample_features(lengths).sum(axis=2).reshape(-1, 4)
    fit = CostModel.fit(sums, compute.reshape(-1), np.tile(np.arange(ranks), steps))
    coefficients = [fit.model.constant, fit.model.linear, fit.model.quadratic, fit.model.unique]
    expected = (fit.base + sums @ coefficients).reshape(steps, ranks)
    return split_imbalance(compute, expected, fit.slowness / np.quantile(fit.slowness, 0.5, method="lower"))


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_slow_rank_is_named_and_one_that_draws_the_longest_is_not(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    lengths, speed = _lengths(rng, ranks, 200), np.ones(ranks)
    speed[1] = 1.3
    lighter = lengths.copy()
    lighter[:, 1] = (lengths[:, 1] / 1.4).astype(int)  # rebalanced: all ranks take equally long
    assert list(_split(lighter, _compute(rng, lighter, speed)).slow) == [1]
    found = _split(lengths, _compute(rng, lengths, speed))
    assert found.slow == {1: pytest.approx(1.3, abs=0.05)} and found.scores[1] == found.slow[1]
    assert found.method == "cost model" and found.hardware > 0 and found.data > 0
    assert found.residual == pytest.approx(0.6745 * 0.05, rel=0.2)
    for step, rank in enumerate(lengths.sum(axis=2).argmax(axis=1)):
        lengths[step, [0, rank]] = lengths[step, [rank, 0]]
    compute = _compute(rng, lengths, np.ones(ranks))
    found = _split(lengths, compute)
    assert found.slow == {} and found.scores[0] == pytest.approx(1.0, abs=0.05)
    assert abs(found.hardware) < 0.1 * found.data and abs(found.jitter) < 0.15 * found.data
    assert ranks == 2 or list(split_imbalance(compute).slow) == [0], "without a cost model there is no knowing"


def test_causes_of_known_size() -> None:
    """Two ranks: samples cost 2 and 4, the second is half as fast, and takes 1 s more in every step."""
    expected, slowness = np.tile([2.0, 4.0], (10, 1)), np.array([1.0, 2.0])
    found = split_imbalance(expected * [1, 2] + [0, 1], expected, slowness)
    assert (found.data, found.hardware, found.jitter) == (pytest.approx(1), pytest.approx(2), pytest.approx(0.5))
    less = split_imbalance(np.full((10, 2), 4.0), expected[:, ::-1], slowness)
    assert (less.data, less.hardware, less.jitter) == (1, -1, 0), "slowness takes away what less work would bring"
    idle = np.tile([1.0, 0.0], (10, 1))  # without samples
    found = split_imbalance(idle.copy(), idle, np.ones(2))
    assert (found.data, found.hardware, found.jitter, found.slow) == (0.5, 0, 0, {})
    assert split_imbalance(np.zeros((3, 2)), np.zeros((3, 2)), np.ones(2)).residual is None
    assert np.isfinite(split_imbalance(np.zeros((3, 2))).scores).all()


def test_without_a_cost_model_what_persists_is_hardware() -> None:
    rng = np.random.default_rng(0)
    steps = rng.uniform(1, 3, (100, 1))
    found = split_imbalance(steps * [1.0, 1.0, 1.5, 1.0])
    assert found.hardware == pytest.approx((1.5 - 1.125) * steps.mean())
    assert (found.method, found.data, found.jitter) == ("ranks", 0, pytest.approx(0))
    assert found.slow == {2: pytest.approx(1.5)}
    assert split_imbalance(steps * [1.5, 1.0]).scores == (pytest.approx(1.5), 1.0)
    assert split_imbalance(steps * [1.0, 1.05, 1.0]).slow == {}
    drawn = rng.lognormal(0, 0.5, (400, 4))
    found = split_imbalance(drawn)
    assert found.jitter > 0.7 * (drawn.max(axis=1) - drawn.mean(axis=1)).mean() and found.slow == {}


@pytest.mark.parametrize("known", [True, False])
def test_outlier_steps_name_no_rank(known: bool) -> None:
    """Check that a rank with occasional long steps is not slow."""
    rng = np.random.default_rng(0)
    expected = rng.uniform(1, 2, (100, 8 if known else 1)) * np.ones((100, 8))
    compute = expected * (1 + 0.05 * rng.standard_normal((100, 8)))
    compute[::5, 3] *= 20
    found = split_imbalance(compute, expected, np.ones(8)) if known else split_imbalance(compute)
    assert found.slow == {} and found.jitter > 5 * (found.data + found.hardware)
    assert found.residual is not None and found.residual < 0.06


def test_noise_names_no_rank() -> None:
    """Check that a rank with a factor of 1.2 is slow only if its steps vary little."""
    scores, turns = np.array([1.0, 1.0, 1.2]), np.array([[-1.0], [1.0]] * 6)
    for noise, slow in ((0.09, [2]), (0.12, [])):
        assert list(split_imbalance(scores * (1 + noise * turns), np.ones((12, 3)), scores).slow) == slow


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("half", [slice(None, 50), slice(50, None)])
def test_a_rank_that_is_slow_for_a_while_is_not_slow_hardware(known: bool, half: slice) -> None:
    rng = np.random.default_rng(0)
    expected = rng.uniform(1, 2, (100, 4 if known else 1)) * np.ones((100, 4))
    compute = expected * (1 + 0.02 * rng.standard_normal((100, 4)))
    always = compute.copy()
    always[:, 2] *= 1.6
    compute[half, 2] *= 1.6
    found, lasting = (
        split_imbalance(each, *((expected, np.array([1, 1, score, 1])) if known else ()))
        for each, score in ((compute, 1.3), (always, 1.6))
    )
    assert found.slow == {} and found.scores[2] < 1.05 and found.jitter > 5 * abs(found.hardware)
    assert list(lasting.slow) == [2] and lasting.hardware > 5 * abs(lasting.jitter)


@pytest.mark.parametrize("seed", range(20))
def test_jitter_is_at_most_the_measured_imbalance(seed: int) -> None:
    """Use costs and scores that explain nothing."""
    rng = np.random.default_rng(seed)
    compute, expected = rng.lognormal(0, 1, (2, 9, 3))
    excess = (compute.max(axis=1) - compute.mean(axis=1)).mean()
    for found in (split_imbalance(compute), split_imbalance(compute, expected, rng.lognormal(0, 0.3, 3))):
        assert found.jitter <= excess * (1 + 1e-9)
        assert found.data + found.hardware + found.jitter == pytest.approx(excess)


def test_ranks_of_two_makes() -> None:
    """Three of eight are slow: the others are the measure. Speeds that are spread evenly name no rank."""
    even, speed = np.ones((50, 8)), np.array([1.3, 1, 1, 1.3, 1, 1.3, 1, 1])
    compute = even * speed * (1 + 0.02 * np.random.default_rng(0).standard_normal((50, 8)))
    assert set(split_imbalance(compute, even, speed).slow) == {0, 3, 5}
    spread = np.linspace(1, 1.4, 8) / 1.17
    assert split_imbalance(even * spread, even, spread).slow == {}


MB = 1e6


def _held(*ranks: np.ndarray) -> MemoryWindows:
    current = np.stack(ranks, axis=1)
    return MemoryWindows(range(len(current)), current, np.maximum.accumulate(current))


def _noise(seed: int, windows: int, size: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size * MB, windows)


@pytest.mark.parametrize("windows", [11, 12, 40, 300])
def test_a_leak_is_told_from_noise(windows: int) -> None:
    for seed, level in enumerate((300, 1000) * 20):
        leak = level * MB + 4 * MB * np.arange(windows) + _noise(seed, windows, 1)
        found = _held(level * MB + _noise(seed + 100, windows, 1), leak)
        assert found.growing == [1] and found.slopes is not None
        assert found.slopes[1] == pytest.approx(4 * MB, rel=0.2)
    for noise in (0, 1, 30):
        assert _held(*(300 * MB + _noise(seed, windows, noise) for seed in range(300))).growing == []


@pytest.mark.parametrize("windows", [12, 40, 300])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.25])
def test_memory_that_saturates_does_not_grow(windows: int, share: float) -> None:
    """Use memory that fills up with a time constant of a share of the run."""
    at = np.arange(windows)
    ranks = (300 * MB + 200 * MB * (1 - np.exp(-at / (share * windows))) + _noise(seed, windows, 0.5) for seed in range(50))
    assert _held(*ranks).growing == []


def test_what_is_no_growth_and_what_is_imbalance() -> None:
    at = np.arange(40)
    for when in (1, 5, 10, 20, 30, 38):
        more = (300 * MB + 200 * MB * (at >= when) + _noise(seed, 40, 1) for seed in range(50))
        assert _held(*more).growing == [], f"one more buffer in window {when}"
    saw = 300 * MB + 100 * MB * (at % 7) / 7
    assert _held(saw, saw[::-1]).growing == [], "buffers that come back"
    assert _held(300 * MB + 0.3 * MB * at).growing == [], "too little for its size"
    first = np.full(12, 300 * MB)
    first[0] = 10 * MB
    assert (_held(first).growing, _held(first).slopes) == ([], [0.0]), "the first window says nothing"
    few = _held(300 * MB + 50 * MB * np.arange(10))
    assert (few.growing, few.slopes) == ([], None), "a few windows are not judged"
    found = _held(*(np.full(3, size * MB) for size in (100, 100, 100, 300)))
    assert found.imbalance == found.peak_imbalance == 2.0
    assert _held(np.zeros(2), np.zeros(2)).imbalance == 1.0


ONE = PlannedStep(1.4, 1.1, 1.0, tokens_unbalanced=1.5, tokens_balanced=1.2, tokens_fullest=0.7)
OTHER = PlannedStep(1.8, 1.5, 1.2, tokens_unbalanced=1.1, tokens_balanced=1.0, tokens_fullest=0.6, fitted=True)


def test_plans_are_weighted_by_their_compute_as_the_measured_imbalance_is() -> None:
    compute = np.array([[1.0, 1.0], [4.0, 2.0]])
    found = planned_balance([ONE, OTHER], compute)
    assert found is not None
    planned = {"as_drawn": 1.7, "balanced": 1.4, "lower_bound": 1.15, "gap": 1.4 / 1.15 - 1}
    assert found["compute"] == pytest.approx(planned) and found["fitted_steps"] == 1
    assert found["tokens"] == pytest.approx({"as_drawn": 1.2, "balanced": 1.05, "fullest": 0.7})
    alike = planned_balance([ONE, OTHER], np.zeros((2, 2)))
    assert alike is not None and alike["compute"]["as_drawn"] == pytest.approx(1.6), "without compute"
    assert planned_balance([ONE, None], compute) is None and planned_balance([], compute[:0]) is None
    drawn = planned_balance([ONE, PlannedStep(1.8, None, 1.2)], compute)
    assert drawn is not None and drawn["compute"]["balanced"] is drawn["compute"]["gap"] is drawn["tokens"] is None


def test_padding_is_weighted_by_the_compute_of_the_steps_in_which_it_is_known() -> None:
    compute = np.array([[5.0, 5.0], [1.0, 1.0], [4.0, 2.0]])
    padded = [replace(plan, padding=share, padded="batch") for plan, share in ((ONE, 0.2), (OTHER, 0.6))]
    assert planned_padding([ONE, *padded], compute) == {"kind": "batch", "tokens": pytest.approx(0.5)}
    assert planned_padding([ONE, ONE, OTHER], compute) is None
    assert planned_padding(padded, np.zeros((2, 2))) == {"kind": "batch", "tokens": pytest.approx(0.4)}
