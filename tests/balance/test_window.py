"""The samples of an optimizer step, shared out among its micro-batches: the same samples, the same gradient, less waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, assign, global_batches, predict
from lightning_freescale.balance.assign import contiguous_split, imbalance
from lightning_freescale.balance.prediction import draw_steps, report_plans
from lightning_freescale.balance.window import share_window, window_bound

COSTS = np.random.RandomState(0).lognormal(5, 1.8, size=200)


def _ranks(world: int, **options: Any) -> list[BalancedSampler]:
    return [BalancedSampler(COSTS, 4, num_replicas=world, rank=rank, **options) for rank in range(world)]


def _time(costs: np.ndarray, batch_of_sample: np.ndarray, ranks: int) -> float:
    """What the slowest ranks of the micro-batches take together, over what all ranks would take on average."""
    batches = [costs[batch_of_sample == batch] for batch in range(batch_of_sample.max() + 1)]
    return sum(assign(each, ranks).imbalance * each.sum() for each in batches) / costs.sum()


@pytest.mark.parametrize("sigma", [0.5, 1.5, 2.5])
@pytest.mark.parametrize(("ranks", "each", "batches"), [(1, 4, 3), (4, 1, 4), (4, 32, 2), (16, 32, 4), (80, 4, 2)])
def test_micro_batches_of_equal_size_take_no_longer(ranks: int, each: int, batches: int, sigma: float) -> None:
    for seed in range(4):
        costs = np.random.RandomState(seed).lognormal(4, sigma, ranks * each * batches)
        shared = share_window(costs, batches, ranks)
        np.testing.assert_array_equal(np.bincount(shared), ranks * each)
        drawn = np.repeat(np.arange(batches), ranks * each)
        assert _time(costs, shared, ranks) <= _time(costs, drawn, ranks) * 1.001
        np.testing.assert_array_equal(shared, share_window(costs, batches, ranks))


def test_giants_are_computed_at_the_same_time() -> None:
    """Four that would each dominate a micro-batch; together, the others have as much to do as the window's share."""
    costs = np.concatenate([[1000.0, 990, 980, 970], np.random.RandomState(0).uniform(5, 15, 4 * 32 * 4 - 4)])
    drawn = np.random.RandomState(1).permutation(len(costs))
    shared = share_window(costs[drawn], 4, 4)
    assert len(set(shared[costs[drawn] > 900])) == 1
    assert _time(costs[drawn], shared, 4) < 1.1
    assert _time(costs[drawn], np.repeat(np.arange(4), 128), 4) > 1.3


@pytest.mark.parametrize("sigma", [1.1, 1.8, 2.4])
def test_a_long_tail_comes_close_to_what_can_be(sigma: float) -> None:
    """No window is quicker than the mean, nor than its dearest sample with the cheapest others, there and in other batches."""
    costs = np.sort(np.random.RandomState(0).lognormal(4, sigma, 64 * 32 * 4))
    least = costs[-1] + costs[:31].sum() + costs[: 3 * 64 * 32].sum() / 64
    shared = _time(costs, share_window(costs, 4, 64), 64)
    assert shared < 1.003 * max(1, least / costs.sum() * 64)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("window", [2, 3])
def test_windows_have_the_samples_they_were_drawn_with(world: int, window: int) -> None:
    shared, drawn = _ranks(world, window=window)[0], _ranks(world)[0]
    assert len(shared) == len(drawn)
    moved = 0
    for first in range(0, len(drawn), window):
        steps = range(first, min(first + window, len(drawn)))
        ours, theirs = ([sampler.global_batch(1, step) for step in steps] for sampler in (shared, drawn))
        assert sorted(np.concatenate(ours)) == sorted(np.concatenate(theirs))
        assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]
        moved += any(set(one) != set(other) for one, other in zip(ours, theirs))
    assert moved


