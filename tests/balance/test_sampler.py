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


@pytest.mark.parametrize("weights", [None, np.arange(1.0, 104.0)])
def test_loss_weights_make_the_mean_over_the_global_batch(weights: np.ndarray | None) -> None:
    values, ranks = np.random.RandomState(1).rand(103), _ranks(3, weights=weights)
    weight = np.ones(103) if weights is None else weights
    for step in range(len(ranks[0])):
        everything = ranks[0].global_batch(0, step)
        expected = np.average(values[everything], weights=weight[everything])
        parts = [rank.plan(0, step)[rank.rank] for rank in ranks]
        means = [np.average(values[part], weights=weight[part]) for part in parts]
        assert np.mean([m * rank.loss_weight(step) for m, rank in zip(means, ranks)]) == pytest.approx(expected)
    if weights is None:
        assert ranks[0].loss_weight(0) == 1.0, "equal counts leave the loss alone, to the bit"


def test_summed_loss() -> None:
    assert _ranks(3, summed=True)[0].loss_weight(0) == 3.0


def test_report() -> None:
    report = _ranks(3)[0].report()
    assert 1 <= report.lower_bound <= report.after < report.before
