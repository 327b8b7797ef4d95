"""Predictions compared with the epochs of the sampler, and advice where no assignment can help."""

from __future__ import annotations

import dataclasses
import re
import warnings

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, BalanceReport, Budget, advise, forecast, predict

LENGTHS = np.random.RandomState(0).lognormal(4, 1, 40_000).clip(1, 800)
COSTS = LENGTHS**2 + 500 * LENGTHS


def _epochs(samples: int, ranks: int, batch_size: int, seed: int, epochs: int, **options: object) -> list[BalanceReport]:
    sampler = BalancedSampler(COSTS[:samples], batch_size, num_replicas=ranks, rank=0, seed=seed, **options)
    return [sampler.report(epoch) for epoch in range(epochs)]


@pytest.mark.filterwarnings("ignore:predict")
@pytest.mark.parametrize(
    "given",
    [{}, {"window": 3}, {"assignment_mode": "free"}, {"drop_last": True}, {"tokens": LENGTHS}],
    ids=str,
)
def test_a_whole_epoch_is_that_of_the_sampler(given: dict[str, object]) -> None:
    for samples, ranks, batch_size in ((103, 4, 4), (103, 16, 4), (97, 16, 6), (97, 97, 1)):
        options = {name: value[:samples] if isinstance(value, np.ndarray) else value for name, value in given.items()}
        (epoch,) = _epochs(samples, ranks, batch_size, seed=3, epochs=1, **options)
        found = predict(COSTS[:samples], ranks, batch_size, steps=epoch.steps, seed=3, **options)
        assert found == epoch, (samples, ranks, batch_size)


def test_steps_are_the_first_of_the_epoch() -> None:
    sampler = BalancedSampler(COSTS[:1000], 5, num_replicas=4, rank=0, seed=2, window=4)
    first = BalanceReport.from_steps(sampler.step_plan(0, step).balance for step in range(8))
    found = predict(COSTS[:1000], 4, 5, steps=6, seed=2, window=4)
    assert found.steps == 8, "windows are complete"
    assert predict(COSTS[:1000], 4, 100, steps=4).steps == 6, "two epochs of two full steps and an incomplete one"
    assert found.lower_bound == pytest.approx(first.lower_bound) and found.unbalanced == pytest.approx(first.unbalanced)


