"""What has a place is given one; what has none is refused by the limits that were given, as they were given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, Budget, advise, assign, predict


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


def test_a_sample_as_large_as_the_limit_has_a_place() -> None:
    tokens = np.random.RandomState(0).rand(5)
    plan = assign(np.ones(5), 5, tokens=tokens, max_tokens_per_rank=float(tokens.max()))
    assert sorted(plan.rank_of_sample) == [0, 1, 2, 3, 4]


def test_limits_are_told_in_the_units_they_were_given_in() -> None:
    tokens = [0.5, 0.75, 1.0, 0.5]
    with pytest.raises(ValueError, match=re.escape("max_tokens_per_rank=1.0 each")):
        assign(np.ones(4), 2, tokens=tokens, max_tokens_per_rank=1.0)
    with pytest.raises(ValueError, match=re.escape("max_tokens_per_rank=1.25): it gives a rank more")):
        assign([1, 2, 3, 4], 2, tokens=tokens, max_tokens_per_rank=1.25, assignment_mode="zigzag")
    with pytest.raises(ValueError, match=re.escape("3 samples for 4 ranks, with Budget(per_rank=0.5), do not")):
        BalancedSampler(np.ones(3), Budget(0.5, [0.3, 0.3, 0.45]), num_replicas=4, rank=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count_slack": 0.5}, "count_slack=0.5) has no meaning for assignment_mode='fixed': leave it out, or use"),
        ({"count_slack": 0.25, "assignment_mode": "free"}, "has no meaning for assignment_mode='free'"),
        (
            {"rank_speeds": [1, 2], "assignment_mode": "zigzag"},
            "rank_speeds=[1, 2]) has no meaning for assignment_mode='zigzag'",
        ),
    ],
)
def test_what_has_no_effect_is_refused(options: dict[str, Any], message: str) -> None:
    costs = np.arange(1.0, 9)
    for call in (
        lambda: assign(costs, 2, **options),
        lambda: predict(costs, 2, 4, **options),
        lambda: BalancedSampler(costs, 4, num_replicas=2, rank=0, **options),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


COSTS = np.arange(1.0, 9)


def _sampler(batch_size: Any = 2, num_replicas: Any = 2, rank: Any = 0, **options: Any) -> BalancedSampler:
    return BalancedSampler(COSTS, batch_size, num_replicas=num_replicas, rank=rank, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assign(COSTS, 2.0), "assign(ranks=2.0): pass a whole number, 1 or more"),
        (lambda: assign(["a", "b"], 1), "assign(costs=...) has values of type <U1"),
        (lambda: assign(np.array([1 + 1j, 2]), 1), "assign(costs=...) has values of type complex128"),
        (lambda: assign(COSTS, 2, tokens=COSTS, max_tokens_per_rank="8"), "max_tokens_per_rank='8'): pass a finite number"),
        (lambda: assign(COSTS, 2, assignment_mode="slack", count_slack="1"), "count_slack='1'): pass a share"),
        (lambda: assign(COSTS, 2, fallback=np.full(8, 0.5)), "assign(fallback=...) has shape (8,) and type float64"),
        (lambda: _sampler(2.5), "BalancedSampler(batch_size=2.5): pass a whole number"),
        (lambda: _sampler(window=1.5), "BalancedSampler(window=1.5): pass a whole number"),
        (lambda: _sampler(outlier_window=1.5), "BalancedSampler(outlier_window=1.5): pass a whole number"),
        (lambda: _sampler(num_replicas="2"), "BalancedSampler(num_replicas='2'): pass a whole number"),
        (lambda: _sampler(rank=0.5), "BalancedSampler(rank=0.5): pass a whole number, 0 or more"),
        (lambda: _sampler(limit=7.5), "BalancedSampler(limit=7.5): pass a number of steps"),
        (lambda: _sampler(limit=-1), "BalancedSampler(limit=-1): pass a number of steps"),
        (lambda: predict(COSTS, 2.5, 2), "predict(ranks=2.5): pass a whole number"),
        (lambda: Budget("8", COSTS), "Budget(per_rank='8'): pass a finite number"),
        (lambda: _sampler(Budget(1e17, COSTS * 1e16)), "Budget(sizes=...): 3.6e+17 tokens in all"),
        (lambda: BalancedSampler([], Budget(3, []), num_replicas=2, rank=0), "0 samples for 2 ranks"),
    ],
)
def test_odd_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_numbers_of_any_kind_are_taken() -> None:
    plan = assign(COSTS, 2).rank_of_sample
    for ranks in (np.int8(2), np.int32(2), np.uint16(2)):
        np.testing.assert_array_equal(assign(COSTS, ranks).rank_of_sample, plan)
    free = assign(COSTS, 2, assignment_mode="slack", count_slack=10.0)
    for huge in (1e30, 1e300):
        assert assign(COSTS, 2, assignment_mode="slack", count_slack=huge).imbalance == free.imbalance
    assert advise([9.0, 1, 1, 1], 2, 2) == advise(np.array([9.0, 1, 1, 1]), 2, 2) is not None
    empty = BalancedSampler(np.ones(8), Budget(3, np.zeros(8)), num_replicas=2, rank=0)
    assert [len(samples) for samples in empty.plan(0, 0)] == [4, 4]