@pytest.mark.parametrize("mode", ["fixed", "slack", "free"])
@pytest.mark.parametrize(
    "weights", [None, np.random.RandomState(3).randint(0, 40, 200).astype(float)], ids=["samples", "targets"]
)
@pytest.mark.parametrize(("world", "window"), [(2, 2), (3, 3)])
def test_loss_weights_make_the_mean_over_the_window(world: int, window: int, weights: Any, mode: str) -> None:
    """Of a loss for each sample, averaged as a training step, DDP and accumulation do."""
    losses = np.random.RandomState(1).rand(200)
    ranks = _ranks(world, window=window, loss_weights=weights, assignment_mode=mode)
    weigh = np.ones(200) if weights is None else weights
    full = len(COSTS) // (4 * world) // window * window  # those of the steps after them are of unequal sizes
    for first in range(0, full, window):
        found, samples = 0.0, []
        for step in range(first, first + window):
            for rank in ranks:
                mine = rank.plan(0, step)[rank.rank]
                samples += mine.tolist()
                if weigh[mine].any():
                    found += rank.loss_weight(step) * np.average(losses[mine], weights=weigh[mine]) / world / window
        assert found == pytest.approx(np.average(losses[samples], weights=weigh[samples]))


def test_a_window_is_shared_out_once_however_far_the_loader_reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(global_batches, "share_window", lambda *given: calls.append(1) or share_window(*given))
    sampler = BalancedSampler(COSTS, 1, num_replicas=2, rank=0, window=2)
    ahead = iter(sampler)
    for _ in range(40):  # such as 8 workers with 5 batches each
        next(ahead)
    for step in range(len(sampler)):
        sampler.loss_weight(step)
        next(ahead, None)
    assert len(calls) == len(sampler) / 2


def test_resume_inside_a_window() -> None:
    whole = [list(rank) for rank in _ranks(2, window=4)]
    resumed = _ranks(2, window=4)
    for rank in resumed:
        rank.resume(0, 6)
    assert [list(rank) for rank in resumed] == [batches[6:] for batches in whole]


@pytest.mark.parametrize(("then", "now", "windows"), [((2, 4), (3, 4), 2), ((3, 2), (1, 2), 3), ((2, 4), (2, 3), 1)])
def test_resume_between_windows_with_others(then: tuple[int, int], now: tuple[int, int], windows: int) -> None:
    """Another number of ranks, or of steps in a window: no sample is lost or repeated."""
    before, after = (_ranks(ranks, window=window) for ranks, window in (then, now))
    done = windows * then[1]
    seen = [sample for rank in before for batch in list(rank)[:done] for sample in batch]
    for rank in after:
        rank.resume(0, done, before[0].consumed(0, done), before[0].begun_window(0, done))
    seen += [sample for rank in after for batch in rank for sample in batch]
    assert sorted(seen) == list(range(200))


def test_resume_inside_a_window_with_others() -> None:
    """What was begun is ended as it was shared out, also by a third run; the windows after it are those of the new run."""
    first = _ranks(2, window=4)
    seen = [sample for rank in first for batch in list(rank)[:5] for sample in batch]
    second = _ranks(2, window=3)
    for rank in second:
        rank.resume(0, 5, None, first[0].begun_window(0, 5))
        assert [rank.begun_window(0, batches) for batches in (6, 8, 10)] == [(4, 4), (8, 0), (9, 3)]
    seen += [sample for rank in second for batch in list(rank)[:1] for sample in batch]
    third = _ranks(2)
    for rank in third:
        rank.resume(0, 6, None, second[0].begun_window(0, 6))
    seen += [sample for rank in third for batch in rank for sample in batch]
    assert sorted(seen) == list(range(200))


@pytest.mark.parametrize("windows", [(4, 3, 3), (4, 3, 4), (3, 4, 2), (5, 2, 3)])
@pytest.mark.parametrize("limit", [1.0, 7])
def test_runs_with_other_windows_and_limits_lose_no_sample(windows: tuple[int, int, int], limit: float) -> None:
    """Wherever the first two stop: what the second has left alone because of the first, the third leaves alone as well."""
    for stops in ((first, second) for first in range(7) for second in range(first, 7)):
        seen, window, done = list[int](), None, 0
        for size, stop, until in zip(windows, (*stops, 25), (limit, limit, 1.0)):
            run = _ranks(2, window=size, limit=until)[0]
            run.resume(0, done, None, window)
            seen += [sample for step in range(done, stop) for sample in run.global_batch(0, step)]
            done, window = stop, run.begun_window(0, stop)
        assert sorted(seen) == list(range(200))


