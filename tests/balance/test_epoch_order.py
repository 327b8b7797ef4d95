"""Pooling: every sample once, none moves far, fewer steps are dominated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import BalancedSampler, BlockShuffle, pool_outliers, predict

LENGTHS = np.random.RandomState(0).lognormal(3.5, 1.3, 3000).clip(1, 800)
COSTS = LENGTHS**2 + 100 * LENGTHS


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.data())
@settings(max_examples=150, deadline=None)
def test_every_sample_once_and_none_moves_far(steps: int, per_rank: int, ranks: int, window: int, data: st.DataObject) -> None:
    samples = steps * per_rank * ranks + data.draw(st.integers(0, per_rank * ranks - 1))
    edges = [*range(0, steps * per_rank * ranks, per_rank * ranks), samples]
    costs = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=samples, max_size=samples)), dtype=float)
    order = np.random.RandomState(1).permutation(samples)
    pooled = pool_outliers(order, edges, costs, ranks, window)
    assert sorted(pooled) == list(range(samples))
    step_of = np.searchsorted(edges, np.arange(samples), side="right") - 1
    before, after = np.empty(samples, dtype=int), np.empty(samples, dtype=int)
    before[order], after[pooled] = step_of, step_of
    assert np.abs(before - after).max() < window
    assert (before // window == after // window).all()


def test_outliers_come_together() -> None:
    plain, pooled = (predict(COSTS, 16, 8, steps=32, outlier_window=window) for window in (1, 16))
    assert pooled.balanced < 0.6 * plain.balanced


def test_pooled_samples_are_split_no_worse_than_drawn_ones() -> None:
    """Outliers that come together must not all fall to the rank whose run comes first."""
    plain, pooled = (BalancedSampler(COSTS, 8, num_replicas=16, rank=0, outlier_window=w, balance=False) for w in (1, 8))
    assert pooled.report().unbalanced < 1.05 * plain.report().unbalanced


def test_sampler_keeps_the_epoch() -> None:
    plain, pooled = (BalancedSampler(COSTS, 8, num_replicas=16, rank=0, outlier_window=window) for window in (1, 8))
    batches = [[sampler.global_batch(1, step) for step in range(len(sampler))] for sampler in (plain, pooled)]
    assert [len(batch) for batch in batches[0]] == [len(batch) for batch in batches[1]]
    windows = [[np.sort(np.concatenate(steps[first : first + 8])) for first in range(0, len(steps), 8)] for steps in batches]
    for a, b in zip(*windows):
        np.testing.assert_array_equal(a, b)
    assert any((np.sort(a) != np.sort(b)).any() for a, b in zip(*batches))
    with pytest.raises(ValueError, match="outlier_window=0"):
        BalancedSampler(COSTS, 8, num_replicas=2, rank=0, outlier_window=0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_a_block_shuffle_uses_a_window_of_blocks_at_a_time(sizes: list[int], window: int, epoch: int) -> None:
    order = BlockShuffle(sizes, window).draw_order(5, epoch)
    assert sorted(order) == list(range(sum(sizes)))
    block_of = np.repeat(np.arange(len(sizes)), sizes)[order]
    first = {block: int(place) for place, block in reversed(list(enumerate(block_of)))}
    last = {block: place for place, block in enumerate(block_of)}
    for place in range(len(order)):
        assert sum(first[block] <= place <= last[block] for block in first) <= window


def test_a_block_shuffle_mixes_the_blocks_of_a_window() -> None:
    shuffle = BlockShuffle([100] * 6, 2)
    block_of = shuffle.draw_order(0, 0) // 100
    assert (np.bincount(block_of[:100], minlength=6) > 30).sum() == 2
    assert (np.diff(block_of[:200]) != 0).sum() > 60
    assert shuffle.draw_order(0, 0).tolist() != shuffle.draw_order(0, 1).tolist() != shuffle.draw_order(1, 0).tolist()


def test_frozen_block_shuffle() -> None:
    """The draw must not change between versions, or a resumed run would lose and repeat samples."""
    assert BlockShuffle([3, 0, 4, 2], 2).draw_order(1, 2).tolist() == [5, 6, 4, 3, 1, 2, 8, 7, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([-1, 2],), "sizes="), (([0.5],), "sizes="), ((3,), "sizes="), (([1], 0), "window=0")],
)
def test_blocks_that_do_not_fit(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=rf"BlockShuffle\({message}"):
        BlockShuffle(*arguments)
