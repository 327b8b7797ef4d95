"""The plan of an epoch has every sample once, and global batches that depend neither on balancing nor on the rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import BalancedSampler, BlockShuffle, assign, global_batches, predict
from lightning_freescale.balance.assign import contiguous_split, imbalance
from lightning_freescale.balance.window import window_bound

COSTS = np.random.RandomState(0).lognormal(5, 1.5, size=103)


def _ranks(world: int, costs: np.ndarray = COSTS, **options: object) -> list[BalancedSampler]:
    return [BalancedSampler(costs, 4, num_replicas=world, rank=rank, **options) for rank in range(world)]


def _same(plan: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, plan, other))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_sample_once_and_no_rank_without(world: int) -> None:
    for samples in range(7, 40):
        ranks = _ranks(world, COSTS[:samples])
        drawn = [list(rank) for rank in ranks]
        assert {len(batches) for batches in drawn} == {len(ranks[0])}, samples
        assert sorted(index for batches in drawn for batch in batches for index in batch) == list(range(samples))
        for step in zip(*drawn):
            counts = list(map(len, step))
            assert min(counts) >= 1 and max(counts) - min(counts) <= 1 and max(counts) <= 5, samples


def test_same_global_batches_balanced_or_not() -> None:
    on, off = _ranks(3), _ranks(3, balance=False)
    assigned_otherwise = 0
    for step in range(len(on[0])):
        mine = [set(rank.plan(2, step)[rank.rank].tolist()) for rank in on]
        theirs = [set(rank.plan(2, step)[rank.rank].tolist()) for rank in off]
        assert set.union(*mine) == set.union(*theirs) == set(on[0].global_batch(2, step).tolist())
        assigned_otherwise += mine != theirs
    assert assigned_otherwise
    ranks = _ranks(2, drop_last=True)
    assert len(ranks[0]) == 12
    assert all(len(batch) == 4 for rank in ranks for batch in rank)


@pytest.mark.parametrize(("then", "now", "batches"), [(2, 3, 1), (3, 2, 3), (4, 1, 1), (1, 7, 3), (2, 2, 3), (2, 3, 0)])
def test_resume_on_another_number_of_ranks_keeps_order_and_samples(then: int, now: int, batches: int) -> None:
    before, ranks = _ranks(then)[0], _ranks(now)
    whole = [index for step in range(len(before)) for index in before.global_batch(1, step).tolist()]
    consumed = before.batches.consumed(1, batches)
    for rank in ranks:
        rank.resume(1, batches, consumed)
    for epoch, first, expected in ((1, batches, whole[consumed:]), (2, 0, None)):
        for rank in ranks:
            rank.set_epoch(epoch)
        drawn, order = [list(rank) for rank in ranks], list[int]()
        assert {len(steps) for steps in drawn} == {len(ranks[0]) - first}
        for step, parts in enumerate(zip(*drawn), start=first):
            assert all(parts), "every rank has a sample"
            order += ranks[0].global_batch(epoch, step).tolist()
            assert sorted(order[-sum(map(len, parts)) :]) == sorted(index for part in parts for index in part)
        assert order == expected if expected is not None else sorted(order) == list(range(103)), "the next epoch is complete"


def test_resume_with_fewer_samples_left_than_ranks() -> None:
    sampler = _ranks(7)[0]
    with pytest.raises(ValueError, match=r"3 samples .*epoch 1.* 7 ranks.* 3 ranks"):
        sampler.resume(1, 10, 100)
    sampler = _ranks(7, drop_last=True)[0]
    sampler.resume(1, 10, 100)
    sampler.set_epoch(1)
    assert list(sampler) == []


def test_replan_from_the_next_epoch_on() -> None:
    sampler, flat = _ranks(3)[0], np.ones(103)
    sampler.replan(1, lambda: flat)
    assert sampler.report(0) == _ranks(3)[0].report(0)
    sampler.set_epoch(1)
    expected = _ranks(3, flat)[0]
    assert all(_same(sampler.plan(1, step), expected.plan(1, step)) for step in range(len(sampler)))
    sampler.set_epoch(2)
    assert (sampler.costs == 1).all()


def test_digest_tells_plans_apart() -> None:
    same, other = _ranks(2)
    other.step_plan(0, 0).__dict__["rank_of_sample"] = np.zeros(8, dtype=np.int64)
    assert other.digest() != same.digest()
    same = _ranks(3)[1].digest()
    assert _ranks(3)[0].digest() == same
    nearly = COSTS.copy()
    nearly[50] *= 1.001
    changed = [{"costs": nearly}, {"seed": 1}, {"assignment_mode": "slack"}, {"loss_weights": COSTS}]
    later = _ranks(3)[0]
    later.set_epoch(1)
    assert same not in {sampler.digest() for sampler in [*(_ranks(3, **each)[0] for each in changed), _ranks(2)[0], later]}
    assert _ranks(3, COSTS * (1 + 1e-15))[0].digest() == same, "the last bits of costs do not matter"


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
    assert 1 <= drawn.lower_bound == balanced.lower_bound <= balanced.balanced
    assert balanced.gap == pytest.approx(balanced.balanced / balanced.lower_bound - 1)
    assert 0 < balanced.dominated < 1
    assert balanced.tokens_imbalance > 1
    names = ["unbalanced", "balanced", "lower_bound", "gap", "dominated", "tokens_imbalance", "tokens_unbalanced"]
    assert list(balanced.scalars("epoch")) == [f"freescale/imbalance/epoch/{name}" for name in names]


# -- windows: the division of the samples of an optimizer step among its micro-batches


LONG = np.random.RandomState(0).lognormal(5, 1.8, size=200)


def _long(world: int, **options: Any) -> list[BalancedSampler]:
    return _ranks(world, LONG, **options)


@pytest.mark.parametrize(
    ("world", "window", "limit"), [(1, 2, 1.0), (2, 3, 1.0), (3, 2, 1.0), (2, 4, 5), (2, 4, 0.41), (2, 4, 40), (2, 4, 1)]
)
def test_windows_have_the_samples_they_were_drawn_with(world: int, window: int, limit: float) -> None:
    """Optimizer steps that the limit ends early do not have the most expensive samples of their window."""
    shared, drawn = (_long(world, window=size, limit=limit, loss_weights=LONG.round())[0] for size in (window, 1))
    end = min(len(drawn), limit if isinstance(limit, int) else int(limit * len(drawn)))
    assert len(shared) == len(drawn)
    moved, edges = 0, sorted({*range(0, len(drawn), window), end, len(drawn)})
    for steps in map(range, edges, edges[1:]):
        ours, theirs = ([sampler.global_batch(1, step) for step in steps] for sampler in (shared, drawn))
        assert sorted(np.concatenate(ours)) == sorted(np.concatenate(theirs))
        assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]
        moved += any(set(one) != set(other) for one, other in zip(ours, theirs))
    assert bool(moved) == (end > 1)


@pytest.mark.parametrize(
    ("world", "window", "targets", "mode"),
    [(2, 2, False, "fixed"), (3, 3, True, "fixed"), (2, 2, True, "slack"), (3, 1, True, "fixed"), (3, 1, False, "free")],
)
def test_loss_weights_make_the_mean_over_the_window(world: int, window: int, targets: bool, mode: str) -> None:
    """Return the loss averaged like a training step, DDP and accumulation average it."""
    losses = np.random.RandomState(1).rand(200)
    weigh = np.random.RandomState(3).randint(0, 40, 200).astype(float) if targets else np.ones(200)
    ranks = _long(world, window=window, loss_weights=weigh if targets else None, assignment_mode=mode)
    full = len(LONG) // (4 * world) // window * window  # the steps after them have unequal sizes
    for first in range(0, full, window):
        found, samples = 0.0, []
        for step in range(first, first + window):
            for rank in ranks:
                mine = rank.plan(0, step)[rank.rank]
                samples += mine.tolist()
                if weigh[mine].any():
                    found += rank.loss_weight(step) * np.average(losses[mine], weights=weigh[mine]) / world / window
        assert found == pytest.approx(np.average(losses[samples], weights=weigh[samples]))
    assert _long(3)[0].loss_weight(0) == 1.0, "equal counts do not change the loss"
    assert _long(3, loss_is_sum=True)[0].loss_weight(0) == 3.0


@pytest.mark.parametrize(
    ("then", "now", "done"), [((2, 4), (2, 4), 6), ((2, 4), (3, 4), 8), ((3, 2), (1, 2), 6), ((2, 4), (2, 3), 4)]
)
def test_resume_with_the_same_window_or_between_two(then: tuple[int, int], now: tuple[int, int], done: int) -> None:
    """No sample is lost or repeated with another number of ranks, or of steps in a window."""
    before, after = (_long(ranks, window=window) for ranks, window in (then, now))
    whole = [list(rank) for rank in before]
    stopped = before[0].batches
    for rank in after:
        rank.resume(0, done, *((stopped.consumed(0, done), stopped.begun_window(0, done)) if then != now else ()))
    rest = [list(rank) for rank in after]
    seen = [sample for batches in [*(each[:done] for each in whole), *rest] for batch in batches for sample in batch]
    assert sorted(seen) == list(range(200))
    assert then != now or rest == [batches[done:] for batches in whole]


def test_resume_inside_a_window_with_others() -> None:
    """The unfinished window keeps its division, and later windows are those of the new run."""
    first, second = _long(2, window=4)[0], _long(2, window=3)[0]
    second.resume(0, 5, None, first.batches.begun_window(0, 5))
    assert [second.batches.begun_window(0, batches) for batches in (6, 8, 10)] == [(4, 4), (8, 0), (9, 3)]


@pytest.mark.parametrize(("windows", "limit"), [((4, 3, 3), 1.0), ((4, 3, 4), 7), ((3, 4, 2), 7), ((5, 2, 3), 1.0)])
def test_runs_with_other_windows_and_limits_lose_no_sample(windows: tuple[int, int, int], limit: float) -> None:
    """The third run keeps the windows that the second run kept because of the first one."""
    for stops in ((first, second) for first in range(7) for second in range(first, 7)):
        seen, window, done = list[int](), None, 0
        for size, stop, until in zip(windows, (*stops, 25), (limit, limit, 1.0)):
            run = _long(2, window=size, limit=until)[0]
            run.resume(0, done, None, window)
            seen += [sample for step in range(done, stop) for sample in run.global_batch(0, step)]
            done, window = stop, run.batches.begun_window(0, stop)
        assert sorted(seen) == list(range(200))


def test_a_limit_on_tokens_holds_in_every_batch() -> None:
    """Batches stay as drawn where sharing would exceed the limit."""
    tokens = np.maximum(1, np.sqrt(LONG)).round()
    shared, kept = 0, 0
    for most in (150, 130):
        limited = {"tokens": tokens, "max_tokens_per_rank": most, "assignment_mode": "free"}
        ranks = _long(2, window=4, **limited)[0]
        drawn = _long(2)[0]
        for step in range(len(ranks)):
            plan = ranks.step_plan(0, step)
            assert np.bincount(plan.rank_of_sample, tokens[plan.samples]).max() <= most
            same = set(ranks.global_batch(0, step)) == set(drawn.global_batch(0, step))
            kept, shared = kept + same, shared + (not same)
    assert kept > 4 and shared > 4


def _as_drawn(world: int, steps: range, values: np.ndarray) -> float:
    """Return the ratio of the slowest to the mean time of the ranks without balancing."""
    drawn = [values[_long(world)[0].global_batch(0, step)] for step in steps]
    slowest = sum(imbalance(each, contiguous_split(len(each), world), world) * each.sum() for each in drawn)
    return slowest / sum(each.sum() for each in drawn)


def test_reports_hold_it_against_the_steps_as_drawn() -> None:
    sampler = _long(2, tokens=np.sqrt(LONG), window=4)[0]
    report = sampler.report()
    assert report.unbalanced == pytest.approx(_as_drawn(2, range(len(sampler)), LONG))
    assert report.tokens_unbalanced == pytest.approx(_as_drawn(2, range(len(sampler)), np.sqrt(LONG)), rel=0.01)
    assert sampler.balance(1).unbalanced == pytest.approx(_as_drawn(2, range(4), LONG))
    predicted = predict(LONG, 2, 4, steps=24, window=4)
    assert predicted.unbalanced == pytest.approx(_as_drawn(2, range(24), LONG))


def test_the_bound_of_a_window_is_that_of_any_way_to_share_it_out() -> None:
    sampler = _long(2, window=4)[0]
    assert len(sampler) == 25
    for first in range(0, 24, 4):
        steps = [sampler.balance(step) for step in range(first, first + 4)]
        costs = np.concatenate([LONG[sampler.global_batch(0, step)] for step in range(first, first + 4)])
        assert {step.lower_bound for step in steps} == {window_bound(costs, 4, 2)}
        reached = sum(step.balanced * step.cost for step in steps) / costs.sum()
        assert steps[0].lower_bound <= reached * (1 + 1e-9)
    assert sampler.report().gap > 0.001  # for each micro-batch alone it would be 0


@pytest.mark.parametrize("options", [{}, {"assignment_mode": "free"}])
def test_no_window_is_below_its_bound(options: dict[str, Any]) -> None:
    for seed in range(6):
        costs = np.random.RandomState(seed).pareto(1, 8)
        best = min(
            sum(assign(costs[part], 2, **options).imbalance * costs[part].sum() for part in (chosen, ~chosen))
            for chosen in ((number >> np.arange(8) & 1).astype(bool) for number in range(256))
            if chosen.sum() == 4
        )
        bound = window_bound(costs, 2, 2, **options)
        assert bound <= best / costs.sum() * (1 + 1e-9)


def test_a_window_that_a_limit_keeps_as_drawn_has_the_bounds_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_batches, "_fits", lambda arguments, samples, ranks: False)
    options: dict[str, Any] = {"tokens": np.ones(200), "max_tokens_per_rank": 100}
    kept, alone = (_long(2, window=window, **options)[0] for window in (4, 1))
    assert [kept.balance(step) for step in range(8)] == [alone.balance(step) for step in range(8)]


# -- the order of an epoch


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=100)
def test_a_block_shuffle_uses_a_window_of_blocks_at_a_time(sizes: list[int], window: int, epoch: int) -> None:
    order = BlockShuffle(sizes, window).draw_order(5, epoch)
    assert sorted(order) == list(range(sum(sizes)))
    block_of = np.repeat(np.arange(len(sizes)), sizes)[order]
    first = {block: int(place) for place, block in reversed(list(enumerate(block_of)))}
    last = {block: place for place, block in enumerate(block_of)}
    for place in range(len(order)):
        assert sum(first[block] <= place <= last[block] for block in first) <= window
