"""The pool: every sample leaves once and in time, and batches meet their target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance.pool import LocalPool


def _drain(pool: LocalPool, costs: np.ndarray, target: float) -> list[list[int]]:
    """Refill before every batch, until all have left."""
    batches, added = [], 0
    while True:
        arriving = costs[added : added + pool.room]
        pool.add_samples(arriving)
        added += len(arriving)
        if not len(pool):
            return batches
        batches.append(pool.next_batch(target).tolist())


@st.composite
def streams(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int, float]:
    size, batches = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    costs = draw(st.lists(st.one_of(st.integers(0, 10), st.integers(0, 10**6)), max_size=120))
    age = draw(st.integers(batches - 1, 12))
    return np.array(costs, dtype=float), size, batches, age, draw(st.sampled_from([0.0, 1.0, 50.0, 10.0**5, 10.0**7]))


@given(streams())
@settings(max_examples=200)
def test_every_sample_leaves_once_and_in_time(stream: tuple[np.ndarray, int, int, int, float]) -> None:
    costs, size, batches, age, target = stream
    taken = _drain(LocalPool(size, batches, age), costs, target)
    assert sorted(number for batch in taken for number in batch) == list(range(len(costs)))
    assert [len(batch) for batch in taken[:-1]] == [size] * (len(taken) - 1)
    for index, batch in enumerate(taken):
        assert batch == sorted(batch)
        for number in batch:
            arrived = max(0, number // size - batches + 1)  # the batch whose refill brought it
            assert 0 <= index - arrived <= age
    assert taken == _drain(LocalPool(size, batches, age), costs, target)


@given(streams(), st.lists(st.integers(1, 5), min_size=40, max_size=40))
@settings(max_examples=100)
def test_age_bound_with_smaller_batches(stream: tuple[np.ndarray, int, int, int, float], counts: list[int]) -> None:
    """Smaller batches may be asked for; more leave when that is needed to keep the bound."""
    costs, size, batches, age, target = stream
    pool, arrived, added = LocalPool(size, batches, age), {}, 0
    for index, count in enumerate(counts):
        arriving = costs[added : added + pool.room]
        arrived |= dict.fromkeys(range(added, added + len(arriving)), index)
        pool.add_samples(arriving)
        added += len(arriving)
        due, held = pool.due, len(pool)
        assert pool.oldest == max((index - arrived[n] for n in pool.numbers), default=0) <= age
        taken = pool.next_batch(target, min(count, size))
        assert len(taken) == min(held, max(min(count, size), due)) <= size


def test_large_batches_meet_their_target() -> None:
    """There are more swaps than are tried."""
    costs = np.random.RandomState(0).lognormal(4, 1, 80 * 40)
    target = 80 * costs.mean()
    sums = [costs[batch].sum() for batch in _drain(LocalPool(80, 20), costs, target)]
    assert sums[:20] == pytest.approx([target] * 20, rel=1e-3)
