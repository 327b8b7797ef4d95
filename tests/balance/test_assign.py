"""The assignment: a partition within its limits, deterministic, never below its lower bound."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import assign
from lightning_freescale.balance.assign import contiguous_split, equal_counts, imbalance
from lightning_freescale.balance.solver import dearest_first, lpt, swaps
from lightning_freescale.balance.validation import problem_from_arguments

MODES = ["fixed", "slack", "free", "zigzag"]


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    ranks = draw(st.integers(1, 9))
    size = draw(st.integers(ranks, ranks * 6))
    return np.array(draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size)), dtype=float), ranks


def limits(samples: int, ranks: int, mode: str, slack: float = 0.25) -> tuple[int, int]:
    """Least and most samples of a rank, written down independently of the code."""
    up, down = -(-samples // ranks), samples // ranks
    return {"fixed": (down, up), "zigzag": (down, up), "slack": (1, max(up, int(samples / ranks * (1 + slack))))}.get(
        mode, (1, samples)
    )


@given(batches(), st.sampled_from(MODES))
@settings(max_examples=300, deadline=None)
def test_properties(batch: tuple[np.ndarray, int], mode: str) -> None:
    cost, ranks = batch
    result = assign(cost, ranks, assignment_mode=mode)
    held = np.bincount(result.rank_of_sample, minlength=ranks)
    least, most = limits(len(cost), ranks, mode)
    assert held.sum() == len(cost) and len(held) == ranks
    assert least <= held.min() and held.max() <= most
    if mode in ("fixed", "zigzag"):
        assert sorted(held, reverse=True) == equal_counts(len(cost), ranks)
    assert result.imbalance == pytest.approx(imbalance(cost, result.rank_of_sample, ranks), rel=1e-9, abs=1e-6)
    assert result.imbalance >= result.lower_bound >= 1.0
    assert result.gap >= 0
    assert result.dominated == (cost.max() > cost.sum() / ranks)
    assert result.imbalance <= assign(cost, ranks, assignment_mode="zigzag").imbalance
    np.testing.assert_array_equal(result.rank_of_sample, assign(cost, ranks, assignment_mode=mode).rank_of_sample)
    order = np.random.RandomState(0).permutation(len(cost))
    loads, again = (
        np.bincount(a.rank_of_sample, c, ranks)
        for a, c in [(result, cost), (assign(cost[order], ranks, assignment_mode=mode), cost[order])]
    )
    np.testing.assert_allclose(sorted(again), sorted(loads))


@given(batches(), st.sampled_from(["fixed", "slack", "free"]))
@settings(max_examples=150, deadline=None)
def test_lower_bound_holds_for_every_assignment(batch: tuple[np.ndarray, int], mode: str) -> None:
    """Against all assignments within the limits, where there are few enough to try."""
    cost, ranks = batch
    cost, ranks = cost[:6], min(ranks, 3)
    if len(cost) < ranks:
        return
    least, most = limits(len(cost), ranks, mode)
    plans = (np.array(plan) for plan in itertools.product(range(ranks), repeat=len(cost)))
    held = ((plan, np.bincount(plan, minlength=ranks)) for plan in plans)
    best = min(imbalance(cost, plan, ranks) for plan, count in held if least <= count.min() and count.max() <= most)
    assert assign(cost, ranks, assignment_mode=mode).lower_bound <= best + 1e-6


@given(batches(), st.data())
@settings(max_examples=150, deadline=None)
def test_tokens_stay_below_their_limit(batch: tuple[np.ndarray, int], data: st.DataObject) -> None:
    cost, ranks = batch
    tokens = np.array(data.draw(st.lists(st.integers(1, 50), min_size=len(cost), max_size=len(cost))))
    limit = data.draw(st.integers(1, 400))
    mode = data.draw(st.sampled_from(["fixed", "slack", "free"]))
    try:
        result = assign(cost, ranks, assignment_mode=mode, tokens=tokens, max_tokens_per_rank=limit)
    except ValueError as error:
        assert f"max_tokens_per_rank={limit}" in str(error)
        # longest first by tokens is within 4/3 of the best, or one largest sample
        assert mode == "fixed" or limit < max(tokens.max(), tokens.sum() / ranks) * 4 / 3 + tokens.max()
        return
    held = np.bincount(result.rank_of_sample, tokens, ranks)
    assert held.max() <= limit
    assert result.tokens_imbalance == pytest.approx(held.max() / held.mean())
    least, most = limits(len(cost), ranks, mode)
    count = np.bincount(result.rank_of_sample, minlength=ranks)
    assert least <= count.min() and count.max() <= most


@given(batches(), st.data())
@settings(max_examples=150, deadline=None)
def test_groups_stay_together(batch: tuple[np.ndarray, int], data: st.DataObject) -> None:
    cost, ranks = batch
    group = np.array(data.draw(st.lists(st.integers(0, 12), min_size=len(cost), max_size=len(cost))))
    if len(set(group)) < ranks:
        return
    result = assign(cost, ranks, assignment_mode="free", keep_together=group)
    assert all(len(set(result.rank_of_sample[group == g])) == 1 for g in group)
    assert len(set(result.rank_of_sample)) == ranks


@given(batches(), st.sampled_from(["fixed", "slack", "free"]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_tokens_are_levelled_at_no_cost(batch: tuple[np.ndarray, int], mode: str, limited: bool) -> None:
    cost, ranks = batch
    tokens = np.random.RandomState(len(cost)).randint(1, 1000, len(cost))
    before = assign(cost, ranks, assignment_mode=mode)
    most = float(np.bincount(before.rank_of_sample, tokens).max())
    options = {"max_tokens_per_rank": most} if limited else {}
    after = assign(cost, ranks, assignment_mode=mode, tokens=tokens, **options)
    least, largest = limits(len(cost), ranks, mode)
    held = np.bincount(after.rank_of_sample, minlength=ranks)
    assert least <= held.min() and held.max() <= largest
    if limited:  # which may lead to another plan
        assert np.bincount(after.rank_of_sample, tokens).max() <= most
    else:
        assert after.imbalance <= before.imbalance
        assert after.tokens_imbalance <= imbalance(tokens, before.rank_of_sample, ranks) * (1 + 1e-9)


def test_where_one_sample_dominates_tokens_are_level() -> None:
    lengths = np.random.RandomState(0).lognormal(3, 1.1, 64 * 32).round() + 1
    bare, level = (assign(lengths**2, 64, tokens=tokens) for tokens in (None, lengths))
    assert bare.dominated and level.imbalance == bare.imbalance
    before = imbalance(lengths, bare.rank_of_sample, 64)
    assert level.tokens_imbalance < 1.01 < 1.05 < before


def test_a_group_larger_than_the_slack_is_refused() -> None:
    cost, group = np.ones(8), [0, 0, 0, 0, 0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"a group of 5 samples, but a rank may hold 2\. Use count_slack=1\.5 or more"):
        assign(cost, 4, assignment_mode="slack", keep_together=group)
    held = np.bincount(assign(cost, 4, assignment_mode="slack", count_slack=1.5, keep_together=group).rank_of_sample)
    assert sorted(held) == [1, 1, 1, 5]


@given(st.integers(0, 10_000), st.sampled_from(["fixed", "slack"]))
@settings(max_examples=150, deadline=None)
def test_a_limit_that_balanced_tokens_keep_is_met(seed: int, mode: str) -> None:
    tokens = np.random.RandomState(seed).lognormal(3, 1, 24).round()
    limit = np.bincount(assign(tokens, 4, assignment_mode=mode).rank_of_sample, tokens).max()
    plan = assign(tokens**2, 4, assignment_mode=mode, tokens=tokens, max_tokens_per_rank=limit)
    assert np.bincount(plan.rank_of_sample, tokens).max() <= limit


@pytest.mark.parametrize("speeds", [None, [0.001, *[1.0] * 15]])
def test_many_samples_and_ranks_overflow_nothing(speeds: list[float] | None) -> None:
    cost = np.random.RandomState(0).pareto(0.6, 20_000)
    result = assign(cost, 16, assignment_mode="free", rank_speeds=speeds)
    times = np.bincount(result.rank_of_sample, cost, 16) / (1.0 if speeds is None else np.array(speeds))
    assert result.imbalance == pytest.approx(times.max() * (16 if speeds is None else sum(speeds)) / cost.sum(), rel=1e-3)


def test_a_rank_that_takes_nearly_all_samples() -> None:
    """Refinement's table would be as wide as that rank for all of them."""
    cost = np.array([1e6] * 63 + [1e-3] * 5000)
    assert assign(cost, 64, assignment_mode="free").imbalance == pytest.approx(64 / 63, rel=1e-3)


