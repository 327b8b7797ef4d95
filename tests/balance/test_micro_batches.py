"""How a rank's samples of a step are cut, and how many micro-batches steps have."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, MicroBatches, MicroBatchSchedule
from lightning_freescale.balance.micro_batches import cut, most_parts
from lightning_freescale.balance.turns import TRIAL_BLOCK

COSTS = np.random.default_rng(0).pareto(1.2, 97) + 1


def samplers(ranks: int, count: int, batch_size: int = 8, **options: object) -> list[BalancedSampler]:
    """One for each rank, with their own schedules of as many micro-batches."""
    return [
        BalancedSampler(
            COSTS,
            batch_size,
            num_replicas=ranks,
            rank=rank,
            micro_batches=MicroBatchSchedule(count, batch_size),
            **options,
        )
        for rank in range(ranks)
    ]


def test_every_sample_once_at_about_equal_cost_and_dearest_first() -> None:
    costs = np.array([4.0, 1.0, 2.0, 9.0, 3.0, 5.0, 6.0, 2.0])
    batches, shares, _ = cut(list("abcdefgh"), 4, costs, np.ones(8))
    assert sorted(sample for batch in batches for sample in batch) == list("abcdefgh")
    loads = [sum(costs["abcdefgh".index(sample)] for sample in batch) for batch in batches]
    assert loads == sorted(loads, reverse=True)
    assert max(loads) == 9
    assert shares == tuple(len(batch) / 8 for batch in batches)


def test_shares_are_those_of_the_weights() -> None:
    weights, costs = np.array([1.0, 2.0, 1.0]), np.array([5.0, 2.0, 2.0])
    assert cut([10, 11, 12], 2, costs, weights) == MicroBatches(([10], [11, 12]), (0.25, 0.75))
    assert cut([10, 11, 12], 2, costs, weights, loss_is_sum=True) == MicroBatches(([10], [11, 12]), (0.25, 0.75), True)
    assert cut([10, 11, 12], 2, costs, np.zeros(3)).shares == pytest.approx((1 / 3, 2 / 3))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("grouped", [False, True])
def test_every_micro_batch_weighs_something(seed: int, grouped: bool) -> None:
    """The mean loss over samples without targets is no number, and not even a share of 0 would make it one."""
    draw = np.random.default_rng(seed)
    costs, weights = draw.pareto(1.2, 24) + 1, np.zeros(24)
    weights[draw.choice(24, 6, replace=False)] = draw.integers(1, 9, 6)
    groups = draw.integers(0, 12, 24) if grouped else None
    most = most_parts(weights, groups)
    assert most == (len(set(groups[weights > 0])) if grouped else 6)
    for parts in range(2, most + 1):
        batches, shares, _ = cut(list(range(24)), parts, costs, weights, groups=groups)
        assert len(batches) == parts and min(shares) > 0 and sum(shares) == pytest.approx(1)
        assert shares == pytest.approx([weights[batch].sum() / weights.sum() for batch in batches])
        assert sorted(sample for batch in batches for sample in batch) == list(range(24))
        loads = [costs[batch].sum() for batch in batches]
        assert loads == sorted(loads, reverse=True)
        if grouped:
            assert sum(len(set(groups[batch])) for batch in batches) == len(set(groups))
    with pytest.raises(ValueError, match=rf"{most + 1} ranks"):
        cut(list(range(24)), most + 1, costs, weights, groups=groups)


def test_samples_that_weigh_nothing_are_shared_out_by_cost() -> None:
    costs, weights = np.array([1.0, 1.0, 9.0, 7.0, 3.0, 1.0]), np.array([1.0, 1.0, 0, 0, 0, 0])
    batches = cut(list("abcdef"), 2, costs, weights).batches
    assert {"".join(batch) for batch in batches} == {"acf", "bde"}


def test_a_batch_whose_parts_stay_is_the_same_batch() -> None:
    batch = MicroBatches(([1], [2]), (0.5, 0.5), True)
    assert batch.map(lambda part: part) is batch
    assert batch.map(lambda part: part + part) == MicroBatches(([1, 1], [2, 2]), (0.5, 0.5), True)
    one = batch.batches[1]
    changed = batch.map(lambda part: part if part is one else [3])
    assert changed.batches == ([3], [2]) and changed.batches[1] is one


@pytest.mark.parametrize("options", [{}, {"assignment_mode": "slack"}, {"drop_last": True}, {"loss_weights": COSTS}])
def test_steps_have_the_samples_of_undivided_steps(options: dict[str, object]) -> None:
    for whole, divided in zip(samplers(3, 1, **options), samplers(3, 4, **options)):
        steps = list(zip(whole, divided, strict=True))
        for samples, batch in steps:
            assert isinstance(batch, MicroBatches)
            assert sorted(sample for part in batch.batches for sample in part) == sorted(samples)
            assert sum(batch.shares) == pytest.approx(1)
        assert len(steps) > 3


def test_all_ranks_have_as_many_micro_batches_also_in_a_short_step() -> None:
    steps = zip(*samplers(5, 4))
    counts = [{len(batch.batches) if isinstance(batch, MicroBatches) else 1 for batch in step} for step in steps]
    assert all(len(each) == 1 for each in counts)
    assert counts[0] == {4}
    assert counts[-1] == {3}, "17 samples on 5 ranks: some have 3"


@pytest.mark.parametrize("groups", [None, np.arange(97) // 2])
def test_no_rank_has_more_micro_batches_than_samples_that_weigh(groups: object) -> None:
    weights = np.where(np.arange(97) % 3, 0.0, 1.0)
    mode = "fixed" if groups is None else "free"
    counts = set()
    for step in zip(*samplers(3, 4, loss_weights=weights, keep_together=groups, assignment_mode=mode), strict=True):
        parts = {len(batch.batches) if isinstance(batch, MicroBatches) else 1 for batch in step}
        assert len(parts) == 1, "all ranks have as many"
        samples = [batch.batches if isinstance(batch, MicroBatches) else [batch] for batch in step]
        units = np.arange(97) if groups is None else groups
        fewest = min(len({units[s] for part in rank for s in part if weights[s]}) for rank in samples)
        assert parts == {min(4, fewest)}
        assert all(weights[part].any() for rank in samples for part in rank if fewest > 1)
        counts |= parts
    assert len(counts) > 1 and max(counts) > 1


@pytest.mark.parametrize("weights", [np.zeros(97), np.repeat([0.0, 1.0], [48, 49])])
def test_where_no_sample_of_a_rank_weighs_each_counts(weights: np.ndarray) -> None:
    """Undivided, such a rank's loss is of the same kind."""
    assert most_parts(np.zeros(3)) == 3
    found = 0
    for batch in samplers(1, 4, loss_weights=weights, shuffle=False, drop_last=True)[0]:
        if not weights[[sample for part in batch.batches for sample in part]].any():
            found += 1
            assert len(batch.batches) == 4 and batch.shares == pytest.approx([len(part) / 8 for part in batch.batches])
    assert found >= 6


