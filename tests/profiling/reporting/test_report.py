"""The report's figures, its text and its line beside a progress bar, on parts whose truth is known."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import lightning_freescale
from lightning_freescale.callbacks.bubble_profiler import _live_text
from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.collection.history import window_scalars
from lightning_freescale.profiling.reporting.document import ExchangeFigures, Overhead, RunInfo, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport
from tests.helpers.reports import HEAT, full_report, growing_memory, plan, report_of, run_info, step


def _two_ranks(**changes: Any) -> BubbleReport:
    """Rank 0 waits for rank 1; of 4 seconds, 3 are compute."""
    first = step(2.0, forward=0.4, backward=0.5, optimizer=0.1, straggler_wait=0.75, transfer=0.25, hidden=0.75)
    second = step(2.0, forward=1.0, backward=0.75, optimizer=0.25)
    return report_of(np.array([[first, second]] * 3), np.array([[1, 3]] * 3), **changes)


def test_imbalance_weighs_steps_by_their_compute() -> None:
    """Use a step of 10 against 0 and one of 1 against 1: 11 seconds for what takes 6 when shared.

    Half of the first step is predicted for each rank, and the second one in the ratio 3 to 1, in different units.
    """
    parts = np.array([[step(10.0, forward=10.0), step(10.0)], [step(1.0, forward=1.0), step(1.0, forward=1.0)]])
    report = report_of(parts, predicted=np.array([[1.0, 1.0], [300.0, 100.0]]))
    assert report.compute_imbalance == pytest.approx(11 / 6)
    assert report.predicted_imbalance == pytest.approx((5 * 1.0 + 1 * 1.5) / 6)
    assert report.document()["summary"]["predicted_imbalance"] == pytest.approx(report.predicted_imbalance)
    assert report_of(parts, predicted=np.zeros((2, 2))).predicted_imbalance == 1.0
    assert report_of(parts).predicted_imbalance is None and report_of(parts).document()["series"]["features"] is None


@pytest.mark.parametrize("unit", [1e-9, 0.1, 1.0, 1e18])
def test_features_are_told_in_any_unit(unit: float) -> None:
    features = np.array([[[4.0, 37.0, 410.0, 0.0], [4.0, 12.0, 50.0, 0.0]]] * 3) * [1.0, unit, unit**2, 1.0]
    shown_text = _two_ranks(features=features).document()["series"]["features"]
    np.testing.assert_allclose(shown_text, features, rtol=1e-6)


def test_unknown_is_none() -> None:
    report = report_of(np.array([[step(2.0)]]))
    assert report.samples_per_s is None and report.limit is None and report.overlap_efficiency is None
    assert report.bubble == 1.0 and report.compute_imbalance == 1.0
    scalars = window_scalars(np.zeros((2, 2, len(PART_NAMES))), np.ones((2, 2), dtype=np.int64))
    assert scalars["freescale/bubble/forward"] == 0.0 and "freescale/bubble/samples_per_s" not in scalars


@pytest.mark.parametrize(
    ("own", "waits"), [("forward", "straggler_wait"), ("data_wait", "transfer"), ("host_overhead", "wait")]
)
def test_the_slowest_rank_waits_least_for_others(own: str, waits: str) -> None:
    rows = [step(1.0, **{own: 0.2, waits: 0.8}), step(1.0, **{own: 0.9, waits: 0.1}), step(1.0, **{own: 0.2, waits: 0.8})]
    breakdown, none = np.array([rows] * 3), np.zeros((3, 3), dtype=np.int64)
    assert window_scalars(breakdown, none)["freescale/bubble/slowest_rank"] == 1
    assert "freescale/bubble/slowest_rank" not in window_scalars(breakdown[:, :1], none[:, :1]), "a rank alone is not slow"


def test_scalars() -> None:
    report = _two_ranks()
    scalars = window_scalars(report.breakdown, report.samples)
    names = {"fraction", *report.shares, "compute_imbalance", "step_s", "samples_per_s", "slowest_rank"}
    assert set(scalars) == {f"freescale/bubble/{name}" for name in names}
    assert scalars["freescale/bubble/fraction"] == report.bubble and scalars["freescale/bubble/samples_per_s"] == 2.0
    assert all(type(value) is float for value in scalars.values()), "loggers write these to JSON"
    assert Overhead(0.5, 0.25).total == 0.75
    assert report.overlap_efficiency == pytest.approx(0.75), "hidden and transfer; straggler wait does not count"
    assert list(report.shares) == ["data_wait", "compute", *PART_NAMES[2:]]
    assert RunInfo("a", "Model", 1, 1).versions["lightning_freescale"] == lightning_freescale.__version__


def _lines(report: BubbleReport, start: str = "") -> list[str]:
    """Lines of the text from the first that begins so, those that were wrapped in one piece."""
    lines = re.sub(r"\n  (?=\S)", " ", str(report)).splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith(start)) :]


def _line(report: BubbleReport, *words: str) -> str:
    """Return the only line with these words."""
    (found,) = (line for line in _lines(report) if all(word in line for word in words))
    return found


def _figures(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])-?\d[\d.]*(?:%|x\b)?", text)


def test_text_of_few_ranks() -> None:
    rows = ExchangeFigures("rows", 4.0, 0.0, 0.0, 0.0, None, (3, 9))
    lines = _lines(_two_ranks(exchanges=[rows], status=Status(warmup=5)), "Where the time went")
    assert "freescale (HSTU)" in lines[0] and _figures(lines[0]) == ["2", "3", "5"]
    assert lines[1].split("  ")[-1] == "last" and "wait for peers" not in lines[1]
    assert " ".join(lines[2].split()) == "rank 0 2000.0 0.0% 50.0% 37.5% 12.5% 0.0% 0.0% 37.5% 25.0%"
    assert lines[3].split()[:6] == ["rank", "1", "2000.0", "0.0%", "100.0%", "0.0%"]
    assert " ".join(lines[4].split()) == "all 2000.0 0.0% 75.0% 18.8% 6.2% 0.0% 0.0% 18.8% 100.0%"
    assert _figures(lines[6]) == ["25.0%", "1.33x", "1500", "2.0"] and "bubble b" in lines[6]
    assert _figures(lines[7]) == ["35.0%", "31.2%", "8.8%", "1.333"]
    assert len({len(line) for line in lines[1:5]}) == 1, "columns are aligned"


def test_text_of_many_ranks_shows_the_extremes() -> None:
    compute = np.linspace(1.0, 2.0, 12)
    compute[[4, 7]] = 3.0, 0.5
    wall = [8.0 if k in (4, 9) else 4.0 for k in range(12)]  # these have the most seconds, but not the largest share
    rows = [step(w, forward=c, data_wait=0.5 if k == 9 else 0.25 + k / 1e3) for k, (w, c) in enumerate(zip(wall, compute))]
    lines = _lines(report_of(np.array([rows])), "Where the time went")
    named = [line.partition(": ") for line in lines[2:5]]
    assert [(name, rest.split()[0]) for name, _, rest in named] == [
        ("most compute", "4"),
        ("least compute", "7"),
        ("most data wait", "9"),
    ]
    assert lines[5].startswith("all ") and lines[7].startswith("bubble b")
    eight = _lines(report_of(np.array([[step(1.0, forward=0.5)] * 8])), "Where the time went")
    assert [line.split()[1] for line in eight[2:10]] == [str(rank) for rank in range(8)]


def test_text_explains() -> None:
    report = full_report()
    assert _figures(_line(report, "ranks differ")) == ["12", "11.2", "0.6", "0.2", "3.0%"]
    assert _figures(_lines(report, "rank 1 takes")[0]) == ["1", "1.31x"]
    assert _figures(_line(report, "what if")) == ["1.25x", "1.10x", "2", "1.43x"]
    assert "exchanges of 2 steps are unknown" in _line(report, "what if")
    assert _figures(_line(report, "one clock")) == ["0.05"]
    assert _figures(_line(report, "overhead", "stamps")) == ["0.12", "0.12%", "0.08", "0.04"]
    assert _figures(_line(report, "compute hid")) == ["66.7%"]
    cases = (
        WhatIf("full overlap", None, None, "no clocks"),
        WhatIf("no data wait", 1.2, 1.5),
    )
    line = _line(full_report(what_if=cases), "what if")
    assert "full overlap left out (no clocks)" in line and _figures(line) == ["1.20x", "1.50x"]
    left_out = _line(full_report(what_if=cases[:1]), "what if")
    assert _figures(left_out) == [] and "left out" in left_out


def test_text_without_a_cost_model_blames_no_samples() -> None:
    imbalance = Imbalance("ranks", 0.0, 0.010, 0.002, (1.0, 1.31), {1: 1.31}, 0.01)
    report = report_of(np.array([[step(2.0, forward=1.0)] * 2]), imbalance=imbalance)
    assert _figures(_line(report, "ranks differ")) == ["12", "10", "2"]
    assert _figures(_line(report, "rank 1", "1.31x")) == ["1", "1.31x"] and "samples explain" not in str(report)


def test_the_predicted_imbalance_is_beside_the_measured_one() -> None:
    """Two ranks of 1 and 2 seconds: measured 4 / 3."""
    report = _two_ranks(predicted=np.tile([1.5, 0.5], (3, 1)))
    assert _figures(_line(report, "measured compute imbalance"))[3:] == ["1.333", "1.500"]


def test_a_plan_has_a_row_of_compute_and_one_of_tokens_and_says_by_which_costs() -> None:
    for fitted in (0, 2, 3):
        report = _two_ranks(balance=plan(fitted), predicted=np.ones((3, 2)))
        lines = _lines(report, "         as drawn")
        assert " ".join(lines[1].split()) == "compute 1.400 1.100 1.050 4.76% 1.333"
        assert lines[2].split()[:6] == ["tokens", "1.300", "1.020", "-", "-", "-"] and "97.3%" in lines[2]
        assert f"fitted to measured times in {fitted} of 3 steps" in lines[2]
        assert str(report).count("predicted by") == 1, "one figure of each"
    drawn = plan()
    drawn["compute"] |= {"balanced": None, "gap": None}
    drawn["tokens"] |= {"balanced": None, "fullest": None}
    lines = _lines(_two_ranks(balance=drawn), "         as drawn")
    assert lines[1].split() == ["compute", "1.400", "-", "1.050", "-", "1.333"] and "1.300 - - - -" in " ".join(
        lines[2].split()
    )
    untold = _two_ranks(balance={**drawn, "tokens": None})
    assert "\ntokens" not in str(untold) and untold.document()["balance"]["tokens"] is None
    assert _two_ranks().document()["balance"] is None and "lower bound" not in str(_two_ranks())


def test_text_of_waits_that_are_not_divided() -> None:
    """They are a part of their own, which is not there where all waits are divided."""
    parts = np.array([[step(2.0, forward=1.0, wait=0.5, hidden=0.5)] * 2])
    report = report_of(parts, wait_attribution=WaitAttribution(False, 3e-3, "the clocks agreed only within 3.00 ms"))
    lines = _lines(report, "Where the time went")
    assert "wait for peers" in lines[1] and lines[2].split()[5:8] == ["0.0%", "0.0%", "25.0%"]
    assert len({len(line) for line in lines[1:5]}) == 1, "columns are aligned"
    assert "the clocks agreed only within 3.00 ms" in _line(report, "wait for peers is") and "one clock" not in str(report)
    assert report.overlap_efficiency is None, "how much of the wait is transfer is not known"


def test_text_says_nothing_of_what_is_not_known() -> None:
    text = str(report_of(np.array([[step(2.0, forward=1.0)]]), wait_attribution=WaitAttribution(True, 0.0)))
    for word in (
        "what if",
        "differ",
        "one clock",
        "samples explain",
        "samples/s",
        "hid ",
        "INCOMPLETE",
        "left out",
        "memory",
        "hot",
    ):
        assert word not in text
    assert "1 rank on cpu, 1 step\n" in text
    assert _figures(_line(report_of(np.array([[step(2.0)]])), "bubble b")) == ["100.0%"]


def test_text_is_never_wider_than_a_terminal() -> None:
    rows = [step(12.0, forward=9.0, data_wait=1.0)] * 1024
    run = run_info(world_size=1024, label="a label " * 40, model="M" * 300)
    report = full_report(parts=np.array([rows]), run=run, status=Status(False, "a\nlong reason " * 30, 5, 37))
    assert max(map(len, str(report).splitlines())) <= 120


def test_what_is_incomplete_says_so_first() -> None:
    first = _lines(full_report(status=Status(False, "KeyboardInterrupt", 5, 37)))[0]
    assert first.startswith("INCOMPLETE: KeyboardInterrupt") and _figures(first) == ["37"]
    assert _lines(full_report(status=Status(False)))[0].startswith("INCOMPLETE")
    alone = report_of(np.array([[step(2.0, forward=1.0)]]), run=run_info(world_size=8))
    assert _figures(_line(alone, "Where the time went")) == ["8", "1", "1"]


def test_exchange_figures_reach_the_document() -> None:
    (written,) = full_report(exchanges=[ExchangeFigures("ids", 2.0, 0.1, 0.2, 0.3, None, (4, 5), 0.4)]).document()["exchanges"]
    seconds = {"straggler_wait_s": 0.1, "transfer_s": 0.2, "wait_s": 0.4, "hidden_s": 0.3}
    assert written == {"name": "ids", "per_step": 2.0, **seconds, "moved_bytes": None, "last": [4, 5]}


def test_text_of_memory_names_who_holds_most_and_whose_grows() -> None:
    report = full_report()
    # 600 MB and 11 times 6, and 100 more at the peak, beside 300 and 100
    assert _figures(_line(report, "memory: peak")) == ["731", "1", "1.31x", "635", "1"]
    assert _figures(_line(report, "MEMORY GROWS")) == ["50", "1", "5.7"]
    short = full_report(memory=growing_memory(2, windows=3))
    assert "GROWS" not in str(short) and "(3)" in _line(short, "memory: peak"), "three windows are too few to say"
    many = growing_memory(10)
    many.current[:] = many.current[:, -1:] * np.arange(1, 11)
    line = _line(full_report(parts=np.array([[step(0.1, forward=0.05)] * 10] * 3), memory=many), "MEMORY GROWS")
    assert [int(rank) for rank in re.findall(r"rank (\d+)", line)] == list(range(9, 1, -1)) and "2 more" in line


def test_text_of_hot_rows_compares_bytes_with_those_of_the_direct_route() -> None:
    line = _line(full_report(), "4,675 hot rows")
    figures = ["88%", "5", "6", "1.5", "353", "50%", "12,345", "90%", "1.04x"]
    assert re.findall(r"\d[\d.,]*[%x]?", line)[1:] == figures
    assert "colliding" not in _line(full_report(heat={**HEAT, "colliding_share": None}), "4,675 hot rows")


def test_the_largest_cause_beside_a_progress_bar() -> None:
    shares = {"data_wait": 0.05, "straggler_wait": 0.02, "transfer": 0.01, "wait": 0.0, "host_overhead": 0.03}
    shares |= {"unexplained": 0.0, "fraction": 0.314, "forward": 0.5, "hidden": 0.9}
    for cause, name in (("straggler_wait", "straggler wait"), ("wait", "wait for peers"), ("unexplained", "unexplained")):
        figures = {**shares, cause: 0.22, "slowest_rank": 3.0}
        shown_text = _live_text({f"freescale/bubble/{name}": value for name, value in figures.items()})
        assert shown_text == f"31.4% ({name} 22.0%, slowest rank 3)"
    assert _live_text({f"freescale/bubble/{name}": value for name, value in shares.items()}) == "31.4% (data wait 5.0%)"


def test_padding_is_a_part_of_compute() -> None:
    report, without = full_report(padded={"kind": "batch, planned", "tokens": 0.6}), full_report(padded=None)
    document = report.document()
    # compute is 70 % of the time
    assert document["summary"]["padding"] == {"kind": "batch, planned", "tokens": 0.6, "time": pytest.approx(0.42)}
    assert document["summary"]["shares"] == without.document()["summary"]["shares"], "the parts stay as they are"
    assert _figures(_line(report, "padding:")) == ["60.0%", "42.0%"]
    assert "padding included" in str(report)
    assert without.document()["summary"]["padding"] is None and "padding" not in str(without)
    assert report_of(np.array([[step(2.0, forward=1.0)]])).document()["summary"]["padding"] is None
