"""Plans of ranks that pad: the best runs within the limits, with separately padded micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import BalancedSampler, Budget, MicroBatchSchedule, advise, assign, predict
from lightning_freescale.balance.assign import contiguous_split
from lightning_freescale.balance.micro_batches import MicroBatches, cut

LENGTHS = np.random.RandomState(0).lognormal(4, 1, size=103).astype(int) + 1.0


def _time(cost: np.ndarray, place: np.ndarray, ranks: int) -> float:
    """Return the slowest rank's time, independently of the code."""
    own = [cost[place == rank] for rank in range(ranks)]
    return max(len(each) * each.max() for each in own if len(each))


def _all_plans(samples: int, places: int) -> Iterator[np.ndarray]:
    return map(np.array, itertools.product(range(places), repeat=samples))


@st.composite
def few(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    ranks = draw(st.integers(1, 3))
    return np.array(draw(st.lists(st.integers(0, 10**5), min_size=ranks, max_size=7)), dtype=float), ranks


@given(few(), st.sampled_from(["free", "slack", "fixed"]), st.floats(0, 3))
@settings(max_examples=120)
def test_best_of_all_plans(batch: tuple[np.ndarray, int], mode: str, extra: float) -> None:
    cost, ranks = batch
    tokens = np.ceil(cost / 100)
    limit = float(tokens.max() + extra * tokens.sum()) or 1.0
    equal = -(-len(cost) // ranks)
    most = {"free": len(cost), "slack": max(equal, int(len(cost) / ranks * 1.25))}.get(mode, equal)
    least = len(cost) // ranks if mode == "fixed" else 1

    def allowed(place: np.ndarray) -> bool:
        counts = np.bincount(place, minlength=ranks)
        return counts.min() >= least and counts.max() <= most and _time(tokens, place, ranks) <= limit

    best = min((_time(cost, place, ranks) for place in _all_plans(len(cost), ranks) if allowed(place)), default=None)
    options: dict[str, Any] = {"assignment_mode": mode, "padded": True, "tokens": tokens, "max_tokens_per_rank": limit}
    if best is None:
        with pytest.raises(ValueError, match="found no assignment"):
            assign(cost, ranks, **options)
        return
    plan, ideal = assign(cost, ranks, **options), cost.sum() / ranks
    assert allowed(plan.rank_of_sample)
    assert _time(cost, plan.rank_of_sample, ranks) == pytest.approx(best, rel=1e-3)
    if ideal:
        assert plan.imbalance == pytest.approx(_time(cost, plan.rank_of_sample, ranks) / ideal)
        assert plan.lower_bound <= best / ideal * (1 + 1e-6)


@given(few(), st.integers(2, 3))
@settings(max_examples=60)
def test_parts_of_one_rank_cost_least(batch: tuple[np.ndarray, int], parts: int) -> None:
    cost = batch[0][: 2 * parts]
    parts = min(parts, len(cost))
    places = [place for place in _all_plans(len(cost), parts) if len(np.unique(place)) == parts]
    best = min(sum((place == part).sum() * cost[place == part].max() for part in range(parts)) for place in places)
    micro = cut(np.arange(len(cost)), parts, cost, np.ones(len(cost)), padded=True)
    costs = [len(each) * cost[each].max() for each in micro.batches]
    assert sum(costs) == pytest.approx(best, rel=1e-6) and costs == sorted(costs, reverse=True)
    assert sorted(np.concatenate(micro.batches).tolist()) == list(range(len(cost))) and sum(micro.shares) == pytest.approx(1)


def test_samples_without_weight_join_another_part() -> None:
    weights = np.array([1.0, 0, 1, 0, 0, 0])
    micro = cut(np.arange(6), 2, np.array([50.0, 49, 3, 2, 1, 1]), weights, padded=True)
    assert all(weights[list(each)].any() for each in micro.batches) and micro.shares == (0.5, 0.5)


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (8, 1), (2, 2), (4, 4)])
def test_never_worse_than_as_drawn_and_above_the_bound(ranks: int, parts: int) -> None:
    draw = np.random.RandomState(ranks * parts)
    for _ in range(15):
        cost = draw.lognormal(3, 1, ranks * draw.randint(parts, 9))
        plan = assign(cost, ranks, assignment_mode="free", padded=True, parts=parts)
        drawn, ideal = _time(cost, contiguous_split(len(cost), ranks), ranks), cost.sum() / ranks
        assert 1 <= plan.lower_bound <= plan.imbalance * (1 + 1e-9) <= drawn / ideal * (1 + 1e-6)
        held = [len(np.unique(plan.part_of_sample[plan.rank_of_sample == rank])) for rank in range(ranks)]
        assert min(held) >= 1 and max(held) <= parts


def test_what_has_no_meaning_with_padding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padded=True, assignment_mode='zigzag'"):
        assign([1, 2, 3], 1, assignment_mode="zigzag", padded=True)
    budgeted = BalancedSampler(LENGTHS, Budget(4000, LENGTHS), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="does not support a Budget"):
        budgeted.pad_from(1, 0)


