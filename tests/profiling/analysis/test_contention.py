"""Contention that was put in comes out, and only that."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.contention import Contention, contention

Floats = np.ndarray


def _run(
    share: float, seed: int = 0, ranks: int = 4, steps: int = 300, noise: float = 0.05, flight: float = 1.0
) -> tuple[Floats, Floats, Floats]:
    """Exchanges of random length, which slow down compute as long as they last."""
    rng = np.random.default_rng(seed)
    expected = rng.lognormal(0, 0.3, (steps, ranks))
    alone = expected * rng.uniform(1, 1.5, ranks) * (1 + noise * rng.standard_normal((steps, ranks)))
    length = flight * rng.uniform(0.1, 1.0, (steps, ranks))
    compute = np.where(alone / (1 - share) <= length, alone / (1 - share), alone + share * length)
    return compute, np.minimum(length, compute), expected


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_found_within_its_error(share: float) -> None:
    found = [contention(*_run(share, seed)) for seed in range(20)]
    assert all(one.reason is None for one in found)
    assert all(abs(one.share - share) < 4 * one.error for one in found)
    assert np.mean([one.share for one in found]) == pytest.approx(share, rel=0.1)
    assert np.std([one.share for one in found]) == pytest.approx(np.mean([one.error for one in found]), rel=0.6)


def test_none_is_seldom_seen_where_there_is_none() -> None:
    seen = [contention(*_run(0.0, seed)).share > 0 for seed in range(100)]
    assert sum(seen) <= 6
    assert "within the noise" in (contention(*_run(0.0, seen.index(False))).reason or "")


def test_outliers_do_not_matter() -> None:
    compute, hidden, expected = _run(0.2)
    rng = np.random.default_rng(1)
    hiccups = rng.random(compute.shape) < 0.03
    found = contention(np.where(hiccups, 20 * compute, compute), hidden, expected)
    assert found.share == pytest.approx(0.2, abs=4 * found.error)
    assert found.error < 0.03


def test_exchange_as_long_as_compute_says_nothing() -> None:
    """Hidden seconds follow compute there, not the other way round."""
    found = contention(*_run(0.0, flight=20.0))
    assert found.share == 0
    for noise in (0.05, 0.3):
        covered = contention(*_run(0.0, flight=1000.0, noise=noise))
        assert (covered.share, covered.error) == (0, math.inf)
        assert "cover" in (covered.reason or "")


def test_steps_in_common_do_not_look_like_more_evidence() -> None:
    """64 ranks that slow down together by chance are one observation a step."""
    seen = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        expected = rng.uniform(1, 2, (40, 64))
        together = 1 + 0.1 * rng.standard_normal((40, 1))
        hidden = np.broadcast_to(rng.uniform(0.1, 0.5, (40, 1)), (40, 64)) * expected
        seen += contention(expected * together, hidden, expected).share > 0
    assert seen <= 8


def test_reasons() -> None:
    compute, hidden, expected = _run(0.2)
    nothing = np.zeros_like(hidden)
    assert contention(compute, nothing, expected) == Contention(
        0.0, math.inf, "hardly any exchange was under way beside compute"
    )
    assert "cost model" in (contention(compute, hidden, None).reason or "")
    assert "alike" in (contention(compute, np.full_like(hidden, 0.1), expected).reason or "")
    assert "more than the exchanges" in (contention(expected + 3 * hidden, hidden, expected).reason or "")
    assert contention(expected - 0.2 * hidden, hidden, expected).share == 0
    idle = compute * [1, 1, 1, 0]
    assert contention(idle, hidden, expected).share == pytest.approx(0.2, abs=0.05)
