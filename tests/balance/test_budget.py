"""Steps with a budget of tokens: the same number on every rank and in every epoch, and no rank above the budget."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, Budget, advise, predict

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
@pytest.mark.parametrize(("world", "times"), [(1, 1.0), (2, 1.3), (7, 8.0), (16, 1.0)])
def test_no_rank_is_above_the_budget_in_any_epoch(name: str, world: int, times: float) -> None:
    sizes = DRAWS[name]
    per_rank = float(sizes.max()) * times
    if name == "alike" and times < 2 and world > 1:  # one sample each, and 101 samples
        with pytest.raises(ValueError, match=f"101 samples for {world} ranks"):
            _sampler(sizes, per_rank, world)
        return
    for epochs, options in ((3, {}), (1, {"shuffle": False})):
        sampler = _sampler(sizes, per_rank, world, **options)
        steps = len(sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            assert len(sampler) == steps
            plans = _steps(sampler, epoch)
            assert sorted(np.concatenate([np.concatenate(plan) for plan in plans])) == list(range(len(sizes)))
            assert all(len(samples) and sizes[samples].sum() <= per_rank for plan in plans for samples in plan)
            counts = [sum(map(len, plan)) for plan in plans]
            assert max(counts) - min(counts) <= 1


def test_a_plan_is_found_where_the_search_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the largest possible step fit every other step."""
    sampler = _sampler(LENGTHS, 500, 4)
    monkeypatch.setattr(sys.modules["lightning_freescale.balance.solver.search"], "_planned", lambda *args: None)
    for epoch in range(3):
        for step in range(len(sampler)):
            samples = sampler.global_batch(epoch, step)
            plan = sampler.step_plan(epoch, step).rank_of_sample
            assert np.bincount(plan, LENGTHS[samples]).max() <= 500 and np.bincount(plan, minlength=4).min() >= 1


def test_a_budget_is_used_up_but_for_a_little() -> None:
    sizes = np.tile(LENGTHS, 40)
    for world in (2, 8, 32):
        sampler = _sampler(sizes, 1600, world)
        assert sampler.batches.fill == pytest.approx(sizes.sum() / (len(sampler) * world * 1600))
        assert sampler.batches.fill > 0.93
    first, second = (sampler.global_batch(epoch, 0) for epoch in range(2))
    assert set(first) != set(second)


def test_resumes_on_other_ranks_and_budgets_keep_every_sample_once() -> None:
    before = _sampler(LENGTHS, 1000, 2)
    before.set_epoch(3)
    seen = [np.concatenate(before.plan(3, step)) for step in range(3)]
    batches, cuts = 3, before.batches.cuts(3)
    for world, per_rank, more in ((3, 1000, 2), (3, 1000, 2), (1, 500, 7), (4, 2000, 1)):
        now = _sampler(LENGTHS, per_rank, world)
        now.resume(3, batches, cuts=cuts)
        now.set_epoch(3)
        assert now.first_step == batches
        plans = [now.plan(3, step) for step in range(batches, batches + more)]
        assert all(LENGTHS[samples].sum() <= per_rank for plan in plans for samples in plan)
        seen += [np.concatenate(plan) for plan in plans]
        batches, cuts = batches + more, now.batches.cuts(3)
        assert now.batches.consumed(3, batches) == sum(map(len, seen))
    assert len(cuts) == 4, "the same ranks and budget keep the same cut"
    seen += [np.concatenate(now.plan(3, step)) for step in range(batches, len(now))]
    assert sorted(np.concatenate(seen)) == list(range(len(LENGTHS)))
    now.set_epoch(4)
    assert now.first_step == 0 and len(now) == now.steps_per_epoch


def test_predictions_and_advice_are_of_the_same_steps() -> None:
    sizes = np.append(np.tile(LENGTHS, 4), 4000)
    costs, budget = sizes.astype(float) ** 2, Budget(4000, sizes)
    sampler = BalancedSampler(costs, budget, num_replicas=4, rank=0)
    stated = predict(costs, 4, budget, steps=len(sampler))
    assert stated == sampler.report()
    assert stated.dominated
    advice = advise(costs, 4, budget, stated, sizes, assignment_mode="free")
    assert advice is not None and "twice the budget" in advice
