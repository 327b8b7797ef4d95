"""How far plans are above the lower bound, and whether a search finds better ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import balance_gaps
import numpy as np
import pytest
from balance_gaps import Case, Result

from lightning_freescale.balance import assign
from tests.benchmarks.conftest import Run


@pytest.fixture
def poor_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zig-zag in place of ours, which may leave no batch above the limit."""
    monkeypatch.setattr(balance_gaps, "plan", lambda case, costs: assign(costs, case.ranks, assignment_mode="zigzag"))


@pytest.mark.usefixtures("poor_plans")
def test_gaps_of_every_batch(users: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--data", users, "--families", "few", "short", "--ranks", 2, 16, "--per-rank", 3, 8, "--batches", 2]
    figures = run(balance_gaps, *grid, "--worst", 3)
    assert figures["few_cases"] == 3 * 2 * 3 * 3 and figures["sizes_left_out"] == 1, "16 x 8 samples are more than 100"
    assert figures["short_cases"] == 4 * 2 * 3 * 3 and figures["all_cases"] == figures["few_cases"] + figures["short_cases"]
    assert figures["all_worst"] == max(figures[f"{mode}_worst"] for mode in ("fixed", "slack", "free"))
    assert 0 < figures["all_mean"] < figures["all_worst"] and figures["all_above"] >= 3
    shown = capsys.readouterr().out
    assert "1 sizes left out" in shown
    named = re.findall(r"^ *([\d.]+)%  (\S+)  above", shown, re.MULTILINE)
    assert len(named) == 3 and float(named[0][0]) == pytest.approx(100 * figures["all_worst"], abs=1e-4)
    again = run(balance_gaps, "--data", users, "--case", named[0][1])
    assert again["all_worst"] == figures["all_worst"] and again["all_cases"] == 1
    with pytest.raises(SystemExit) as stopped:
        run(balance_gaps, "--data", users, "--case", named[0][1], "--require", "all_above<=0")
    assert stopped.value.code == 1


def test_ours_is_what_is_measured(run: Run) -> None:
    case = Case.parse("lognormal/4x8/mixed/slack/0")
    planned = assign(balance_gaps.case_costs(case, {}), 4, assignment_mode="slack", count_slack=0.25)
    assert run(balance_gaps, "--case", str(case))["lognormal_slack_worst"] == pytest.approx(planned.gap, abs=1e-12)


def test_modes_and_costs_share_a_batch() -> None:
    case = Case.parse("short/4x8/linear/free/7")
    assert str(case) == "short/4x8/linear/free/7" and case == Case("short", 4, 8, "linear", "free", 7)
    lengths = balance_gaps.case_costs(case, {})
    assert len(lengths) == 32 and (lengths == balance_gaps.case_costs(case._replace(mode="fixed"), {})).all()
    assert (balance_gaps.case_costs(case._replace(cost="square"), {}) == lengths**2).all()
    assert (balance_gaps.case_costs(case._replace(cost="mixed"), {}) == lengths**2 + 1280 * lengths).all()
    assert (balance_gaps.case_costs(case._replace(seed=8), {}) != lengths).any()


def test_real_histories_are_drawn_once_each() -> None:
    case, known = Case("few", 4, 8, "linear", "fixed", 0), np.arange(1.0, 33)
    assert sorted(balance_gaps.case_costs(case, {"few": known})) == known.tolist()


@pytest.mark.parametrize(
    ("found", "proved", "verdict", "gap"),
    [
        (np.inf, 0.0, "above", 0.02),
        (1.02, 1.0195, "best", 1.02 / 1.0195 - 1),
        (1.01, 1.01, "missed", 1.02 / 1.01 - 1),
        (1.0195, 1.0, "undecided", 0.02),
    ],
)
def test_verdicts_of_an_exact_solver(found: float, proved: float, verdict: str, gap: float) -> None:
    result = Result(Case("short", 4, 8, "linear", "free", 7), 1.02, 1.0, 1.0, found, proved)
    assert result.verdict == verdict and result.gap == pytest.approx(gap)
    assert Result(result.case, 1.0205, 1.02, 1.0).verdict == "best"


@pytest.mark.usefixtures("poor_plans")
def test_exact_solver_is_asked_about_small_batches_above_the_limit(
    users: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def best_imbalance(costs: np.ndarray, plan: np.ndarray, ranks: int, limits: tuple, seconds: float, enough: float) -> tuple:
        asked.append((len(costs), limits))
        ours = np.bincount(plan, costs, ranks).max() / costs.sum() * ranks
        return ours, ours

    stand_in = ModuleType("exact")
    stand_in.best_imbalance = best_imbalance
    monkeypatch.setitem(sys.modules, "exact", stand_in)
    grid = ["--families", "short", "--ranks", 2, 16, "--per-rank", 4, "--batches", 2]
    above = run(balance_gaps, *grid)["all_above"]
    assert above > run(balance_gaps, *grid, "--ranks", 16)["all_above"] > 0
    figures = run(balance_gaps, *grid, "--exact", 1, "--exact-samples", 63)
    assert len(asked) == figures["searched_cases"] == figures["searched_best"] == above - figures["all_above"] > 0
    assert set(asked) == {(8, (4, 4)), (8, (1, 5)), (8, (1, 8))}
    asked.clear()
    assert run(balance_gaps, *grid, "--exact", 1, "--exact-of", "all")["searched_cases"] == len(asked) == 2 * 2 * 9


@pytest.mark.slow
@pytest.mark.usefixtures("poor_plans")
def test_large_batches_are_searched(run: Run) -> None:
    pytest.importorskip("numba")
    figures = run(balance_gaps, "--case", "short/8x8/linear/fixed/0", "short/2x2/linear/fixed/0", "--search", 2)
    assert figures["searched_cases"] == figures["short_above"] > 0
    assert figures["searched_missed"] >= 1 and figures["searched_most_missed"] > 0.001


def test_a_lower_bound_above_a_plan_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("exact")
    stand_in.best_imbalance = lambda *arguments: (0.99, 0.99)
    monkeypatch.setitem(sys.modules, "exact", stand_in)
    with pytest.raises(AssertionError, match=r"the lower bound is .*, but there is a plan of 0\.99"):
        run(balance_gaps, "--case", "short/2x4/linear/fixed/0", "--exact", 1, "--exact-of", "all")
