"""The pool: every sample leaves once and in time, and batches meet their target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import CostModel
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
@settings(max_examples=300, deadline=None)
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


@pytest.mark.slow
@given(streams(), st.lists(st.integers(1, 5), min_size=40, max_size=40))
@settings(max_examples=200, deadline=None)
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


LENGTHS = np.random.RandomState(0).lognormal(4.5, 1.0, size=20_000).clip(5, 1500)


def _loads(max_age: int | None, pool_batches: int) -> tuple[np.ndarray, int]:
    """Cost of 100 batches of each of 8 ranks, in units of the mean; the greatest age."""
    costs = CostModel()(LENGTHS)
    mean, ages, loads = costs.mean() * 32, [], []
    for rank in range(8):
        own = np.random.RandomState(rank).choice(costs, 32 * (100 + pool_batches))
        pool, row = LocalPool(32, pool_batches, max_age), []
        pool.add_samples(own[: pool.room])
        for step in range(100):
            row.append(own[pool.next_batch(mean)].sum() / mean)
            ages.append(pool.oldest)
            pool.add_samples(own[32 * (pool_batches + step) :][:32])
        loads.append(row)
    return np.array(loads).T, max(ages)


@pytest.mark.parametrize(("max_age", "pool_batches", "limit"), [(32, 8, 1.03), (None, 32, 1.005)])
def test_batches_meet_the_target(max_age: int | None, pool_batches: int, limit: float) -> None:
    loads, age = _loads(max_age, pool_batches)
    assert loads.max(axis=1).sum() / loads.mean(axis=1).sum() < limit
    assert (age > 32) == (max_age is None), "without a bound costly samples wait longer, so the bound is what was tested"


def test_outliers_leave_in_the_same_steps_of_all_ranks() -> None:
    """One step pays for all of them."""
    costs = np.random.RandomState(0).lognormal(0, 0.3, size=(8, 16 * 108))
    costs[costs > np.quantile(costs, 0.998)] = 40.0
    left = np.zeros((8, 100))
    for own, row in zip(costs, left):
        pool = LocalPool(16, 8, 31)
        pool.add_samples(own[: pool.room])
        for step in range(100):
            row[step] = (own[pool.next_batch(costs.mean() * 16)] == 40.0).sum()
            pool.add_samples(own[16 * (8 + step) :][:16])
    assert left.sum() > 15
    assert left.max() == 1
    assert set(np.flatnonzero(left.sum(axis=0)) % 8) == {7}


def test_content_is_brought_back() -> None:
    """A stream of costlier samples than the target's does not pile up."""
    pool, costs = LocalPool(8, 4, None), np.random.RandomState(0).lognormal(0, 0.5, size=8 * 304)
    target = costs.mean() * 8 * 0.9
    loads = []
    for step in range(300):
        pool.add_samples(costs[8 * step :][: pool.room])
        held = dict(zip(pool.numbers.tolist(), pool.costs))
        loads.append(sum(held[number] for number in pool.next_batch(target).tolist()))
    assert np.mean(loads[150:]) == pytest.approx(target / 0.9, rel=0.05)


def test_goes_on_from_its_state() -> None:
    costs = np.random.RandomState(0).lognormal(5, 1.5, size=400)
    whole = LocalPool(4, 5, 9)
    whole.add_samples(costs[:20])
    for step in range(30):
        whole.next_batch(costs.mean() * 4)
        whole.add_samples(costs[20 + 4 * step :][:4])
    state = whole.state_dict()
    other = LocalPool(4, 5, 9)
    other.load_state_dict(state, costs[state["numbers"]])
    rest = [_drain(pool, costs[140:], costs.mean() * 4) for pool in (whole, other)]
    assert rest[0] == rest[1]
    assert sum(map(len, rest[0])) == 280, "the 20 held and the 260 that came"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LocalPool(0), "batch_size=0"),
        (
            lambda: LocalPool(4, pool_batches=8, max_pool_age=6),
            r"max_pool_age=6 .* Use max_pool_age=7 or more, or pool_batches=7",
        ),
        (lambda: LocalPool(2, 1).add_samples([1.0, 2.0, 3.0]), "room for 2 samples"),
        (lambda: LocalPool(2, 1).add_samples([1.0, float("inf")]), r"costs=\.\.\.\)\[1\] is inf"),
    ],
)
def test_bad_input(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("max_age", [32, None])
def test_a_more_expensive_stream_leaves_evenly(max_age: int | None) -> None:
    """Its own mean is 1.3 targets; the surplus must leave with every batch, not pile up until the age bound forces it."""
    lengths = np.random.RandomState(0).lognormal(4.3, 1, 20_000).clip(1, 2000)
    costs = lengths**2 + 1280 * lengths
    target, pool, taken = 32 * costs.mean() / 1.3, LocalPool(32, 8, max_age), []
    known: dict[int, float] = {}
    for _ in range(300):
        first = len(known)
        known |= dict(enumerate(costs[first : first + pool.room], start=first))
        pool.add_samples(costs[first : len(known)])
        taken.append(sum(known[number] for number in pool.next_batch(target).tolist()) / target)
    assert np.mean(taken[100:]) == pytest.approx(1.3, abs=0.1)
    assert max(taken) < 2.5
