"""Plans are made in a thread, once, and are the same as without."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler
from lightning_freescale.balance.plan import PlanPrefetcher

COSTS = np.random.RandomState(0).lognormal(5, 1.5, size=400)


def test_plans_are_made_ahead_in_another_thread() -> None:
    made: list[tuple[int, str]] = []
    third = threading.Event()

    def make(epoch: int, step: int) -> int:
        made.append((step, threading.current_thread().name))
        if step == 2:
            third.set()
        return 10 * step

    ahead = PlanPrefetcher(make, steps=3)
    with ahead.running():
        ahead.prepare(0, 0, 10)
        assert ahead.get(0, 0) == 0
        assert third.wait(30), "the next steps are planned without being asked for"
        assert ahead.get(0, 2) == 20
    assert [step for step, _ in made] == [0, 1, 2]
    assert all(name.startswith("freescale-plan") for _, name in made)


def test_only_the_thread_completes_plans_beforehand() -> None:
    """Who looks at one plan alone pays for what they ask of it."""
    completed: list[int] = []
    plans = PlanPrefetcher(lambda epoch, step: step, complete=completed.append)
    assert plans.get(0, 0) == 0 and not completed
    with plans.running():
        assert plans.get(0, 1) == 1 and completed == [1]


class _Recording(BalancedSampler):
    """Notes which steps are planned, and in which thread."""

    def __init__(self) -> None:
        self.planned: list[tuple[int, str]] = []
        super().__init__(COSTS, 4, num_replicas=2, rank=0)

    def global_batch(self, epoch: int, step: int) -> np.ndarray:
        self.planned.append((step, threading.current_thread().name))
        return super().global_batch(epoch, step)


def test_iteration_leaves_no_thread_and_plans_each_step_once() -> None:
    sampler, before = _Recording(), threading.active_count()
    whole = list(sampler)
    assert sorted(step for step, _ in sampler.planned) == list(range(len(sampler)))
    assert sampler.planned[0][0] == 0, "step 0 was planned when the sampler was made"
    batches = iter(sampler)
    next(batches)
    batches.close()
    assert threading.active_count() == before
    assert whole == [sampler.plan(0, step)[0].tolist() for step in range(len(sampler))]


@pytest.mark.parametrize("steps", range(60, 67))
def test_more_steps_than_plans_are_kept(steps: int) -> None:
    sampler = BalancedSampler(np.ones(4 * steps), 2, num_replicas=2, rank=0)
    sampler.report(1)
    assert len(list(sampler)) == steps


def test_can_be_copied() -> None:
    sampler = BalancedSampler(COSTS, 4, num_replicas=2, rank=0)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


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
    assert planned[4].startswith("freescale-plan"), "the end of the first does not end what plans for the second"
    sampler.plan(0, 20)
    assert dict(sampler.planned)[20] == threading.current_thread().name


def test_an_error_in_the_thread_reaches_the_loop() -> None:
    tokens = np.ones(400)
    tokens[-1] = 1000
    sampler = BalancedSampler(COSTS, 4, num_replicas=2, rank=0, shuffle=False, tokens=tokens, max_tokens_per_rank=6)
    steps = 0
    try:
        for _ in sampler:
            steps += 1
    except ValueError as error:
        assert "max_tokens_per_rank=6" in str(error)
    assert steps == 49
