"""Plans are made once, in a thread, are equal to those without a thread, and report their effect."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, BalanceReport, StepBalance
from lightning_freescale.balance.plan import StepPlan

COSTS = np.random.RandomState(0).lognormal(5, 1.5, size=400)


class _Recording(BalancedSampler):
    def __init__(self) -> None:
        self.planned: list[tuple[int, str]] = []
        super().__init__(COSTS, 4, num_replicas=2, rank=0)

    def global_batch(self, epoch: int, step: int) -> np.ndarray:
        self.planned.append((step, threading.current_thread().name))
        return super().global_batch(epoch, step)


def test_iteration_leaves_no_thread_and_plans_each_step_once() -> None:
    sampler, before = _Recording(), threading.active_count()
    whole = list(sampler)
    assert list(pickle.loads(pickle.dumps(BalancedSampler(COSTS, 4, num_replicas=2, rank=0)))) == whole
    assert sorted(step for step, _ in sampler.planned) == list(range(len(sampler)))
    assert sampler.planned[0][0] == 0, "step 0 was planned by the constructor"
    batches = iter(sampler)
    next(batches)
    batches.close()
    assert threading.active_count() == before
    assert whole == [sampler.plan(0, step)[0].tolist() for step in range(len(sampler))]


def test_more_steps_than_plans_are_kept() -> None:
    for steps in range(60, 67):
        sampler = BalancedSampler(np.ones(4 * steps), 2, num_replicas=2, rank=0)
        sampler.report(1)
        assert len(list(sampler)) == steps


def test_a_second_iterator_plans_ahead_too() -> None:
    sampler = _Recording()
    first = iter(sampler)
    next(first)
    second = iter(sampler)
    next(second)
    first.close()
    next(second)
    second.close()
    planned = dict(sampler.planned)
    assert planned[4].startswith("freescale-plan"), "the end of the first iteration does not stop the thread of the second"
    sampler.plan(0, 20)
    assert dict(sampler.planned)[20] == threading.current_thread().name


def test_an_error_in_the_thread_reaches_the_loop() -> None:
    tokens = np.ones(400)
    tokens[-1] = 1000
    sampler = BalancedSampler(COSTS, 4, num_replicas=2, rank=0, shuffle=False, tokens=tokens, max_tokens_per_rank=6)
    steps = iter(sampler)
    assert len([next(steps) for _ in range(49)]) == 49
    with pytest.raises(ValueError, match="max_tokens_per_rank=6"):
        next(steps)


# -- reports

TOKENS = np.array([900.0, 100.0, 800.0, 200.0])
STEP = StepBalance(1.5, 1.25, 1.25, dominated=False, tokens_imbalance=None, cost=4.0)


def test_tokens_are_told_as_drawn_and_as_assigned() -> None:
    costs = np.array([90.0, 80.0, 1.0, 2.0])
    plan = StepPlan(np.arange(4), costs, 2, True, {"tokens": TOKENS, "max_tokens_per_rank": 1250.0})
    drawn = StepPlan(np.arange(4), costs, 2, False, {"tokens": TOKENS}).balance
    held = np.bincount(plan.rank_of_sample, TOKENS)
    assert plan.balance.tokens_unbalanced == drawn.tokens_unbalanced == drawn.tokens_imbalance == 1.0
    assert plan.balance.tokens_imbalance == held.max() / held.mean() == 1.1
    assert plan.balance.tokens_fullest == 1100 / 1250
    assert drawn.tokens_fullest is None, "there is no limit"
    assert StepPlan(np.arange(4), costs, 2).balance.tokens_unbalanced is None


def test_steps_count_by_their_cost_and_the_fullest_rank_is_that_of_any_step() -> None:
    one = replace(STEP, tokens_unbalanced=1.4, tokens_imbalance=1.1, tokens_fullest=0.5, cost=1.0)
    other = replace(STEP, tokens_unbalanced=1.8, tokens_imbalance=1.3, tokens_fullest=0.9, cost=3.0)
    report = BalanceReport.from_steps([other, one])
    assert (report.tokens_unbalanced, report.tokens_imbalance) == (pytest.approx(1.7), pytest.approx(1.25))
    assert report.tokens_fullest == 0.9
    assert report.scalars("step")["freescale/imbalance/step/tokens_unbalanced"] == pytest.approx(1.7)
    assert report.scalars("step")["freescale/imbalance/step/tokens_fullest"] == 0.9
    assert not any("tokens" in name for name in BalanceReport.from_steps([STEP]).scalars("step"))
    assert BalanceReport.from_steps([one, STEP]).tokens_unbalanced is None, "unknown for one step"
    assert BalanceReport.from_steps([]) == BalanceReport(0, 1.0, 1.0, 1.0, 0.0, None, None, None)


def test_a_base_takes_part_in_compute_alone() -> None:
    step = replace(STEP, tokens_unbalanced=1.4, tokens_imbalance=1.1, tokens_fullest=0.5)
    based = step.with_base(2.0, ranks=2)
    assert (based.unbalanced, based.balanced) == (1.25, 1.125)
    assert (based.tokens_unbalanced, based.tokens_imbalance, based.tokens_fullest) == (1.4, 1.1, 0.5)


def test_a_report_prints_what_is_known() -> None:
    step = replace(STEP, balanced=1.3)
    (compute,) = (line.split() for line in str(BalanceReport.from_steps([step])).splitlines()[2:])
    assert compute == ["compute", "1.500", "(33.3%", "idle)", "1.300", "(23.1%", "idle)", "1.250", "4.00%"]
    limited = replace(STEP, tokens_unbalanced=1.4, tokens_imbalance=1.1, tokens_fullest=0.973, dominated=True)
    *_, tokens, dominated = str(
        BalanceReport.from_steps([limited, replace(STEP, tokens_unbalanced=1, tokens_imbalance=1)])
    ).splitlines()
    assert tokens.split()[:3] == ["tokens", "1.200", "1.050"] and "97.3%" in tokens and "50%" in dominated
