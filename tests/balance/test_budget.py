"""Steps cut by a budget of tokens: as many on every rank and in every epoch, and no rank above it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, BlockShuffle, Budget, advise, predict

LENGTHS = np.minimum(np.random.RandomState(0).lognormal(3.5, 1.2, 600).astype(int) + 1, 400)
DRAWS: dict[str, np.ndarray] = {
    "long tail": LENGTHS,
    "alike": np.full(101, 7),
    "two clusters": np.where(np.random.RandomState(1).rand(300) < 0.2, 200, 10),
    "costs": np.random.RandomState(2).lognormal(-8, 2, 400),
    "some empty": np.random.RandomState(3).randint(0, 5, 200),
}


def _sampler(sizes: np.ndarray, per_rank: float, world: int, rank: int = 0, **options: Any) -> BalancedSampler:
    return BalancedSampler(sizes.astype(float) ** 2, Budget(per_rank, sizes), num_replicas=world, rank=rank, **options)


def _steps(sampler: BalancedSampler, epoch: int) -> list[list[np.ndarray]]:
    return [sampler.plan(epoch, step) for step in range(sampler.first_step, len(sampler))]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("world", [1, 2, 7, 16])
@pytest.mark.parametrize("times", [1.0, 1.3, 8.0])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}], ids=["shuffled", "in order"])
def test_no_rank_is_above_the_budget_in_any_epoch(name: str, world: int, times: float, options: dict[str, Any]) -> None:
    sizes = DRAWS[name]
    per_rank = float(sizes.max()) * times
    if name == "alike" and times < 2 and world > 1:  # one sample each, and 101 are to be shared out
        with pytest.raises(ValueError, match=f"101 samples for {world} ranks.*use fewer ranks or a larger budget"):
            _sampler(sizes, per_rank, world)
        return
    sampler = _sampler(sizes, per_rank, world, **options)
    steps = len(sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        assert len(sampler) == steps
        plans = _steps(sampler, epoch)
        assert sorted(np.concatenate([np.concatenate(plan) for plan in plans])) == list(range(len(sizes)))
        assert all(len(samples) and sizes[samples].sum() <= per_rank for plan in plans for samples in plan)
        counts = [sum(map(len, plan)) for plan in plans]
        assert max(counts) - min(counts) <= 1


def test_no_rank_is_above_the_budget_with_ranks_of_other_speeds() -> None:
    sampler = _sampler(LENGTHS, 500, 4, rank_speeds=[1.0, 0.3, 0.5, 1.0])
    assert max(LENGTHS[samples].sum() for plan in _steps(sampler, 0) for samples in plan) <= 500


def test_a_plan_is_found_where_the_search_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the largest step there can be fits every other."""
    sampler = _sampler(LENGTHS, 500, 4)
    monkeypatch.setattr(sys.modules["lightning_freescale.balance.solver.search"], "_planned", lambda *args: None)
    for epoch in range(3):
        for step in range(len(sampler)):
            samples = sampler.global_batch(epoch, step)
            known = sampler._batches.ranks_within_budget(epoch, step)
            assert known is not None
            for plan in (known, sampler.step_plan(epoch, step).rank_of_sample):
                assert np.bincount(plan, LENGTHS[samples]).max() <= 500 and np.bincount(plan, minlength=4).min() >= 1


def test_all_ranks_have_as_many_steps_and_share_each_out() -> None:
    ranks = [_sampler(LENGTHS, 1000, 3, rank) for rank in range(3)]
    lists: list[list[Any]] = [list(each) for each in ranks]
    assert len({len(each) for each in lists}) == len({each.digest() for each in ranks}) == 1
    assert sorted(sample for each in lists for batch in each for sample in batch) == list(range(len(LENGTHS)))


def test_a_budget_is_used_up_but_for_a_little() -> None:
    """As few steps as there are tokens for, but for a few."""
    sizes = np.tile(LENGTHS, 40)
    for world in (2, 8, 32):
        sampler = _sampler(sizes, 1600, world)
        assert sampler.fill == pytest.approx(sizes.sum() / (len(sampler) * world * 1600))
        assert sampler.fill > 0.93


def test_orders_differ_between_epochs_and_steps_have_nearly_as_many_tokens() -> None:
    sampler = _sampler(LENGTHS, 1000, 4)
    first, second = (sampler.global_batch(epoch, 0) for epoch in range(2))
    assert set(first) != set(second)
    tokens = [LENGTHS[sampler.global_batch(0, step)].sum() for step in range(len(sampler))]
    assert max(tokens) - min(tokens) <= LENGTHS.max()