def test_equal_groups_at_equal_counts() -> None:
    cost = np.arange(24.0)
    result = assign(cost, 3, keep_together=np.arange(24) // 2)
    assert np.bincount(result.rank_of_sample).tolist() == [8, 8, 8]
    assert (result.rank_of_sample[::2] == result.rank_of_sample[1::2]).all()


@given(batches(), st.data())
@settings(max_examples=150, deadline=None)
def test_speeds(batch: tuple[np.ndarray, int], data: st.DataObject) -> None:
    cost, ranks = batch
    speeds = np.array(data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.5]), min_size=ranks, max_size=ranks)))
    result = assign(cost, ranks, assignment_mode="free", rank_speeds=speeds)
    assert np.bincount(result.rank_of_sample, minlength=ranks).min() >= 1
    assert result.imbalance >= result.lower_bound - 1e-9
    times = np.bincount(result.rank_of_sample, cost, ranks) / speeds
    if cost.sum():
        assert result.imbalance == pytest.approx(times.max() / (cost.sum() / speeds.sum()), rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("mode", ["fixed", "slack"])
def test_a_slow_rank_gets_less_work(mode: str) -> None:
    cost = np.random.RandomState(0).lognormal(5, 1, 8 * 32)
    speeds = [1, 1, 1, 0.5, 1, 1, 1, 1]
    result = assign(cost, 8, assignment_mode=mode, rank_speeds=speeds)
    loads = np.bincount(result.rank_of_sample, cost)
    assert result.gap < 0.002
    assert loads[3] / np.delete(loads, 3).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("mode", ["fixed", "slack", "free"])
def test_long_tail_reaches_the_bound(mode: str) -> None:
    lengths = np.random.RandomState(0).lognormal(4, 1.0, size=64 * 32).clip(1, 600)
    cost = lengths**2 + 320 * lengths
    result = assign(cost, 64, assignment_mode=mode)
    assert result.gap < 0.0015
    assert imbalance(cost, contiguous_split(len(cost), 64), 64) > 1.5 * result.imbalance


@pytest.mark.parametrize(
    "options", [{}, {"assignment_mode": "slack"}, {"assignment_mode": "free"}, {"rank_speeds": [1.0] * 60 + [0.7] * 4}]
)
def test_numba_finds_the_identical_plan(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    assert swaps.numba_enabled, "the tests need numba"
    used = []
    for seed, samples in ((0, 64 * 40), (1, 64 * 40 + 17)):
        cost = np.random.RandomState(seed).lognormal(5, 1.3, samples).round(seed)
        plans = []
        for enabled in (True, False):
            monkeypatch.setattr(swaps, "numba_enabled", enabled)
            used.append(swaps.worth_compiling(samples))
            plans.append(assign(cost, 64, **options).rank_of_sample)
        np.testing.assert_array_equal(*plans)
    assert used == [True, False] * 2


@pytest.mark.parametrize("mode", ["fixed", "slack", "free"])
@pytest.mark.parametrize("uneven", [False, True], ids=["alike", "speeds"])
def test_longest_first_is_the_same_in_runs_and_from_the_heap(mode: str, uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.RandomState(0)
    for samples in (200 * 12, 200 * 12 + 57):
        for cost in (draw.lognormal(5, 1.5, samples), draw.randint(1, 9, samples).astype(float), draw.pareto(0.7, samples)):
            speeds = draw.uniform(0.5, 1, 200) if uneven else None
            problem = problem_from_arguments(cost, 200, mode, rank_speeds=speeds)[0]
            plans = []
            for compile_heap, run in ((False, 2), (False, 32), (False, 10**9), (True, 160), (True, 10**9)):
                monkeypatch.setattr(swaps, "numba_enabled", compile_heap)
                monkeypatch.setattr(lpt, "_COMPILED_RUN" if compile_heap else "_RUN", run)
                plans.append(lpt.longest_first(problem))
            assert (np.ptp(plans, axis=0) == 0).all()
            slowness, load, held = problem.slowness, np.zeros(200, dtype=np.int64), np.zeros(200, dtype=np.int64)
            for group, cost_of_group in enumerate(problem.cost.tolist()):  # the rule, written down
                full = held >= problem.max_samples - ((held == problem.max_samples).sum() == problem.ranks_at_max)
                rank = np.lexsort((np.arange(200), slowness, np.where(full, np.iinfo(np.int64).max, load)))[0]
                assert plans[0][group] == rank
                load[rank] += cost_of_group * slowness[rank]
                held[rank] += 1


@given(st.integers(0, 61), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_dearest_first_is_a_stable_sort(bits: int, seed: int) -> None:
    draw = np.random.RandomState(seed)
    cost = draw.randint(0, 1 << bits, draw.randint(0, 300)) >> draw.randint(0, bits + 1)
    np.testing.assert_array_equal(dearest_first(cost), np.argsort(-cost, kind="stable"))


@pytest.mark.parametrize("bits", range(50, 62))
def test_dearest_first_of_costs_beside_which_no_place_fits_a_number(bits: int) -> None:
    cost = np.random.RandomState(bits).randint(0, 1 << bits, 300)
    np.testing.assert_array_equal(dearest_first(cost), np.argsort(-cost, kind="stable"))


@pytest.mark.slow
def test_same_plan_in_another_process() -> None:
    code = "import numpy as np; from lightning_freescale.balance import assign;"
    code += "print(assign(np.random.RandomState(1).rand(500) ** 4, 7).rank_of_sample.tolist())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str(assign(np.random.RandomState(1).rand(500) ** 4, 7).rank_of_sample.tolist())


def test_frozen_plan() -> None:
    """The plan must not change between versions and machines, or the ranks of a mixed cluster would disagree."""
    assert assign([5, 9, 2, 7, 7, 1, 3, 8, 4, 6], 3).rank_of_sample.tolist() == [0, 0, 2, 2, 2, 2, 0, 1, 1, 1]


def test_rounding_errors_do_not_matter() -> None:
    cost = np.random.RandomState(2).lognormal(5, 1, 300)
    np.testing.assert_array_equal(assign(cost, 7).rank_of_sample, assign(cost * (1 + 1e-16 * np.arange(300)), 7).rank_of_sample)


def test_all_costs_zero() -> None:
    for mode in MODES:
        result = assign(np.zeros(6), 3, assignment_mode=mode)
        assert (result.imbalance, result.lower_bound) == (1.0, 1.0)
        assert np.bincount(result.rank_of_sample).tolist() == [2, 2, 2]


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_any_unit(scale: float) -> None:
    cost = np.random.RandomState(2).lognormal(5, 1, 64)
    assert assign(cost * scale, 4).gap < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1.0], "ranks": 2}, "1 samples for 2 ranks"),
        ({"costs": [1.0], "ranks": 0}, "ranks=0"),
        ({"costs": [1.0, -1.0]}, r"costs=\.\.\.\)\[1\] is -1\.0"),
        ({"costs": [float("nan")]}, r"costs=\.\.\.\)\[0\] is nan"),
        ({"costs": [[1.0]]}, r"shape \(1, 1\)"),
        ({"assignment_mode": "best"}, "assignment_mode='best'"),
        (
            {"assignment_mode": "zigzag", "tokens": [5, 1, 1, 5], "max_tokens_per_rank": 6, "costs": [4, 3, 2, 1]},
            "assignment_mode='zigzag'.*more tokens",
        ),
        ({"count_slack": -1.0}, "count_slack=-1.0"),
        ({"tokens": [1.0]}, r"tokens=...\) has shape \(1,\)"),
        ({"max_tokens_per_rank": 3}, "max_tokens_per_rank=3\\) needs tokens"),
        ({"tokens": [4.0] * 4, "max_tokens_per_rank": 3}, "no place was found"),
        ({"tokens": [4.0] * 4, "max_tokens_per_rank": float("inf")}, "max_tokens_per_rank=inf"),
        ({"tokens": [1e19] * 4, "max_tokens_per_rank": 9.0}, "more than can be counted"),
        ({"costs": [1.7e308] * 4}, "overflow"),
        ({"keep_together": [0]}, "keep_together=...\\) has shape"),
        ({"keep_together": [0, 0, 0, 0]}, "1 groups for 2 ranks"),
        ({"keep_together": [0, 0, 0, 1]}, "groups of 1 to 3 samples"),
        ({"rank_speeds": [1.0]}, "rank_speeds="),
        ({"rank_speeds": [1.0, 0.0]}, "rank_speeds="),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(**{"costs": [1.0, 2.0, 3.0, 4.0], "ranks": 2, **arguments})


def test_a_fallback_that_does_not_fit_is_refused() -> None:
    for fallback in ([0, 1], [0, 1, 2], [0, -1, 1]):
        with pytest.raises(ValueError, match=r"assign\(fallback=...\) has shape .*pass the rank of each sample, shape \[3\]"):
            assign([1.0, 2, 3], 2, fallback=fallback)
