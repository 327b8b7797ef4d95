"""Transfers by bytes and bandwidth, on links that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.bandwidth import Bandwidth
from lightning_freescale.profiling.analysis.breakdown import attribute
from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedSpan, ResolvedStep

RATE, LATENCY = 25e6, 3e-4


def _exchanges(
    seed: int, count: int = 300, ranks: int = 4, jitter: float = 0.02, sizes: tuple[float, float] = (1e4, 1e7)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Durations, bytes and straggler waits; the rank comes last once in ``ranks`` exchanges."""
    rng = np.random.default_rng(seed)
    moved = np.exp(rng.uniform(*np.log(sizes), count)).astype(int)
    wait = rng.exponential(0.1, count) * (rng.random(count) > 1 / ranks)
    return (LATENCY + moved / RATE) * (1 + jitter * rng.random(count)) + wait, moved, wait


@given(st.integers(0, 10_000), st.sampled_from([2, 4, 8]))
@settings(deadline=None, max_examples=30)
def test_link_is_found(seed: int, ranks: int) -> None:
    found = Bandwidth.of(*_exchanges(seed, ranks=ranks)[:2])
    assert found.bytes_per_second == pytest.approx(RATE, rel=0.05)
    assert 0 <= found.latency < 5 * LATENCY


def test_latency_is_found_among_small_messages() -> None:
    found = Bandwidth.of(*_exchanges(0, count=2000, jitter=0.0, sizes=(1e2, 1e6))[:2])
    assert found.latency == pytest.approx(LATENCY, rel=0.01)
    assert found.bytes_per_second == pytest.approx(RATE, rel=0.01)


def test_cached_and_wrongly_stamped_exchanges() -> None:
    durations, moved, _ = _exchanges(1)
    durations[[3, 77, 140, 200]] = [1e-6, -0.2, 1e-5, 0.0]
    found = Bandwidth.of(durations, moved)
    assert found.bytes_per_second == pytest.approx(RATE, rel=0.05)
    few = Bandwidth.of(np.r_[durations[4:24], 1e-6], np.r_[moved[4:24], 10**7])
    assert few.bytes_per_second == pytest.approx(RATE, rel=0.3)


def test_equal_sizes_have_no_latency() -> None:
    durations, moved, _ = _exchanges(2, sizes=(1e6, 1.05e6))
    found = Bandwidth.of(durations, moved)
    assert found.latency == 0
    assert 1e6 / found.bytes_per_second == pytest.approx(LATENCY + 1e6 / RATE, rel=0.05)


def test_uncertainty_tells_when_the_rank_never_came_last() -> None:
    durations, moved, _ = _exchanges(3, jitter=0.0)
    sure = Bandwidth.of(durations, moved).uncertainty
    late = Bandwidth.of(durations + np.random.default_rng(0).exponential(0.2, 300), moved).uncertainty
    assert sure < 1e-5
    assert late > 5e-3


def test_given_bandwidth_counts() -> None:
    durations, moved, _ = _exchanges(4)
    assert Bandwidth.of(durations, moved, RATE).latency == pytest.approx(LATENCY, rel=0.5)
    slow = Bandwidth.of([0.04] * 20, [10**6] * 20, RATE / 2)
    assert (slow.bytes_per_second, slow.latency) == (pytest.approx(RATE / 2), 0)
    assert slow.uncertainty == pytest.approx(0.04), "exchanges were that much quicker"
    assert Bandwidth.of([], [], 5.0) == Bandwidth(5.0)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="given"):
            Bandwidth.of(durations, moved, wrong)


def test_too_little_to_go_by() -> None:
    assert Bandwidth.of([1.0] * 7, [10] * 7) == Bandwidth(None)
    assert Bandwidth.of([1.0] * 20, [0] * 20) == Bandwidth(None)


def _step(*collectives: ResolvedCollective, hidden: tuple[ResolvedCollective, ...] = ()) -> ResolvedStep:
    return ResolvedStep(0.0, 10.0, 0, 1, (ResolvedSpan("forward", "forward", 0.0, 10.0),), collectives, hidden)


def _collective(arrive: float, start: float, end: float, moved: int | None, done: float | None = None) -> ResolvedCollective:
    return ResolvedCollective("a", "a", arrive, start, end, end if done is None else done, moved)


def test_wait_is_split() -> None:
    link = Bandwidth(100.0, 0.5)
    step = _step(_collective(1.0, 1.0, 5.0, 150), _collective(6.0, 6.0, 7.0, 1000), _collective(8.0, 8.5, 9.5, 50, 9.25))
    assert link.last_arrivals(step) == [3.0, 6.0, 8.25]
    parts = attribute(step, link.last_arrivals(step))
    assert (parts.straggler_wait, parts.transfer) == (2.0, 4.0)
    assert link.unsplit(step) == 0


def test_unknown_bytes_are_transfer() -> None:
    step = _step(_collective(1.0, 2.0, 5.0, None), _collective(6.0, 6.0, 7.0, 10))
    link = Bandwidth(100.0)
    assert link.last_arrivals(step) == [1.0, 6.9]
    assert link.unsplit(step) == 3.0
    assert Bandwidth(None).last_arrivals(step) == [1.0, 6.0]
    assert Bandwidth(None).unsplit(step) == 4.0
    assert attribute(step, Bandwidth(None).last_arrivals(step)).straggler_wait == 0


def test_of_steps_takes_all_exchanges() -> None:
    durations, moved, wait = _exchanges(5)
    own = [_collective(0.0, 0.0, d, int(m)) for d, m in zip(durations[:200], moved[:200])]
    beside = tuple(_collective(0.0, 0.0, d, int(m)) for d, m in zip(durations[200:], moved[200:]))
    step = _step(*own, _collective(0.0, 0.0, 9.0, None), _collective(0.0, 0.0, 9.0, 0), hidden=beside)
    found = Bandwidth.of_steps([step])
    assert found == Bandwidth.of(durations, moved)
    assert Bandwidth.of_steps([step], 1e9).bytes_per_second == pytest.approx(1e9)
    arrived = np.array(found.last_arrivals(step)[:200])
    assert np.median(np.abs(arrived - wait[:200])) < 0.005