# -- an epoch


def _ranks(world: int, parts: int = 1, **options: Any) -> list[BalancedSampler]:
    given = {"tokens": LENGTHS, "padded": True, "assignment_mode": "free", **options}
    schedule = [MicroBatchSchedule(parts, 8) for _ in range(world)]
    return [
        BalancedSampler(LENGTHS**2, 8, num_replicas=world, rank=rank, micro_batches=schedule[rank], **given)
        for rank in range(world)
    ]


def _parts(batch: Any) -> list[list[int]]:
    return [list(part) for part in batch.batches] if isinstance(batch, MicroBatches) else [batch]


@pytest.mark.parametrize(("world", "parts"), [(1, 4), (2, 1), (3, 2)])
def test_an_epoch_has_every_sample_once_and_holds_no_more_tokens(world: int, parts: int) -> None:
    ranks, drawn = _ranks(world, parts), _ranks(world, padded=False, assignment_mode="fixed", balance=False)
    seen = []
    for step, batches in enumerate(zip(*ranks)):
        seen += [sample for batch in batches for part in _parts(batch) for sample in part]
        held = [max(len(part) * LENGTHS[part].max() for part in _parts(batch)) for batch in batches]
        as_drawn = [len(mine) * LENGTHS[mine].max() for mine in drawn[0].plan(0, step)]
        assert max(held) <= max(as_drawn)
        mean = sum(rank.loss_weight(step) for rank in ranks) / world
        assert mean == pytest.approx(1), "the mean loss over the global batch"
        load = [rank.load(0, step, lambda samples: LENGTHS[samples, None]) for rank in ranks]
        expected = [sum(len(part) * LENGTHS[part].max() for part in _parts(batch)) for batch in batches]
        assert np.concatenate(load).tolist() == expected
        for batch in batches:
            ordered = sorted(_parts(batch), key=lambda part: -LENGTHS[part].max())
            spans = [(LENGTHS[part].max(), LENGTHS[part].min()) for part in ordered]
            assert all(least >= most for (_, least), (most, _) in itertools.pairwise(spans)), "parts are runs"
    assert sorted(seen) == list(range(103))


def test_a_rank_holds_no_more_tokens_than_the_fullest_as_drawn() -> None:
    costs, tokens = np.array([1000.0] + [1.0] * 31), np.array([100.0] + [90.0] * 31)
    given: dict[str, Any] = {"tokens": tokens, "assignment_mode": "free", "padded": True, "shuffle": False}
    plan = BalancedSampler(costs, 16, num_replicas=2, rank=0, **given).plan(0, 0)
    assert max(len(mine) * tokens[mine].max() for mine in plan) <= 16 * 100 < 31 * 90, (
        "by cost alone, one rank would have 31 samples"
    )


def test_padding_that_is_found_out_changes_later_steps_alike_on_all_ranks() -> None:
    ranks = _ranks(2, 2, padded=False, assignment_mode="fixed")
    before = ranks[0].report()
    loaders, taken = [iter(rank) for rank in ranks], [[], []]
    for step in range(7):
        for rank, loader in enumerate(loaders):
            taken[rank].append(next(loader))
        if step == 2:
            ranks[0].report(0)  # makes the plans of all steps on this rank only
            with pytest.raises(RuntimeError, match="already read"):
                ranks[0].pad_from(0, 2)
            for rank in ranks:
                rank.pad_from(0, 4, assignment_mode="free")
    same = _ranks(2, 2)
    for step in range(7):
        assert [set().union(*_parts(taken[rank][step])) for rank in (0, 1)] == [
            set((same if step >= 4 else _ranks(2, padded=False, assignment_mode="fixed"))[0].plan(0, step)[rank].tolist())
            for rank in (0, 1)
        ], step
    assert ranks[0].digest() == ranks[1].digest() != same[0].digest()
    assert before.padding is None and ranks[0].report().padding is None, "the epoch has steps of both kinds"
    whole = same[0].report()
    assert 0 < whole.padding < whole.padding_unbalanced < 1 and "of the computed tokens" in str(whole)
    for rank in ranks:
        rank.pad_from(1, 2, padded=False)
    assert ranks[0].is_padded(1, 1) and not ranks[0].is_padded(1, 2)


def test_a_prediction_and_its_advice_know_of_padding() -> None:
    lengths = np.tile(LENGTHS, 20)
    given: dict[str, Any] = {"padded": True, "tokens": lengths}
    free, fixed = (predict(lengths, 4, 8, assignment_mode=mode, **given) for mode in ("free", "fixed"))
    assert fixed.unbalanced == free.unbalanced and free.balanced < 0.8 * fixed.balanced
    stated = advise(lengths, 4, 8, assignment_mode="free", **given)
    assert stated is not None and "micro_batches=" in stated and "padding" in stated
