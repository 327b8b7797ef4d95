"""Whose memory grows, and who holds more than the others."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.memory_growth import MemoryWindows

MB = 1e6


def _held(*ranks: np.ndarray) -> MemoryWindows:
    current = np.stack(ranks, axis=1)
    return MemoryWindows(range(len(current)), current, np.maximum.accumulate(current))


def _noise(seed: int, windows: int, size: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size * MB, windows)


@pytest.mark.parametrize("windows", [11, 12, 40, 300])
@pytest.mark.parametrize("level", [300, 1000])
def test_a_leak_of_some_megabytes_per_window_is_told_from_a_rank_without(windows: int, level: int) -> None:
    for seed in range(20):
        leak = level * MB + 4 * MB * np.arange(windows) + _noise(seed, windows, 1)
        found = _held(level * MB + _noise(seed + 100, windows, 1), leak)
        assert found.growing == [1]
        assert found.slopes is not None
        assert found.slopes[1] == pytest.approx(4 * MB, rel=0.2)


@pytest.mark.parametrize("windows", [11, 12, 40, 300])
@pytest.mark.parametrize("noise", [0, 1, 30])
def test_flat_memory_with_noise_does_not_grow(windows: int, noise: float) -> None:
    assert _held(*(300 * MB + _noise(seed, windows, noise) for seed in range(500))).growing == []


@pytest.mark.parametrize("windows", [12, 40, 300])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.25])
def test_memory_that_saturates_does_not_grow(windows: int, share: float) -> None:
    """It fills up with a time constant of a share of the run."""
    at = np.arange(windows)
    ranks = (300 * MB + 200 * MB * (1 - np.exp(-at / (share * windows))) + _noise(seed, windows, 0.5) for seed in range(50))
    assert _held(*ranks).growing == []


@pytest.mark.parametrize("when", [1, 5, 10, 20, 30, 38])
def test_one_more_buffer_is_no_growth(when: int) -> None:
    at = np.arange(40)
    assert _held(*(300 * MB + 200 * MB * (at >= when) + _noise(seed, 40, 1) for seed in range(50))).growing == []


def test_buffers_that_come_back_are_no_growth() -> None:
    saw = 300 * MB + 100 * MB * (np.arange(40) % 7) / 7
    assert _held(saw, saw[::-1]).growing == []


def test_the_first_window_says_nothing() -> None:
    held = np.full(12, 300 * MB)
    held[0] = 10 * MB
    found = _held(held)
    assert (found.growing, found.slopes) == ([], [0.0])


def test_a_few_windows_are_not_judged() -> None:
    found = _held(300 * MB + 50 * MB * np.arange(10))
    assert (found.growing, found.slopes) == ([], None)


def test_growth_too_small_for_its_size_is_left_alone() -> None:
    assert _held(300 * MB + 0.3 * MB * np.arange(40)).growing == []


def test_a_rank_with_three_times_the_memory_shows() -> None:
    found = _held(*(np.full(3, size * MB) for size in (100, 100, 100, 300)))
    assert found.imbalance == found.peak_imbalance == 2.0


def test_ranks_that_hold_nothing_are_even() -> None:
    assert _held(np.zeros(2), np.zeros(2)).imbalance == 1.0
