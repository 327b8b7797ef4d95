"""The report's figures and its text, on parts whose truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.reporting.report import (
    BubbleReport,
    ExchangeFigures,
    Overhead,
    RunInfo,
    Status,
    WaitAttribution,
    window_scalars,
)
from tests.helpers.reports import ABOUT, full_report, report_of, step


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
    assert report.step_seconds == 2.0 and report.compute_seconds == pytest.approx(1.5)
    assert report.compute_imbalance == pytest.approx(2 / 1.5)
    assert report.samples_per_second == 2.0
    assert report.overlap_efficiency == pytest.approx(0.75), "hidden and transfer; straggler wait does not count"
    assert report.shares["compute"] == pytest.approx(0.75) and report.shares["forward"] == pytest.approx(0.35)
    assert report.shares["straggler_wait"] == pytest.approx(0.75 / 4)
    assert report.rank_shares(1)["compute"] == 1.0 and report.rank_shares(0)["transfer"] == pytest.approx(0.125)
    assert list(report.shares) == ["data_wait", "compute", *PART_NAMES[2:]]


def test_imbalance_weighs_steps_by_their_compute() -> None:
    """A step of 10 against 0 and one of 1 against 1: 11 seconds for what takes 6 when shared."""
    parts = np.array([[step(10.0, forward=10.0), step(10.0)], [step(1.0, forward=1.0), step(1.0, forward=1.0)]])
    assert report_of(parts).compute_imbalance == pytest.approx(11 / 6)


def test_unknown_is_none() -> None:
    report = report_of(np.array([[step(2.0)]]))
    assert report.samples_per_second is None and report.limit is None and report.overlap_efficiency is None
    assert report.bubble == 1.0 and report.compute_imbalance == 1.0
    assert "no compute was seen" in str(report)


def test_no_wall_time_is_no_division_by_zero() -> None:
    scalars = window_scalars(np.zeros((2, 2, len(PART_NAMES))), np.ones((2, 2), dtype=np.int64))
    assert scalars["freescale/forward"] == 0.0 and "freescale/samples_per_second" not in scalars


def test_scalars() -> None:
    report = _two_ranks()
    scalars = report.scalars()
    assert scalars == window_scalars(report.parts, report.samples)
    names = {"bubble", *report.shares, "compute_imbalance", "step_seconds", "samples_per_second"}
    assert set(scalars) == {f"freescale/{name}" for name in names}
    assert scalars["freescale/bubble"] == report.bubble and scalars["freescale/samples_per_second"] == 2.0
    assert all(type(value) is float for value in scalars.values()), "loggers write these to JSON"


@pytest.mark.parametrize(
    ("parts", "samples", "steps"),
    [
        ((3, 2, 10), (3, 2), [1, 2]),
        ((3, 2, 9), (3, 2), [1, 2, 3]),
        ((3, 2, 10), (3, 1), [1, 2, 3]),
        ((3, 10), (3, 2), [1, 2, 3]),
        ((0, 2, 10), (0, 2), []),
        ((3, 0, 10), (3, 0), [1, 2, 3]),
    ],
)
def test_shapes_must_fit(parts: tuple[int, ...], samples: tuple[int, ...], steps: list[int]) -> None:
    with pytest.raises(ValueError, match=r"pass \[steps, ranks, 10\] and \[steps, ranks\]"):
        BubbleReport(
            np.ones(parts), np.ones(samples, dtype=np.int64), steps, ABOUT, WaitAttribution("one rank", 0.0), Overhead(0.0, 0.0)
        )


# -- the text


def test_text_of_few_ranks() -> None:
    lines = str(_two_ranks(last=(3, 9), status=Status(warmup=5))).splitlines()
    assert lines[0] == "Where the time went: freescale (HSTU), 2 ranks on cpu, 3 steps, first 5 left out"
    assert lines[1].split("  ")[-1] == "last"
    assert " ".join(lines[2].split()) == "rank 0 2000.0 0.0% 50.0% 37.5% 12.5% 0.0% 0.0% 37.5% 25.0%"
    assert lines[3].split()[:6] == ["rank", "1", "2000.0", "0.0%", "100.0%", "0.0%"]
    assert " ".join(lines[4].split()) == "all 2000.0 0.0% 75.0% 18.8% 6.2% 0.0% 0.0% 18.8% 100.0%"
    assert lines[5] == ("bubble b = 25.0%: removing it all would be at most 1.33x faster (1500 ms/step, 2.0 samples/s now)")
    assert "forward 35.0%, backward 31.2%, optimizer 8.8%" in lines[6] and "1.333" in lines[6]
    assert len({len(line) for line in lines[1:5]}) == 1, "columns are aligned"


def test_text_of_many_ranks_shows_the_extremes() -> None:
    compute = np.linspace(1.0, 2.0, 12)
    compute[[4, 7]] = 3.0, 0.5
    wall = [8.0 if k in (4, 9) else 4.0 for k in range(12)]  # these have the most seconds, but not the largest share
    rows = [step(w, forward=c, data_wait=0.5 if k == 9 else 0.25 + k / 1e3) for k, (w, c) in enumerate(zip(wall, compute))]
    lines = str(report_of(np.array([rows]))).splitlines()
    assert [line.rpartition(": ")[2].split()[0] for line in lines[2:5]] == ["4", "7", "9"]
    assert [line.split(":")[0] for line in lines[2:5]] == ["most compute", "least compute", "most data wait"]
    assert lines[5].startswith("all ") and lines[6].startswith("bubble b")


def test_text_explains() -> None:
    text = str(full_report())
    for part in (
        "of 12 ms that ranks differ per step, 11.2 come from the data, 0.6 from hardware, 0.2 from neither",
        "(by the cost model, 3.0% off)",
        "rank 1 takes 1.31x what its samples explain: a slow or shared device?",
        "what if: perfect balance 1.25x, full overlap 1.10x (exchanges of 2 steps are unknown)",
        "told apart by bandwidth (the clocks drift), uncertain by 0.05 ms; 0.3 ms/step could not be split",
        "profiler overhead 0.12 ms/step, 0.12% of a step (0.08 for exchanges, on a thread aside; 0.04 for stamps)",
        "compute hid 66.7% of the time of the exchanges",
    ):
        assert part in " ".join(text.split()), part


def test_text_without_a_cost_model_blames_nobody() -> None:
    imbalance = Imbalance("ranks", 0.0, 0.010, 0.002, (1.0, 1.31), {1: 1.31}, 0.01)
    text = str(report_of(np.array([[step(2.0, forward=1.0)] * 2]), imbalance=imbalance))
    assert "of 12 ms that ranks differ per step, 10 last from step to step, 2 do not" in text
    assert "samples explain" not in text
    assert "rank 1 takes 1.31x as long as the median rank" in text


def test_text_says_nothing_of_what_is_not_known() -> None:
    text = str(report_of(np.array([[step(2.0, forward=1.0)]]), waiting=WaitAttribution("one rank", 0.0)))
    for word in ("what if", "differ", "told apart", "explain:", "samples/s", "hid ", "INCOMPLETE", "left out"):
        assert word not in text
    assert "1 rank on cpu, 1 step\n" in text


def test_text_is_never_wider_than_a_terminal() -> None:
    rows = [step(12.0, forward=9.0, data_wait=1.0)] * 1024
    about = {**vars(ABOUT), "world_size": 1024, "label": "a label " * 40, "model": "M" * 300}
    report = full_report(parts=np.array([rows]), about=RunInfo(**about), status=Status(False, "a\nlong reason " * 30, 5, 37))
    assert max(map(len, str(report).splitlines())) <= 120


def test_what_is_incomplete_says_so_first() -> None:
    report = full_report(status=Status(False, "KeyboardInterrupt", 5, 37))
    assert str(report).splitlines()[0] == "INCOMPLETE: KeyboardInterrupt; its last 37 steps are not in here"
    assert str(full_report(status=Status(False))).splitlines()[0] == "INCOMPLETE: the run did not come to its end"
    alone = report_of(np.array([[step(2.0, forward=1.0)]]), about=RunInfo(**{**vars(ABOUT), "world_size": 8}))
    assert "8 ranks on cpu (only 1 of them in here)" in str(alone)


def test_overhead_is_the_sum() -> None:
    assert Overhead(0.5, 0.25).total == 0.75


def test_exchange_figures_reach_the_document() -> None:
    (written,) = full_report(exchanges=[ExchangeFigures("ids", 2.0, 0.1, 0.2, 0.3, None, (4, 5))]).document()["exchanges"]
    assert written == {
        "name": "ids",
        "per_step": 2.0,
        "straggler_wait_seconds": 0.1,
        "transfer_seconds": 0.2,
        "hidden_seconds": 0.3,
        "moved_bytes": None,
        "last": [4, 5],
    }
