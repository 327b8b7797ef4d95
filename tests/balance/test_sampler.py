"""The plan of an epoch: every sample once, the same global batches balanced or not, on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler

COSTS = np.random.RandomState(0).lognormal(5, 1.5, size=103)


def _ranks(world: int, costs: np.ndarray = COSTS, **options: object) -> list[BalancedSampler]:
    return [BalancedSampler(costs, 4, num_replicas=world, rank=rank, **options) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", range(7, 40))
def test_every_sample_once_and_no_rank_without(world: int, samples: int) -> None:
    ranks = _ranks(world, COSTS[:samples])
    drawn = [list(rank) for rank in ranks]
    assert {len(batches) for batches in drawn} == {len(ranks[0])}
    assert all(batch for batches in drawn for batch in batches)
    assert sorted(index for batches in drawn for batch in batches for index in batch) == list(range(samples))
    for step in zip(*drawn):
        assert max(map(len, step)) - min(map(len, step)) <= 1
        assert max(map(len, step)) <= 5


def test_same_global_batches_balanced_or_not() -> None:
    on, off = _ranks(3), _ranks(3, balance=False)
    assigned_otherwise = 0
    for step in range(len(on[0])):
        mine = [set(rank.plan(2, step)[rank.rank].tolist()) for rank in on]
        theirs = [set(rank.plan(2, step)[rank.rank].tolist()) for rank in off]
        assert set.union(*mine) == set.union(*theirs) == set(on[0].global_batch(2, step).tolist())
        assigned_otherwise += mine != theirs
    assert assigned_otherwise


def test_epochs_and_seeds_differ_and_repeat() -> None:
    sampler, other = _ranks(2)[0], _ranks(2, seed=1)[0]
    orders = {}
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.setdefault(epoch, []).append(list(sampler))
    assert orders[0][0] == orders[0][1] != orders[1][0]
    assert list(other) != orders[0][0]


def test_frozen_order() -> None:
    """The draw must not change between versions, or a resumed run would lose and repeat samples."""
    assert _ranks(2, balance=False)[0].global_batch(3, 0).tolist() == [16, 43, 90, 37, 48, 53, 22, 101]


def test_drop_last_keeps_whole_steps_only() -> None:
    ranks = _ranks(2, drop_last=True)
    assert len(ranks[0]) == 12
    assert all(len(batch) == 4 for rank in ranks for batch in rank)


def test_resume_in_its_epoch_only() -> None:
    whole, resumed = _ranks(2)[0], _ranks(2)[0]
    resumed.resume(1, 5)
    for epoch, skipped in ((1, 5), (2, 0)):
        whole.set_epoch(epoch)
        resumed.set_epoch(epoch)
        assert list(resumed) == list(whole)[skipped:]
        assert len(resumed) == len(whole)


@pytest.mark.parametrize("loss_weights", [None, np.arange(1.0, 104.0)])
def test_loss_weights_make_the_mean_over_the_global_batch(loss_weights: np.ndarray | None) -> None:
    values, ranks = np.random.RandomState(1).rand(103), _ranks(3, loss_weights=loss_weights)
    weight = np.ones(103) if loss_weights is None else loss_weights
    for step in range(len(ranks[0])):
        everything = ranks[0].global_batch(0, step)
        expected = np.average(values[everything], weights=weight[everything])
        parts = [rank.plan(0, step)[rank.rank] for rank in ranks]
        means = [np.average(values[part], weights=weight[part]) for part in parts]
        assert np.mean([m * rank.loss_weight(step) for m, rank in zip(means, ranks)]) == pytest.approx(expected)
    if loss_weights is None:
        assert ranks[0].loss_weight(0) == 1.0, "equal counts leave the loss alone, to the bit"


def test_summed_loss() -> None:
    assert _ranks(3, loss_is_sum=True)[0].loss_weight(0) == 3.0


def test_report() -> None:
    report = _ranks(3)[0].report()
    assert 1 <= report.lower_bound <= report.balanced < report.unbalanced


def _rest(world: int, epoch: int, batches: int, samples: int, **options: object) -> list[int]:
    """What a resumed epoch goes through, step by step in drawn order."""
    ranks = _ranks(world, **options)
    for rank in ranks:
        rank.resume(epoch, batches, samples)
        rank.set_epoch(epoch)
    drawn = [list(rank) for rank in ranks]
    assert {len(steps) for steps in drawn} == {len(ranks[0]) - batches}
    order: list[int] = []
    for step, parts in enumerate(zip(*drawn), start=batches):
        assert all(parts), "every rank has a sample"
        batch = ranks[0].global_batch(epoch, step).tolist()
        assert sorted(batch) == sorted(index for part in parts for index in part)
        order += batch
    return order


@pytest.mark.parametrize(("then", "now"), [(2, 3), (3, 2), (4, 1), (1, 7), (2, 2)])
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_resume_on_another_number_of_ranks_keeps_order_and_samples(then: int, now: int, batches: int) -> None:
    before = _ranks(then)[0]
    whole = [index for step in range(len(before)) for index in before.global_batch(1, step).tolist()]
    consumed = before.consumed(1, batches)
    assert _rest(now, 1, batches, consumed) == whole[consumed:]
    assert sorted(_rest(now, 2, 0, 0)) == list(range(103)), "the next epoch is whole"


def test_resume_with_fewer_samples_left_than_ranks() -> None:
    sampler = _ranks(7)[0]
    with pytest.raises(ValueError, match=r"3 samples are left of epoch 1, fewer than the 7 ranks: resume on at most 3 ranks"):
        sampler.resume(1, 10, 100)
    sampler = _ranks(7, drop_last=True)[0]
    sampler.resume(1, 10, 100)
    sampler.set_epoch(1)
    assert list(sampler) == []


def test_replan_from_the_next_epoch_on() -> None:
    sampler, flat = _ranks(3)[0], np.ones(103)
    sampler.replan(1, lambda: flat)
    sampler.replan(1, assignment_mode="slack")
    sampler.replan(2, count_slack=0.5)
    assert sampler.report(0) == _ranks(3)[0].report(0)
    sampler.set_epoch(1)
    expected = _ranks(3, flat, assignment_mode="slack")[0]
    for step in range(len(sampler)):
        for mine, theirs in zip(sampler.plan(1, step), expected.plan(1, step)):
            np.testing.assert_array_equal(mine, theirs)
    sampler.set_epoch(2)
    assert (sampler.costs == 1).all() and sampler.options == {"assignment_mode": "slack", "count_slack": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": [float("nan")] * 103}, r"BalancedSampler\(costs=...\)\[0\] is nan"),
        ({"loss_weights": [1.0]}, r"loss_weights=...\) has shape"),
        ({"batch_size": 0}, r"batch_size=0"),
        ({"num_replicas": 0}, r"num_replicas=0"),
        ({"rank": 2}, r"rank=2\).*below num_replicas"),
        ({"exploration_steps": 50, "assignment_mode": "slak"}, r"assignment_mode='slak'"),
        ({"exploration_steps": 50, "rank_speeds": [1.0]}, r"rank_speeds="),
        ({"balance": False, "assignment_mode": "slak"}, r"assignment_mode='slak'"),
        ({"balance": False, "max_tokens_per_rank": 1, "tokens": COSTS}, r"balance=False\).*keeps no limit"),
        ({"tokens": [1.0] * 104}, r"tokens=...\) has shape \(104,\)"),
        ({"keep_together": [1] * 104}, r"keep_together=...\) has shape \(104,\)"),
    ],
)
def test_bad_input(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalancedSampler(**{"costs": COSTS, "batch_size": 4, "num_replicas": 2, "rank": 0, **options})


def test_as_drawn_asks_nothing_of_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    balanced = _ranks(3)[0].report()
    monkeypatch.setattr("lightning_freescale.balance.plan.assign", None)
    drawn = _ranks(3, balance=False)[0]
    assert len(list(drawn)) == len(drawn)
    assert drawn.report().lower_bound == balanced.lower_bound


def test_exploration_steps_stay_as_drawn_in_the_first_epoch_only() -> None:
    explores, balanced, drawn = _ranks(2, exploration_steps=8)[0], _ranks(2)[0], _ranks(2, balance=False)[0]
    for epoch in (0, 1):
        for step in range(len(explores)):
            expected = drawn if epoch == 0 and step in (4,) else balanced
            for mine, theirs in zip(explores.plan(epoch, step), expected.plan(epoch, step)):
                np.testing.assert_array_equal(mine, theirs)


def test_groups_stay_together_where_others_explore() -> None:
    group = np.arange(103) // 2
    sampler = _ranks(2, exploration_steps=50, assignment_mode="free", keep_together=group)[0]
    for step in range(len(sampler)):
        first, second = (set(group[part].tolist()) for part in sampler.plan(0, step))
        assert not first & second


def test_digest_sees_the_plan_also_when_exploring() -> None:
    same, other = _ranks(2, exploration_steps=50)
    assert other.step_plan(0, 0).balanced, "the step that is hashed is one that was solved"
    other.step_plan(0, 0).__dict__["rank_of_sample"] = np.zeros(8, dtype=np.int64)
    assert other.digest() != same.digest()


def test_digest_tells_plans_apart() -> None:
    same = _ranks(3)[1].digest()
    assert _ranks(3)[0].digest() == same
    nearly = COSTS.copy()
    nearly[50] *= 1.001
    others = [
        _ranks(3, nearly)[0],
        _ranks(3, seed=1)[0],
        _ranks(3, assignment_mode="slack")[0],
        _ranks(3, exploration_steps=5)[0],
        _ranks(3, loss_weights=COSTS)[0],
        _ranks(2)[0],
    ]
    later = _ranks(3)[0]
    later.set_epoch(1)
    assert same not in {sampler.digest() for sampler in [*others, later]}
    assert _ranks(3, COSTS * (1 + 1e-15))[0].digest() == same, "the last bits of a cost function do not matter"


@pytest.mark.parametrize("mode", ["slack", "free"])
def test_unequal_counts_weigh_the_loss(mode: str) -> None:
    ranks, values, unequal = _ranks(3, assignment_mode=mode), np.random.RandomState(1).rand(103), 0
    for step in range(len(ranks[0])):
        parts = [rank.plan(0, step)[rank.rank] for rank in ranks]
        means = [values[part].mean() for part in parts]
        expected = values[ranks[0].global_batch(0, step)].mean()
        assert np.mean([m * rank.loss_weight(step) for m, rank in zip(means, ranks)]) == pytest.approx(expected)
        unequal += len({len(part) for part in parts}) > 1
    assert unequal


def test_parts_keep_the_drawn_order() -> None:
    sampler = _ranks(3, assignment_mode="slack")[0]
    for step in range(len(sampler)):
        plan = sampler.step_plan(0, step)
        for rank, part in enumerate(plan.samples_of_ranks):
            np.testing.assert_array_equal(part, plan.samples[plan.rank_of_sample == rank])
        assert sampler.counts(step) == [len(part) for part in plan.samples_of_ranks]


def test_report_of_the_plan_in_use() -> None:
    tokens = np.arange(1.0, 104.0)
    drawn, balanced = (_ranks(3, balance=balance, tokens=tokens)[0].report() for balance in (False, True))
    assert drawn.balanced == drawn.unbalanced == balanced.unbalanced > balanced.balanced
    assert drawn.lower_bound == balanced.lower_bound
    assert balanced.gap == pytest.approx(balanced.balanced / balanced.lower_bound - 1)
    assert 0 < balanced.dominated < 1
    assert balanced.tokens_imbalance > 1
    names = ["unbalanced", "balanced", "lower_bound", "gap", "dominated"]
    names += ["tokens_imbalance", "tokens_unbalanced"]
    assert list(balanced.scalars("epoch")) == [f"freescale/imbalance/epoch/{name}" for name in names]
    assert "tokens_imbalance" not in "".join(_ranks(3)[0].report().scalars("epoch"))
    assert f"compute  {balanced.unbalanced:.3f} (" in str(balanced)