@pytest.mark.parametrize(("limit", "last"), [(5, 5), (0.41, 10), (1.0, 25), (40, 25), (1, 1)])
def test_an_optimizer_step_that_ends_early_has_the_samples_it_was_drawn_with(limit: float, last: int) -> None:
    """Not the dearest of those that would have come: they would be what such a step learns from in every epoch."""
    shared, drawn = _ranks(2, window=4, limit=limit, loss_weights=COSTS.round())[0], _ranks(2)[0]
    for first in range(0, last, 4):
        steps = range(first, min(first + 4, last))
        ours, theirs = (np.concatenate([each.global_batch(0, step) for step in steps]) for each in (shared, drawn))
        assert set(ours) == set(theirs)


def test_a_limit_on_tokens_holds_in_every_batch() -> None:
    """Where sharing out would break it, the batches of an optimizer step stay as they were drawn."""
    tokens = np.maximum(1, np.sqrt(COSTS)).round()
    shared, kept = 0, 0
    for most in (150, 130):
        limited = {"tokens": tokens, "max_tokens_per_rank": most, "assignment_mode": "slack", "count_slack": 1.0}
        ranks = _ranks(2, window=4, **limited)[0]
        drawn = _ranks(2)[0]
        for step in range(len(ranks)):
            plan = ranks.step_plan(0, step)
            assert np.bincount(plan.rank_of_sample, tokens[plan.samples]).max() <= most
            same = set(ranks.global_batch(0, step)) == set(drawn.global_batch(0, step))
            kept, shared = kept + same, shared + (not same)
    assert kept > 4 and shared > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"BalancedSampler\(window=0\)"),
        ({"window": 2, "outlier_window": 4}, "leave keep_together, outlier_window and balance=False out"),
        ({"window": 2, "balance": False}, "or use window=1"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ranks(2, **options)


def _as_drawn(world: int, steps: range, values: np.ndarray) -> float:
    """What the slowest ranks would take in these steps without balancing, over what all take on average."""
    drawn = [values[_ranks(world)[0].global_batch(0, step)] for step in steps]
    slowest = sum(imbalance(each, contiguous_split(len(each), world), world) * each.sum() for each in drawn)
    return slowest / sum(each.sum() for each in drawn)


@pytest.mark.parametrize("exchange", ["window", "outlier_window"])
def test_reports_hold_it_against_the_steps_as_drawn(exchange: str) -> None:
    sampler = _ranks(2, tokens=np.sqrt(COSTS), **{exchange: 4})[0]
    report = sampler.report()
    assert report.unbalanced == pytest.approx(_as_drawn(2, range(len(sampler)), COSTS))
    assert report.tokens_unbalanced == pytest.approx(_as_drawn(2, range(len(sampler)), np.sqrt(COSTS)), rel=0.01)
    assert sampler.balance(1).unbalanced == pytest.approx(_as_drawn(2, range(4), COSTS))
    predicted = predict(COSTS, 2, 4, steps=24, **{exchange: 4})
    assert predicted.unbalanced == pytest.approx(_as_drawn(2, range(24), COSTS))


def test_the_bound_of_a_window_is_that_of_any_way_to_share_it_out() -> None:
    sampler = _ranks(2, window=4)[0]
    assert len(sampler) == 25
    for first in range(0, 24, 4):
        steps = [sampler.balance(step) for step in range(first, first + 4)]
        costs = np.concatenate([COSTS[sampler.global_batch(0, step)] for step in range(first, first + 4)])
        assert {step.lower_bound for step in steps} == {window_bound(costs, 4, 2)}
        reached = sum(step.balanced * step.cost for step in steps) / costs.sum()
        assert steps[0].lower_bound <= reached * (1 + 1e-9)
    assert sampler.report().gap > 0.001  # of each micro-batch alone it would be 0


@pytest.mark.parametrize("options", [{}, {"assignment_mode": "free"}, {"rank_speeds": [1.0, 0.4]}])
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
    kept, alone = (_ranks(2, window=window, **options)[0] for window in (4, 1))
    assert [kept.balance(step) for step in range(8)] == [alone.balance(step) for step in range(8)]


def test_few_planned_steps_stand_for_a_window() -> None:
    costs = np.random.RandomState(0).lognormal(5, 1.8, 4 * 8 * 64)
    plans = list(draw_steps(costs, 4, 8, steps=32, window=4))
    few, all_of_them = report_plans(plans, 5), report_plans(plans)
    assert few.balanced == pytest.approx(all_of_them.balanced, rel=0.01)
    assert (few.unbalanced, few.lower_bound) == (all_of_them.unbalanced, all_of_them.lower_bound)