@pytest.mark.parametrize(("samples", "count"), [(40_000, 4_000), (11, 1), (10**9, 1_000)])
def test_a_large_data_set_is_not_shuffled(samples: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample is drawn twice, and each is equally likely at each position."""
    monkeypatch.setattr(forecast, "SHUFFLED", 0)
    monkeypatch.setattr(forecast, "draw_order", None)
    drawn = forecast.draw_samples(samples, count, seed=5)
    assert len(set(drawn.tolist())) == len(drawn) == count and drawn.min() >= 0 and drawn.max() < samples
    if count >= 1_000:
        for part in (drawn[: count // 2], drawn[count // 2 :]):
            assert part.mean() == pytest.approx(samples / 2, rel=0.1)


@pytest.mark.parametrize(
    ("samples", "ranks", "batch_size", "planned"),
    [(6_040, 8, 2, 4), (6_040, 8, 32, 1), (6_040, 64, 32, 4), (1_500, 1024, 8, 1)],
)
def test_a_few_planned_steps_stand_for_all(samples: int, ranks: int, batch_size: int, planned: int) -> None:
    costs = COSTS[:samples]
    for options in ({}, {"assignment_mode": "free"}, {"tokens": LENGTHS[:samples], "max_tokens_per_rank": 1e6}):
        whole = forecast.report_plans(forecast.draw_steps(costs, ranks, batch_size, steps=24, **options))
        some = forecast.report_plans(forecast.draw_steps(costs, ranks, batch_size, steps=24, **options), planned)
        assert some.balanced == pytest.approx(whole.balanced, rel=0.01)
        planned_alone = {"balanced": 0, "tokens_imbalance": 0, "tokens_fullest": 0}
        assert dataclasses.replace(some, **planned_alone) == dataclasses.replace(whole, **planned_alone)
        assert some.balanced >= some.lower_bound - 1e-9
    plans = forecast.draw_steps(costs, ranks, batch_size, steps=3)
    first = forecast.report_plans(plans)
    assert forecast.report_plans(plans, first.steps) == first


def test_a_step_that_the_data_set_cannot_fill_is_told() -> None:
    with pytest.warns(UserWarning, match=r"ranks=8, batch_size=16\).* 100\b.* 12 or 13"):
        predict(COSTS[:100], 8, 16)
    with pytest.warns(UserWarning, match=r" 96\b.* 12 per rank"):
        predict(COSTS[:96], 8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(COSTS[:128], 8, 16)


# -- advice: the counts of a bound, and other settings with their costs


HISTORIES = np.random.RandomState(0).lognormal(3.5, 1.3, 3000).clip(1, 800)
SKEWED = HISTORIES**2 + 100 * HISTORIES
SPLIT = "context parallelism"


def _advised(costs: np.ndarray, ranks: int, batch_size: int | Budget, **options: object) -> str:
    sentence = advise(costs, ranks, batch_size, **options)
    assert sentence is not None
    return sentence


def _predicted(sentence: str) -> dict[str, float]:
    """Return the predicted imbalance by remedy."""
    return {remedy: float(value) for value, remedy in re.findall(r"^  (\d+\.\d{3}) (.*)$", sentence, re.MULTILINE)}


def test_advice_names_what_would_help_and_what_that_costs() -> None:
    remedies = _predicted(_advised(SKEWED, 16, 8, lengths=HISTORIES))
    cap = HISTORIES[np.percentile(SKEWED, 99, method="lower") >= SKEWED].max()
    named = [f"(L = {cap:g})", "batch_size=16", 'assignment_mode="slack"', "on 8 ranks"]
    found = {name: next(remedy for remedy in remedies if name in remedy) for name in named}
    assert sorted(found.values()) == sorted(remedies)
    stated = float(re.findall(r" (\d\.\d\d) times", found["on 8 ranks"])[0])
    assert stated == pytest.approx(2 * remedies[found["on 8 ranks"]] / predict(SKEWED, 16, 8).balanced, abs=0.01)
    assert advise(np.ones(1000), 16, 8) is None


@pytest.mark.parametrize("seed", range(3))
def test_settings_are_compared_over_the_same_samples(seed: int) -> None:
    """Steps of other samples would differ by chance. No prediction is below the bound."""
    sentence = _advised(SKEWED, 16, 8, seed=seed)
    remedies = _predicted(sentence)
    same = {"batch_size=16": (16, 16, 8), "on 8 ranks": (8, 8, 32)}
    for text, (ranks, batch_size, steps) in same.items():
        stated = next(value for remedy, value in remedies.items() if text in remedy)
        assert stated == pytest.approx(predict(SKEWED, ranks, batch_size, steps=steps, seed=seed).balanced, rel=0.01)
    slack = next(value for remedy, value in remedies.items() if "assignment_mode" in remedy)
    assert slack >= round(predict(SKEWED, 16, 8, seed=seed, assignment_mode="free").lower_bound, 3)


def test_a_budget_of_tokens_is_one_of_shorter_histories_where_these_are_truncated() -> None:
    """Shorter histories have fewer tokens, which need fewer steps."""
    budget = Budget(2000, HISTORIES)
    cap = HISTORIES[np.percentile(SKEWED, 99, method="lower") >= SKEWED].max()
    remedies = _predicted(_advised(SKEWED, 8, budget, lengths=HISTORIES))
    stated = next(value for remedy, value in remedies.items() if "truncated" in remedy)
    shorter = Budget(2000, np.minimum(HISTORIES, cap))
    capped = np.minimum(SKEWED, np.percentile(SKEWED, 99, method="lower"))
    assert stated == pytest.approx(predict(capped, 8, shorter, steps=1).balanced, rel=0.01)
    assert any("twice the budget" in remedy for remedy in remedies)


def test_what_truncation_drops_is_told() -> None:
    lengths = np.array([10.0] * 990 + [100.0] * 10)  # 11 of 1000 samples above the 99th percentile would change the percentile
    costs = lengths**2
    truncated = next(remedy for remedy in _predicted(_advised(costs, 4, 4, lengths=lengths)) if "percentile" in remedy)
    assert re.findall(r"L = \d+|[\d.]+%", truncated) == ["L = 10", "8.3%", "49.7%"], "of the events and of the cost"
    truncated = next(remedy for remedy in _predicted(_advised(costs, 4, 4)) if "percentile" in remedy)
    assert re.findall(r"L = \d+|[\d.]+%", truncated) == ["49.7%"], "lengths are unknown"


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, "at equal counts"),
        ({"assignment_mode": "slack"}, "at counts up to 1.25 times equal"),
        ({"assignment_mode": "free"}, "at any counts"),
    ],
)
def test_every_bound_says_for_which_counts_it_holds(options: dict[str, object], counts: str) -> None:
    """No prediction at these counts contradicts the bound."""
    sentence = _advised(SKEWED, 32, 4, **options)
    bound = predict(SKEWED, 32, 4, **options).lower_bound
    first = sentence.partition(": ")[0]
    assert counts in first and f" {bound:.3f} ({1 - 1 / bound:.0%}" in first
    free = predict(SKEWED, 32, 4, assignment_mode="free").lower_bound
    assert (f" {free:.3f} (" in sentence.replace(first, "").partition("\n")[0]) == (free < bound - 0.005)
    for remedy, value in _predicted(sentence).items():
        if "assignment_mode" in remedy:
            assert value >= free - 0.0005, "as printed"


def test_other_counts_are_tried_where_counts_are_limited() -> None:
    for options, other in (({}, ["slack"]), ({"assignment_mode": "slack"}, ["free"]), ({"assignment_mode": "free"}, [])):
        remedies = "\n".join(_predicted(_advised(np.array([100.0] * 4 + [1.0] * 28), 8, 4, **options)))
        assert re.findall(r'assignment_mode="(\w+)"', remedies) == other


def test_what_ranks_compute_besides_their_samples_is_part_of_every_figure() -> None:
    """A report that includes the base must not be compared with predictions without it."""
    sampler = BalancedSampler(SKEWED, 8, num_replicas=16, rank=0)
    base = 8 * SKEWED.mean()
    steps = [sampler.balance(step).with_base(base, 16) for step in range(len(sampler))]
    sentences = _advised(SKEWED, 16, 8), _advised(SKEWED, 16, 8, report=BalanceReport.from_steps(steps), base=base)
    alone, found = ({remedy.split(",")[0]: value for remedy, value in _predicted(each).items()} for each in sentences)
    assert found.keys() == alone.keys()
    remedy = 'with assignment_mode="slack"'
    assert found[remedy] - 1 == pytest.approx((alone[remedy] - 1) / 2, rel=0.1)


def test_advice_when_nothing_helps() -> None:
    """Three samples dominate on any number of ranks, so that only splitting them helps."""
    sentence = _advised(np.array([1.0] * 27 + [1e9] * 3), 4, 8)
    assert SPLIT in sentence and _predicted(sentence) == {}
    even = np.array([3.0, 2.0, 2.0, 2.0] * 50)  # too few samples for each rank, and none dominates
    assert SPLIT in _advised(SKEWED, 16, 8) and SPLIT not in _advised(even, 10, 2)


def test_a_step_of_the_whole_data_set_is_told_and_no_larger_one_advised() -> None:
    sentence = _advised(SKEWED[:300], 64, 8, lengths=HISTORIES[:300])
    assert all(fact in sentence.partition(": ")[0] for fact in ("64 x 8", "512 samples", "300")) and "4 or 5 per" in sentence
    remedies = "\n".join(_predicted(sentence))
    assert "batch_size" not in remedies
    assert "on 32 ranks" in remedies
    real = BalancedSampler(SKEWED[:300], 8, num_replicas=64, rank=0).report()
    assert f" {real.lower_bound:.3f} (" in sentence


def test_alternatives_that_a_limit_rules_out_are_left_out() -> None:
    """Twice the batch does not fit the limit on tokens."""
    limits = {"tokens": np.ones(3000), "max_tokens_per_rank": 8}
    remedies = "\n".join(_predicted(_advised(SKEWED, 16, 8, **limits)))
    assert "batch_size=16" not in remedies and "on 8 ranks" in remedies and "percentile" in remedies
    accumulated = "\n".join(_predicted(_advised(SKEWED, 16, 8, window=2)))
    assert "percentile" in accumulated
