"""The report's figures and its text, on parts whose truth is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.planned import PlannedBalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.reporting.facts import ExchangeFigures, Overhead, RunInfo, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport, window_scalars
from tests.helpers.reports import RUN, full_report, growing_memory, report_of, step


def _two_ranks(**changes: Any) -> BubbleReport:
    """Rank 0 waits for rank 1; of 4 seconds, 3 are compute."""
    rows = [
        [step(2.0, forward=0.4, backward=0.5, optimizer=0.1, straggler_wait=0.75, transfer=0.25, hidden=0.75)],
        [step(2.0, forward=1.0, backward=0.75, optimizer=0.25)],
    ]
    return report_of(np.array([[rank[0] for rank in rows]] * 3), np.array([[1, 3]] * 3), **changes)


def test_figures() -> None:
    report = _two_ranks()
    assert report.bubble == pytest.approx(0.25) and report.limit == pytest.approx(4 / 3)
    assert report.step_s == 2.0 and report.compute_s == pytest.approx(1.5)
    assert report.compute_imbalance == pytest.approx(2 / 1.5)
    assert report.samples_per_s == 2.0
    assert report.overlap_efficiency == pytest.approx(0.75), "hidden and transfer; straggler wait does not count"
    assert report.shares["compute"] == pytest.approx(0.75) and report.shares["forward"] == pytest.approx(0.35)
    assert report.shares["straggler_wait"] == pytest.approx(0.75 / 4)
    assert report.rank_shares(1)["compute"] == 1.0 and report.rank_shares(0)["transfer"] == pytest.approx(0.125)
    assert list(report.shares) == ["data_wait", "compute", *PART_NAMES[2:]]


def test_imbalance_weighs_steps_by_their_compute() -> None:
    """A step of 10 against 0 and one of 1 against 1: 11 seconds for what takes 6 when shared."""
    parts = np.array([[step(10.0, forward=10.0), step(10.0)], [step(1.0, forward=1.0), step(1.0, forward=1.0)]])
    assert report_of(parts).compute_imbalance == pytest.approx(11 / 6)


def test_predicted_imbalance_weighs_steps_as_the_measured_one() -> None:
    """Half of a step of 10 predicted for each rank, and a step of 1 in the ratio 3 to 1, in whatever unit."""
    parts = np.array([[step(10.0, forward=10.0), step(10.0)], [step(1.0, forward=1.0), step(1.0, forward=1.0)]])
    report = report_of(parts, predicted=np.array([[1.0, 1.0], [300.0, 100.0]]))
    assert report.predicted_imbalance == pytest.approx((5 * 1.0 + 1 * 1.5) / 6)
    assert report.document()["summary"]["predicted_imbalance"] == pytest.approx(report.predicted_imbalance)
    assert report_of(parts).predicted_imbalance is None and report_of(parts).document()["series"]["features"] is None


@pytest.mark.parametrize("unit", [1e-9, 0.1, 1.0, 1e18])
def test_features_are_told_in_any_unit(unit: float) -> None:
    features = np.array([[[4.0, 37.0, 410.0, 0.0], [4.0, 12.0, 50.0, 0.0]]] * 3) * [1.0, unit, unit**2, 1.0]
    told = _two_ranks(features=features).document()["series"]["features"]
    np.testing.assert_allclose(told, features, rtol=1e-6)


@pytest.mark.parametrize(
    ("predicted", "split", "told"),
    [
        (4 / 3, (0.5, 0.0, 0.0), None),
        (1.0, (0.5, 0.0, 0.0), "part by 0.333, of which 0.333 because samples do not take what the costs say"),
        (1.0, (0.0, 0.4, 0.1), "predicted and measured imbalance part by 0.333: slow ranks 0.267, jitter 0.067"),
        (1.5, (0.5, 0.0, 0.0), "part by -0.167, of which -0.167 because"),
    ],
)
def test_it_says_when_predicted_and_measured_imbalance_part(predicted: float, split: Any, told: str | None) -> None:
    """Two ranks of 1 and 2 seconds: measured 4 / 3."""
    loads = np.tile([predicted, 2 - predicted], (3, 1))
    report = _two_ranks(predicted=loads, imbalance=Imbalance("cost model", *split, (1.0, 1.0), {}, 0.01))
    text = " ".join(str(report).split())
    assert f"measured compute imbalance 1.333, predicted by the costs {predicted:.3f} (max / mean over ranks)" in text
    assert (told in text) if told else ("imbalance part by" not in text)


PLAN = PlannedBalance(1.4, 1.1, 1.05, 1.1 / 1.05 - 1, 1.3, 1.02, 0.973, 0, 3)


@pytest.mark.parametrize(("fitted", "costs"), [(0, "the costs as given"), (3, "costs fitted to measured times")])
def test_a_plan_has_a_row_of_compute_and_one_of_tokens_and_says_by_which_costs(fitted: int, costs: str) -> None:
    lines = str(_two_ranks(balance=replace(PLAN, fitted_steps=fitted))).splitlines()
    first = lines.index("imbalance (max / mean over ranks):")
    assert lines[first + 1 : first + 5] == [
        "         as drawn  balanced  lower bound  gap    measured",
        "compute  1.400     1.100     1.050        4.76%  1.333",
        "tokens   1.300     1.020     -            -      -      fullest rank of any step: 97.3% of its limit",
        f"  all but measured is predicted by {costs}",
    ]


def test_costs_that_changed_in_the_run_are_told_as_both() -> None:
    plan = replace(PLAN, fitted_steps=2)
    assert plan.costs == "the costs as given in 1 step, fitted to measured times in 2"
    text = str(_two_ranks(balance=plan, predicted=np.ones((3, 2))))
    assert f"predicted by {plan.costs}\n" in text and text.count("predicted by") == 1, "one figure of each"


def test_samples_that_stayed_as_drawn_have_no_figure_of_balance() -> None:
    plan = replace(PLAN, balanced=None, gap=None, tokens_balanced=None, tokens_fullest=None)
    text = str(_two_ranks(balance=plan))
    assert "compute  1.400     -         1.050        -      1.333\n" in text
    assert "tokens   1.300     -         -            -      -\n" in text
    bare = _two_ranks(balance=replace(plan, tokens_unbalanced=None))
    assert "\ntokens" not in str(bare) and bare.document()["balance"]["tokens"] is None
    assert _two_ranks().document()["balance"] is None and "lower bound" not in str(_two_ranks())


def test_unknown_is_none() -> None:
    report = report_of(np.array([[step(2.0)]]))
    assert report.samples_per_s is None and report.limit is None and report.overlap_efficiency is None
    assert report.bubble == 1.0 and report.compute_imbalance == 1.0
    assert "no compute was seen" in str(report)


def test_no_wall_time_is_no_division_by_zero() -> None:
    scalars = window_scalars(np.zeros((2, 2, len(PART_NAMES))), np.ones((2, 2), dtype=np.int64))
    assert scalars["freescale/bubble/forward"] == 0.0 and "freescale/bubble/samples_per_s" not in scalars


@pytest.mark.parametrize("own", ["forward", "data_wait", "host_overhead"])
@pytest.mark.parametrize("waits", ["straggler_wait", "transfer", "wait"])
def test_the_slowest_rank_waits_least_for_others(own: str, waits: str) -> None:
    breakdown = np.zeros((3, 4, len(PART_NAMES)))
    breakdown[..., PART_NAMES.index("wall")] = 1.0
    breakdown[..., PART_NAMES.index(own)], breakdown[..., PART_NAMES.index(waits)] = 0.2, 0.8
    breakdown[:, 2, PART_NAMES.index(own)], breakdown[:, 2, PART_NAMES.index(waits)] = 0.9, 0.1
    none = np.zeros((3, 4), dtype=np.int64)
    assert window_scalars(breakdown, none)["freescale/bubble/slowest_rank"] == 2
    assert "freescale/bubble/slowest_rank" not in window_scalars(breakdown[:, :1], none[:, :1]), "a rank alone is not slow"


def test_scalars() -> None:
    report = _two_ranks()
    scalars = window_scalars(report.breakdown, report.samples)
    names = {"fraction", *report.shares, "compute_imbalance", "step_s", "samples_per_s", "slowest_rank"}
    assert set(scalars) == {f"freescale/bubble/{name}" for name in names}
    assert scalars["freescale/bubble/fraction"] == report.bubble and scalars["freescale/bubble/samples_per_s"] == 2.0
    assert all(type(value) is float for value in scalars.values()), "loggers write these to JSON"


@pytest.mark.parametrize(
    ("parts", "samples", "steps"),
    [
        ((3, 2, 11), (3, 2), [1, 2]),
        ((3, 2, 10), (3, 2), [1, 2, 3]),
        ((3, 2, 11), (3, 1), [1, 2, 3]),
        ((3, 11), (3, 2), [1, 2, 3]),
        ((0, 2, 11), (0, 2), []),
        ((3, 0, 11), (3, 0), [1, 2, 3]),
    ],
)
def test_shapes_must_fit(parts: tuple[int, ...], samples: tuple[int, ...], steps: list[int]) -> None:
    with pytest.raises(ValueError, match=r"pass \[steps, ranks, 11\] and \[steps, ranks\]"):
        BubbleReport(
            np.ones(parts), np.ones(samples, dtype=np.int64), steps, RUN, WaitAttribution("one rank", 0.0), Overhead(0.0, 0.0)
        )


# -- the text


def _below_the_verdict(report: BubbleReport) -> list[str]:
    lines = str(report).splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith("Where the time went")) :]


def test_text_of_few_ranks() -> None:
    lines = _below_the_verdict(_two_ranks(last=(3, 9), status=Status(warmup=5)))
    assert lines[0] == "Where the time went: freescale (HSTU), 2 ranks on cpu, 3 steps after 5 of warm-up"
    assert lines[1].split("  ")[-1] == "last"
    assert " ".join(lines[2].split()) == "rank 0 2000.0 0.0% 50.0% 37.5% 12.5% 0.0% 0.0% 37.5% 25.0%"
    assert lines[3].split()[:6] == ["rank", "1", "2000.0", "0.0%", "100.0%", "0.0%"]
    assert " ".join(lines[4].split()) == "all 2000.0 0.0% 75.0% 18.8% 6.2% 0.0% 0.0% 18.8% 100.0%"
    assert lines[5].startswith("hidden: part of compute")
    assert lines[6] == ("bubble b = 25.0%: removing it all would be at most 1.33x faster (1500 ms/step, 2.0 samples/s now)")
    assert "forward 35.0%, backward 31.2%, optimizer 8.8%" in lines[7] and "1.333" in lines[7]
    assert len({len(line) for line in lines[1:5]}) == 1, "columns are aligned"


def test_text_of_many_ranks_shows_the_extremes() -> None:
    compute = np.linspace(1.0, 2.0, 12)
    compute[[4, 7]] = 3.0, 0.5
    wall = [8.0 if k in (4, 9) else 4.0 for k in range(12)]  # these have the most seconds, but not the largest share
    rows = [step(w, forward=c, data_wait=0.5 if k == 9 else 0.25 + k / 1e3) for k, (w, c) in enumerate(zip(wall, compute))]
    lines = _below_the_verdict(report_of(np.array([rows])))
    assert [line.rpartition(": ")[2].split()[0] for line in lines[2:5]] == ["4", "7", "9"]
    assert [line.split(":")[0] for line in lines[2:5]] == ["most compute", "least compute", "most data wait"]
    assert lines[5].startswith("all ") and lines[7].startswith("bubble b")


def test_text_explains() -> None:
    text = str(full_report())
    for part in (
        "of 12 ms that ranks differ per step, 11.2 come from the data, 0.6 from hardware, 0.2 from neither",
        "(by the cost model, 3.0% off)",
        "rank 1 takes 1.31x what its samples explain: a slow or shared device?",
        "what if: perfect balance 1.25x, full overlap 1.10x (exchanges of 2 steps are unknown)",
        "straggler wait and transfer were told apart by the ranks' arrivals on one clock, uncertain by 0.05 ms",
        "profiler overhead 0.12 ms/step, 0.12% of a step (0.08 for exchanges, on a thread aside; 0.04 for stamps)",
        "compute hid 66.7% of the time of the exchanges",
    ):
        assert part in " ".join(text.split()), part


def test_text_of_waits_that_are_not_divided() -> None:
    """They are a part of their own, which is not there where all waits are divided."""
    parts = np.array([[step(2.0, forward=1.0, wait=0.5, hidden=0.5)] * 2])
    report = report_of(parts, wait_attribution=WaitAttribution(False, 3e-3, "the ranks' clocks agreed only within 3.00 ms"))
    lines = _below_the_verdict(report)
    assert "wait for peers" in lines[1] and lines[2].split()[5:8] == ["0.0%", "0.0%", "25.0%"]
    assert len({len(line) for line in lines[1:5]}) == 1, "columns are aligned"
    told = "wait for peers is not divided into straggler wait and transfer: the ranks' clocks agreed only within 3.00 ms"
    assert told in " ".join(lines) and "told apart" not in " ".join(lines)
    assert report.overlap_efficiency is None, "how much of the wait is transfer is not known"
    assert "wait for peers" not in str(full_report())


def test_text_of_a_what_if_that_was_left_out() -> None:
    left_out = WhatIf("full overlap", None, None, "the clocks were not aligned")
    text = str(full_report(what_if=(left_out, WhatIf("no data wait", 1.2, 1.5))))
    assert "what if: full overlap left out (the clocks were not aligned), no data wait 1.20x; of compute alone" in text
    assert "it would be 1.50x, which these need not add up to" in " ".join(text.split())


def test_text_without_a_cost_model_blames_nobody() -> None:
    imbalance = Imbalance("ranks", 0.0, 0.010, 0.002, (1.0, 1.31), {1: 1.31}, 0.01)
    text = str(report_of(np.array([[step(2.0, forward=1.0)] * 2]), imbalance=imbalance))
    assert "of 12 ms that ranks differ per step, 10 last from step to step, 2 do not" in text
    assert "samples explain" not in text
    assert "rank 1 takes 1.31x as long as the median rank" in text


def test_text_says_nothing_of_what_is_not_known() -> None:
    text = str(report_of(np.array([[step(2.0, forward=1.0)]]), wait_attribution=WaitAttribution(True, 0.0)))
    for word in ("what if", "differ", "told apart", "explain:", "samples/s", "hid ", "INCOMPLETE", "left out"):
        assert word not in text
    assert "1 rank on cpu, 1 step\n" in text


def test_text_is_never_wider_than_a_terminal() -> None:
    rows = [step(12.0, forward=9.0, data_wait=1.0)] * 1024
    run = {**vars(RUN), "world_size": 1024, "label": "a label " * 40, "model": "M" * 300}
    report = full_report(parts=np.array([rows]), run=RunInfo(**run), status=Status(False, "a\nlong reason " * 30, 5, 37))
    assert max(map(len, str(report).splitlines())) <= 120


def test_what_is_incomplete_says_so_first() -> None:
    report = full_report(status=Status(False, "KeyboardInterrupt", 5, 37))
    assert str(report).splitlines()[0] == "INCOMPLETE: KeyboardInterrupt; its last 37 steps are not in here"
    assert str(full_report(status=Status(False))).splitlines()[0] == "INCOMPLETE: the run did not come to its end"
    alone = report_of(np.array([[step(2.0, forward=1.0)]]), run=RunInfo(**{**vars(RUN), "world_size": 8}))
    assert "8 ranks on cpu (only 1 of them in here)" in str(alone)


def test_overhead_is_the_sum() -> None:
    assert Overhead(0.5, 0.25).total == 0.75


def test_exchange_figures_reach_the_document() -> None:
    (written,) = full_report(exchanges=[ExchangeFigures("ids", 2.0, 0.1, 0.2, 0.3, None, (4, 5), 0.4)]).document()["exchanges"]
    assert written == {
        "name": "ids",
        "per_step": 2.0,
        "straggler_wait_s": 0.1,
        "transfer_s": 0.2,
        "wait_s": 0.4,
        "hidden_s": 0.3,
        "moved_bytes": None,
        "last": [4, 5],
    }


def test_text_of_memory_names_who_holds_most_and_whose_grows() -> None:
    lines = str(full_report()).splitlines()
    # 600 MB and 11 times 6, and 100 more at the peak, beside 300 and 100
    assert "memory: peak 731 MiB on rank 1, 1.31x the mean; now 635 MiB at most, on rank 1" in lines
    assert "MEMORY GROWS every 50 steps: rank 1 by 5.7 MiB" in lines
    assert not any("memory" in line.lower() for line in str(full_report(memory=None)).splitlines())
    still = str(full_report(memory=growing_memory(2, windows=3)))
    assert "memory: peak" in still and "GROWS" not in still, "three windows are too few to say"
