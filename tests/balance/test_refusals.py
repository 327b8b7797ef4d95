"""What has a place is given one; what has none is refused by the limits that were given, as they were given."""

from __future__ import annotations

import re

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, Budget, assign


def _held(sizes: list[int], ranks: int) -> list[int]:
    """Plan groups of these sizes at equal counts, and return how many samples each rank has."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    cost = np.random.RandomState(0).lognormal(4, 1.2, len(group))
    plan = assign(cost, ranks, assignment_mode="slack", count_slack=0.0, keep_together=group)
    assert all(len(set(plan.rank_of_sample[group == each])) == 1 for each in range(len(sizes)))
    return np.bincount(plan.rank_of_sample, minlength=ranks).tolist()


def test_large_groups_of_cheap_samples_find_a_place() -> None:
    group, cost = [6, 3, 7, 2, 5, 3, 1, 6], [0.887, 0.423, 13.84, 5.537, 0.860, 2.4465, 5.956, 0.212]
    plan = assign(cost, 4, assignment_mode="slack", count_slack=0.0, keep_together=group)
    assert np.bincount(plan.rank_of_sample).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(12))
def test_groups_that_first_fit_finds_a_place_for_have_one(seed: int) -> None:
    draw, sizes = np.random.RandomState(seed), list[int]()
    while sum(sizes) < 32:
        sizes.append(min(draw.randint(1, 9), 32 - sum(sizes)))
    room = [8] * 4
    for size in sorted(sizes, reverse=True):
        room[int(np.argmax(room))] -= size
    if min(room) >= 0:
        assert _held(sizes, 4) == [8] * 4


@pytest.mark.parametrize("sizes", [[3, 3, 2, 2, 2], [6, 6, 4, 4, 4], [5, 5, 5, 4, 4, 4, 3, 3, 3]])
def test_groups_that_only_fit_beside_their_like_have_a_place(sizes: list[int]) -> None:
    ranks = 3 if len(sizes) == 9 else 2
    assert _held(sizes, ranks) == [sum(sizes) // ranks] * ranks


def test_only_limits_that_were_given_are_named() -> None:
    with pytest.raises(ValueError, match="on 2 ranks with at most 4 samples") as refused:
        assign(np.ones(8), 2, assignment_mode="slack", count_slack=0.0, keep_together=[0, 0, 0, 1, 1, 1, 2, 2])
    assert "tokens" not in str(refused.value)
    with pytest.raises(ValueError, match="with max_tokens_per_rank=3 each") as refused:
        assign(np.ones(4), 2, assignment_mode="free", tokens=[2, 2, 2, 2], max_tokens_per_rank=3)
    assert "at most" not in str(refused.value)


def test_limits_are_told_in_the_units_they_were_given_in() -> None:
    tokens = [0.5, 0.75, 1.0, 0.5]
    with pytest.raises(ValueError, match=re.escape("max_tokens_per_rank=1.0 each")):
        assign(np.ones(4), 2, tokens=tokens, max_tokens_per_rank=1.0)
    with pytest.raises(ValueError, match=re.escape("max_tokens_per_rank=1.25): it gives a rank more")):
        assign([1, 2, 3, 4], 2, tokens=tokens, max_tokens_per_rank=1.25, assignment_mode="zigzag")
    with pytest.raises(ValueError, match=re.escape("3 samples for 4 ranks, with Budget(per_rank=0.5), do not")):
        BalancedSampler(np.ones(3), Budget(0.5, [0.3, 0.3, 0.45]), num_replicas=4, rank=0)