def test_samples_of_a_group_stay_in_one_micro_batch() -> None:
    groups = np.arange(97) // 2
    (sampler,) = samplers(1, 3, keep_together=groups, assignment_mode="free")
    *whole_steps, short = sampler
    assert short == [short[0]], "one sample is one group"
    for batch in whole_steps:
        assert isinstance(batch, MicroBatches)
        of_parts = [set(groups[part]) for part in batch.batches]
        assert sum(map(len, of_parts)) == len(set().union(*of_parts))


def test_candidates_take_turns_until_one_is_chosen() -> None:
    schedule = MicroBatchSchedule("auto", 12)
    assert schedule.candidates == [1, 2, 3, 4, 6]
    assert [schedule.count(0, step) for step in range(5 * TRIAL_BLOCK)] == [
        n for n in (1, 2, 3, 4, 6) for _ in range(TRIAL_BLOCK)
    ]
    assert schedule.count(1, 0) == 2, "short epochs come to all"
    schedule = MicroBatchSchedule("auto", 12)
    schedule.count(0, 29)
    assert not schedule.decided
    with pytest.raises(RuntimeError, match=r"already read up to step 29 of epoch 0"):
        schedule.decide(4, 0, 29)
    schedule.decide(4, 0, 31)
    assert (schedule.count(0, 30), schedule.count(0, 31), schedule.count(1, 0)) == (1, 4, 4)
    assert schedule.chosen == 4


def test_what_is_settled_holds_from_the_first_step_on() -> None:
    schedule = MicroBatchSchedule("auto", 12)
    schedule.count(0, 29)
    schedule.settle(3)
    assert [schedule.count(epoch, 0) for epoch in range(3)] == [3, 3, 3]
    schedule.settle(1)
    assert (schedule.chosen, schedule.count(0, 0), schedule.measured) == (1, 1, None)


def test_nothing_to_choose_from() -> None:
    assert MicroBatchSchedule("auto", 1).chosen == 1
    assert MicroBatchSchedule(3, 8).chosen == 3