def test_a_sample_is_as_likely_in_any_step() -> None:
    sizes = LENGTHS[:90]
    sampler = _sampler(sizes, 800, 2)
    steps = np.zeros((len(sizes), len(sampler)))
    for epoch in range(400):
        for step in range(len(sampler)):
            steps[sampler.global_batch(epoch, step), step] += 1
    whole = np.argsort(-sizes, kind="stable")[: len(sizes) // len(sampler) * len(sampler) - len(sampler)]
    expected = 400 / len(sampler)
    assert np.abs(steps[whole] - expected).max() < 6 * np.sqrt(expected)


def test_samples_stay_near_where_they_were_drawn() -> None:
    """So that without a shuffle they come about as they lie in the data set."""
    sizes = np.tile(LENGTHS, 10)
    sampler = _sampler(sizes, 1000, 2, shuffle=False)
    drawn = np.concatenate([sampler.global_batch(0, step) for step in range(len(sampler))])
    moved = np.abs(drawn - np.arange(len(sizes))) / len(sizes)
    assert moved.mean() < 0.04 and moved.max() < 0.25


@pytest.mark.parametrize("batches", [1, 5])
def test_resume_goes_on_with_the_same_steps(batches: int) -> None:
    whole, resumed = (_sampler(LENGTHS, 1000, 2) for _ in range(2))
    resumed.resume(1, batches, cuts=whole.cuts(1))
    for each in (whole, resumed):
        each.set_epoch(1)
    assert len(resumed) == len(whole)
    rest = [resumed.plan(1, step) for step in range(resumed.first_step, len(resumed))]
    for ours, theirs in zip(rest, [whole.plan(1, step) for step in range(batches, len(whole))], strict=True):
        assert [each.tolist() for each in ours] == [each.tolist() for each in theirs]
    resumed.set_epoch(2)
    assert resumed.first_step == 0 and len(resumed) == resumed.steps_per_epoch


def test_resumes_on_other_ranks_and_budgets_keep_every_sample_once() -> None:
    before = _sampler(LENGTHS, 1000, 2)
    before.set_epoch(3)
    seen = [np.concatenate(before.plan(3, step)) for step in range(3)]
    batches, cuts = 3, before.cuts(3)
    for world, per_rank, more in ((3, 1000, 2), (3, 1000, 2), (1, 500, 7), (4, 2000, 1)):
        now = _sampler(LENGTHS, per_rank, world)
        now.resume(3, batches, cuts=cuts)
        now.set_epoch(3)
        assert now.first_step == batches
        plans = [now.plan(3, step) for step in range(batches, batches + more)]
        assert all(LENGTHS[samples].sum() <= per_rank for plan in plans for samples in plan)
        seen += [np.concatenate(plan) for plan in plans]
        batches, cuts = batches + more, now.cuts(3)
        assert now.consumed(3, batches) == sum(map(len, seen))
    assert len(cuts) == 4, "the same ranks and budget go on with the same cut"
    seen += [np.concatenate(now.plan(3, step)) for step in range(batches, len(now))]
    assert sorted(np.concatenate(seen)) == list(range(len(LENGTHS)))


def test_predictions_and_advice_are_of_the_same_steps() -> None:
    sizes = np.append(np.tile(LENGTHS, 4), 4000)
    costs, budget = sizes.astype(float) ** 2, Budget(4000, sizes)
    sampler = BalancedSampler(costs, budget, num_replicas=4, rank=0)
    told = predict(costs, 4, budget, steps=len(sampler))
    assert told == sampler.report()
    assert told.dominated
    advice = advise(costs, 4, budget, told, sizes, assignment_mode="free")
    assert advice is not None and "with twice the budget" in advice and "at any counts" in advice


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 2 alone has 9.*Pass at least as many"):
        Budget(8, [1, 2, 9])
    for per_rank in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="pass a finite number > 0"):
            Budget(per_rank, [1.0])
    with pytest.raises(ValueError, match="3 samples for 4 ranks"):
        _sampler(np.ones(3), 10, 4)
    with pytest.raises(ValueError, match=r"Budget\(sizes=...\) has shape \(1,\).*shape \[2\]"):
        BalancedSampler([1.0, 2.0], Budget(10, [1.0]), num_replicas=1, rank=0)
    given: list[dict[str, Any]] = [
        {"assignment_mode": "fixed"},
        {"max_tokens_per_rank": 5},
        {"tokens": LENGTHS},
        {"keep_together": LENGTHS},
        {"outlier_window": 2},
        {"drop_last": True},
        {"shuffle": BlockShuffle(np.full(6, 100))},
    ]
    for options in given:
        with pytest.raises(ValueError, match=f"{next(iter(options))}=...\\) has no meaning with a Budget"):
            _sampler(LENGTHS, 1000, 2, **options)
    with pytest.raises(ValueError, match="balance=False"):
        _sampler(LENGTHS, 1000, 2, balance=False)
