"""Advice: what holds for which counts, what would help and what that costs; nothing where all is well."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, BalanceReport, Budget, advise, predict

LENGTHS = np.random.RandomState(0).lognormal(3.5, 1.3, 3000).clip(1, 800)
COSTS = LENGTHS**2 + 100 * LENGTHS
SPLIT = "context parallelism"


def _told(costs: np.ndarray, ranks: int, batch_size: int | Budget, **options: object) -> str:
    sentence = advise(costs, ranks, batch_size, **options)
    assert sentence is not None
    return sentence


def _predicted(sentence: str) -> dict[str, float]:
    """What is predicted instead: remedy -> imbalance."""
    return {remedy: float(value) for value, remedy in re.findall(r"^  (\d+\.\d{3}) (.*)$", sentence, re.MULTILINE)}


def test_advice_names_what_would_help() -> None:
    sentence = _told(COSTS, 16, 8, lengths=LENGTHS)
    remedies = "\n".join(_predicted(sentence))
    cap = LENGTHS[np.percentile(COSTS, 99, method="lower") >= COSTS].max()
    for remedy in (
        f"99th percentile (L = {cap:g})",
        "outlier_window=16",
        "batch_size=16",
        'assignment_mode="slack"',
        "on 8 ranks",
    ):
        assert remedy in remedies
    assert advise(np.ones(1000), 16, 8) is None


def test_the_page_shows_what_is_said() -> None:
    page = (Path(__file__).parents[2] / "docs" / "balance.md").read_text()
    shown = next(block for block in page.split("```") if block.startswith("text\nNo assignment"))
    said, shown = (re.sub(r"\d+\.?\d*", "#", text) for text in (_told(COSTS, 16, 8, lengths=LENGTHS), shown))
    assert sorted(said.splitlines()) == sorted(shown.strip().splitlines()[1:])


def test_every_setting_says_what_it_drops_and_costs() -> None:
    remedies = _predicted(_told(COSTS, 16, 8, lengths=LENGTHS))
    assert len(remedies) == 5 and all("which drops " in remedy and ("but" in remedy or "%" in remedy) for remedy in remedies)
    half = next(remedy for remedy in remedies if remedy.startswith("on 8 ranks"))
    now = predict(COSTS, 16, 8).balanced
    told = float(re.findall(r"computes (\d\.\d\d) times as long", half)[0])
    assert told == pytest.approx(2 * remedies[half] / now, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_settings_are_compared_over_the_same_samples(seed: int) -> None:
    """Other steps, drawn from few of the samples, would be better or worse by chance."""
    remedies = _predicted(_told(COSTS, 16, 8, seed=seed))
    same = {"batch_size=16": (16, 16, 8), "on 8 ranks": (8, 8, 32)}
    for text, (ranks, batch_size, steps) in same.items():
        told = next(value for remedy, value in remedies.items() if text in remedy)
        assert told == pytest.approx(predict(COSTS, ranks, batch_size, steps=steps, seed=seed).balanced, rel=0.01)


def test_a_budget_of_tokens_is_one_of_shorter_histories_where_these_are_truncated() -> None:
    """Fewer tokens are fewer steps."""
    budget = Budget(2000, LENGTHS)
    cap = LENGTHS[np.percentile(COSTS, 99, method="lower") >= COSTS].max()
    remedies = _predicted(_told(COSTS, 8, budget, lengths=LENGTHS))
    told = next(value for remedy, value in remedies.items() if "truncated" in remedy)
    shorter = Budget(2000, np.minimum(LENGTHS, cap))
    capped = np.minimum(COSTS, np.percentile(COSTS, 99, method="lower"))
    assert told == pytest.approx(predict(capped, 8, shorter, steps=1).balanced, rel=0.01)
    assert "with twice the budget, which drops nothing, but makes about half as many steps" in "\n".join(remedies)


def test_what_truncation_drops_is_told() -> None:
    lengths = np.array([10.0] * 990 + [100.0] * 10)  # 11 of 1000 above the 99th percentile would be none
    costs = lengths**2
    truncated = next(remedy for remedy in _predicted(_told(costs, 4, 4, lengths=lengths)) if "percentile" in remedy)
    assert truncated.endswith("(L = 10), which drops 8.3% of the events and 49.7% of the cost")
    truncated = next(remedy for remedy in _predicted(_told(costs, 4, 4)) if "percentile" in remedy)
    assert truncated.endswith("percentile, which drops 49.7% of the cost"), "lengths are not known"


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, "at equal counts"),
        ({"assignment_mode": "slack"}, "at counts up to 1.25 times equal"),
        ({"assignment_mode": "slack", "count_slack": 0.5}, "at counts up to 1.5 times equal"),
        ({"assignment_mode": "free"}, "at any counts"),
    ],
)
def test_every_bound_says_for_which_counts_it_holds(options: dict[str, object], counts: str) -> None:
    """So that nothing of what is predicted at these counts contradicts it."""
    sentence = _told(COSTS, 32, 4, **options)
    bound = predict(COSTS, 32, 4, **options).lower_bound
    assert sentence.startswith(f"No assignment of these steps {counts} gets below {bound:.3f} (")
    free = predict(COSTS, 32, 4, assignment_mode="free").lower_bound
    assert (f"At any counts the bound is {free:.3f} (" in sentence) == (free < bound - 0.005)
    for remedy, value in _predicted(sentence).items():
        if "assignment_mode" in remedy:
            assert value >= free - 0.0005, "as printed"


@pytest.mark.parametrize("seed", range(4))
def test_nothing_predicted_in_the_same_steps_is_below_their_bound(seed: int) -> None:
    sentence = _told(COSTS, 8, 8, seed=seed)
    slack = next(value for remedy, value in _predicted(sentence).items() if "in the same steps" in remedy)
    free = re.search(r"At any counts the bound is (\d\.\d{3}) ", sentence)
    assert free is not None and slack >= float(free[1])


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, "slack"),
        ({"assignment_mode": "slack", "count_slack": 0.0}, "free"),
        ({"assignment_mode": "free"}, None),
    ],
)
def test_other_counts_are_tried_where_counts_are_limited(options: dict[str, object], other: str | None) -> None:
    remedies = "\n".join(_predicted(_told(np.array([100.0] * 4 + [1.0] * 28), 8, 4, **options)))
    assert re.findall(r'assignment_mode="(\w+)"', remedies) == ([] if other is None else [other])


def test_samples_that_dominate_call_for_splitting_them() -> None:
    assert SPLIT in _told(COSTS, 16, 8)
    even = np.array([3.0, 2.0, 2.0, 2.0] * 50)  # too few for each rank, and none dominates
    sentence = _told(even, 10, 2)
    assert SPLIT not in sentence and "one sample costs more" not in sentence


def test_what_ranks_compute_besides_their_samples_is_part_of_every_figure() -> None:
    """Else a report that knows of it would stand beside predictions that do not, and nothing would seem to help."""
    sampler = BalancedSampler(COSTS, 8, num_replicas=16, rank=0)
    base = 8 * COSTS.mean()
    steps = [sampler.balance(step).with_base(base, 16) for step in range(len(sampler))]
    sentences = _told(COSTS, 16, 8), _told(COSTS, 16, 8, report=BalanceReport.from_steps(steps), base=base)
    alone, found = ({remedy.split(",")[0]: value for remedy, value in _predicted(each).items()} for each in sentences)
    assert found.keys() == alone.keys()
    for remedy in ("with outlier_window=16", 'with assignment_mode="slack"'):
        assert found[remedy] - 1 == pytest.approx((alone[remedy] - 1) / 2, rel=0.1)


def test_advice_when_nothing_helps() -> None:
    """Three samples are everything, on any number of ranks."""
    sentence = _told(np.array([1.0] * 27 + [1e9] * 3), 4, 8)
    assert "Nothing that was tried would help" in sentence and SPLIT in sentence
    assert _predicted(sentence) == {}


def test_a_step_of_the_whole_data_set_is_told_and_no_larger_one_advised() -> None:
    sentence = _told(COSTS[:300], 64, 8, lengths=LENGTHS[:300])
    assert sentence.startswith(
        "A step of 64 x 8 has 512 samples, the data set only has 300: every step has all 300, 4 or 5 per"
    )
    remedies = "\n".join(_predicted(sentence))
    assert "batch_size" not in remedies and "outlier_window" not in remedies
    assert "on 32 ranks" in remedies
    real = BalancedSampler(COSTS[:300], 8, num_replicas=64, rank=0).report()
    assert f"gets below {real.lower_bound:.3f}" in sentence


def test_alternatives_that_a_limit_rules_out_are_left_out() -> None:
    """Twice the batch does not fit the limit on tokens, half the ranks not the speeds."""
    limits = {"tokens": np.ones(3000), "max_tokens_per_rank": 8, "rank_speeds": [1.0] * 16}
    remedies = "\n".join(_predicted(_told(COSTS, 16, 8, **limits)))
    assert "batch_size=16" not in remedies and "on 8 ranks" not in remedies and "percentile" in remedies
    accumulated = "\n".join(_predicted(_told(COSTS, 16, 8, window=2)))
    assert "outlier_window" not in accumulated and "percentile" in accumulated, "they do not go together"
