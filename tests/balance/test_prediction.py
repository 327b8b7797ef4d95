"""Predictions against what the sampler's own epochs come to."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, BalanceReport, predict, prediction

LENGTHS = np.random.RandomState(0).lognormal(4, 1, 40_000).clip(1, 800)
COSTS = LENGTHS**2 + 500 * LENGTHS
TOLERANCE = {"unbalanced": 0.1, "balanced": 0.05, "lower_bound": 0.05}
"""Relative, of epochs that are drawn with another seed; as drawn, chance decides what comes beside an expensive sample."""

CASES = [  # samples, ranks, batch size
    (40_000, 8, 8),
    (40_000, 64, 32),
    (6_040, 8, 32),
    (6_040, 64, 32),  # two full steps and an incomplete one
    (6_040, 256, 32),  # fewer samples than a step should have
    (6_040, 1024, 32),
    (1_500, 1024, 1),  # the 476 left over join the only step
    (1_500, 1024, 8),
    (610, 610, 4),
    (40, 16, 2),
]


def _epochs(samples: int, ranks: int, batch_size: int, seed: int, epochs: int, **options: object) -> list[BalanceReport]:
    sampler = BalancedSampler(COSTS[:samples], batch_size, num_replicas=ranks, rank=0, seed=seed, **options)
    return [sampler.report(epoch) for epoch in range(epochs)]


@pytest.mark.filterwarnings("ignore:predict")
@pytest.mark.parametrize(("samples", "ranks", "batch_size"), CASES)
def test_predicted_is_what_real_epochs_come_to(samples: int, ranks: int, batch_size: int) -> None:
    report = predict(COSTS[:samples], ranks, batch_size, steps=128)
    real = _epochs(samples, ranks, batch_size, seed=1, epochs=1 if samples > 10_000 else 8)
    for name, tolerance in TOLERANCE.items():
        of_epochs = float(np.mean([getattr(epoch, name) for epoch in real]))
        assert getattr(report, name) == pytest.approx(of_epochs, rel=tolerance), name


@pytest.mark.filterwarnings("ignore:predict")
@pytest.mark.parametrize(
    "options", [{}, {"outlier_window": 3}, {"window": 3}, {"assignment_mode": "free"}, {"drop_last": True}], ids=str
)
@pytest.mark.parametrize(("samples", "ranks", "batch_size"), [(103, 4, 4), (103, 16, 4), (97, 16, 6), (97, 97, 1)])
def test_a_whole_epoch_is_that_of_the_sampler(samples: int, ranks: int, batch_size: int, options: dict[str, object]) -> None:
    (epoch,) = _epochs(samples, ranks, batch_size, seed=3, epochs=1, **options)
    assert predict(COSTS[:samples], ranks, batch_size, steps=epoch.steps, seed=3, **options) == epoch


def test_steps_are_the_first_of_the_epoch() -> None:
    sampler = BalancedSampler(COSTS[:1000], 5, num_replicas=4, rank=0, seed=2, outlier_window=4)
    first = BalanceReport.from_steps(sampler.step_plan(0, step).balance for step in range(8))
    found = predict(COSTS[:1000], 4, 5, steps=6, seed=2, outlier_window=4)
    assert found.steps == 8, "whole windows"
    assert found.lower_bound == pytest.approx(first.lower_bound) and found.unbalanced == pytest.approx(first.unbalanced)


def test_whole_epochs_of_small_data_sets() -> None:
    assert predict(COSTS[:1000], 4, 100, steps=4).steps == 6, "two epochs of two full steps and an incomplete one"


@pytest.mark.parametrize(("samples", "count"), [(40_000, 4_000), (11, 1), (10**9, 1_000)])
def test_a_large_data_set_is_not_shuffled(samples: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But no sample comes twice, and each is as likely at each place."""
    monkeypatch.setattr(prediction, "SHUFFLED", 0)
    monkeypatch.setattr(prediction, "draw_order", None)
    drawn = prediction.draw_samples(samples, count, seed=5)
    assert len(set(drawn.tolist())) == len(drawn) == count and drawn.min() >= 0 and drawn.max() < samples
    if count >= 1_000:
        for part in (drawn[: count // 2], drawn[count // 2 :]):
            assert part.mean() == pytest.approx(samples / 2, rel=0.1)


def test_steps_of_a_large_data_set_are_like_its_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = predict(COSTS, 16, 8, steps=16)
    monkeypatch.setattr(prediction, "SHUFFLED", 0)
    drawn = predict(COSTS, 16, 8, steps=16)
    assert drawn != shuffled
    (epoch,) = _epochs(40_000, 16, 8, seed=1, epochs=1)
    assert drawn.unbalanced == pytest.approx(epoch.unbalanced, rel=2 * TOLERANCE["unbalanced"])
    assert drawn.steps == 16


@pytest.mark.parametrize(
    ("samples", "ranks", "batch_size", "planned"),
    [(6_040, 8, 2, 4), (6_040, 8, 32, 1), (6_040, 64, 32, 4), (1_500, 1024, 8, 1)],
)
def test_a_few_planned_steps_stand_for_all(samples: int, ranks: int, batch_size: int, planned: int) -> None:
    costs = COSTS[:samples]
    for options in ({}, {"assignment_mode": "free"}, {"tokens": LENGTHS[:samples], "max_tokens_per_rank": 1e6}):
        whole = prediction.report_steps(costs, ranks, batch_size, steps=24, **options)
        some = prediction.report_steps(costs, ranks, batch_size, steps=24, planned=planned, **options)
        assert some.balanced == pytest.approx(whole.balanced, rel=0.01)
        planned_alone = {"balanced": 0, "tokens_imbalance": 0, "tokens_fullest": 0}
        assert dataclasses.replace(some, **planned_alone) == dataclasses.replace(whole, **planned_alone)
        assert some.balanced >= some.lower_bound - 1e-9
    first = prediction.report_steps(costs, ranks, batch_size, steps=3)
    assert prediction.report_steps(costs, ranks, batch_size, steps=3, planned=first.steps) == first


def test_a_step_that_the_data_set_cannot_fill_is_told() -> None:
    with pytest.warns(UserWarning, match=r"predict\(ranks=8, batch_size=16\): A step .* has 100: .* all 100, 12 or 13"):
        predict(COSTS[:100], 8, 16)
    with pytest.warns(UserWarning, match=r"all 96, 12 per rank"):
        predict(COSTS[:96], 8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(COSTS[:128], 8, 16)


def test_tokens_and_groups_are_those_of_the_samples() -> None:
    tokens = LENGTHS[:300]
    report = predict(COSTS[:300], 4, 5, steps=3, tokens=tokens, max_tokens_per_rank=5000)
    assert report.tokens_imbalance is not None and report.tokens_imbalance >= 1
    together = predict(COSTS[:300], 4, 5, steps=3, keep_together=np.arange(300) // 2, assignment_mode="free")
    assert together.balanced >= together.lower_bound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1.0, -1.0, 2.0]}, r"predict\(costs=...\)\[1\] is -1.0"),
        ({"ranks": 4}, "3 samples for 4 ranks"),
        ({"batch_size": 0}, r"batch_size=0"),
        ({"steps": 0}, r"predict\(steps=0\): pass a whole number, 1 or more"),
        ({"outlier_window": 0}, r"outlier_window=0"),
        ({"ranks": 2, "batch_size": 2, "drop_last": True}, "drop_last=True leaves no step"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(**{"costs": [1.0, 2.0, 3.0], "ranks": 1, "batch_size": 1, **arguments})
