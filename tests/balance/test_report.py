"""What the user reads of a plan: a row of compute, and one of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.balance import BalanceReport, StepBalance
from lightning_freescale.balance.plan import StepPlan

TOKENS = np.array([900.0, 100.0, 800.0, 200.0])


def _step(**others: object) -> StepBalance:
    given = {
        "unbalanced": 1.5,
        "balanced": 1.25,
        "lower_bound": 1.25,
        "dominated": False,
        "tokens_imbalance": None,
        "cost": 4.0,
    }
    return StepBalance(**{**given, **others})  # type: ignore[arg-type]


def _rows(report: BalanceReport) -> list[list[str]]:
    return [line.split() for line in str(report).splitlines()]


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
    one = _step(tokens_unbalanced=1.4, tokens_imbalance=1.1, tokens_fullest=0.5, cost=1.0)
    other = _step(tokens_unbalanced=1.8, tokens_imbalance=1.3, tokens_fullest=0.9, cost=3.0)
    report = BalanceReport.from_steps([other, one])
    assert (report.tokens_unbalanced, report.tokens_imbalance) == (pytest.approx(1.7), pytest.approx(1.25))
    assert report.tokens_fullest == 0.9
    assert report.scalars("step")["freescale/imbalance/step/tokens_unbalanced"] == pytest.approx(1.7)
    assert report.scalars("step")["freescale/imbalance/step/tokens_fullest"] == 0.9
    assert not any("tokens" in name for name in BalanceReport.from_steps([_step()]).scalars("step"))
    assert BalanceReport.from_steps([one, _step()]).tokens_unbalanced is None, "of one step nobody knows"
    assert BalanceReport.from_steps([]) == BalanceReport(0, 1.0, 1.0, 1.0, 0.0, None, None, None)


def test_a_base_takes_part_in_compute_alone() -> None:
    step = _step(tokens_unbalanced=1.4, tokens_imbalance=1.1, tokens_fullest=0.5)
    based = step.with_base(2.0, ranks=2)
    assert (based.unbalanced, based.balanced) == (1.25, 1.125)
    assert (based.tokens_unbalanced, based.tokens_imbalance, based.tokens_fullest) == (1.4, 1.1, 0.5)


def test_compute_and_tokens_are_a_row_each() -> None:
    step = _step(tokens_unbalanced=1.4, tokens_imbalance=1.1)
    assert str(BalanceReport.from_steps([step, step])).splitlines() == [
        "imbalance over 2 steps (max / mean over ranks):",
        "         as drawn             balanced             lower bound  gap",
        "compute  1.500 (33.3% idle)   1.250 (20.0% idle)   1.250        0.00%",
        "tokens   1.400                1.100                -            -",
    ]


def test_what_is_not_known_has_no_row_and_what_is_remarkable_has() -> None:
    told = _rows(BalanceReport.from_steps([_step(balanced=1.3)]))
    assert [row[0] for row in told] == ["imbalance", "as", "compute"]
    assert told[2] == ["compute", "1.500", "(33.3%", "idle)", "1.300", "(23.1%", "idle)", "1.250", "4.00%"]
    limited = _step(tokens_unbalanced=1.4, tokens_imbalance=1.1, tokens_fullest=0.973, dominated=True)
    lines = str(BalanceReport.from_steps([limited, _step(tokens_unbalanced=1, tokens_imbalance=1)])).splitlines()
    assert lines[3].endswith("1.050                -            -      fullest rank of any step: 97.3% of its limit")
    assert lines[4] == "in 50% of the steps one sample costs more than a rank's fair share"
