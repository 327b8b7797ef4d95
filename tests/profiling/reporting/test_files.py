"""The files of a profile and their updates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_freescale.profiling import profiler as module
from lightning_freescale.profiling.profiler import ReportFiles
from lightning_freescale.profiling.recording.records import Interval, ResolvedStep
from lightning_freescale.profiling.reporting.document import WaitAttribution, read
from lightning_freescale.profiling.reporting.report import BubbleReport
from tests.helpers.reports import report_of, step
from tests.helpers.shown_page import packed

REPORT = report_of(np.array([[step(0.1, forward=0.07)] * 2] * 3))
TRACED = [[ResolvedStep(0, 1, 3, 4, (Interval("forward", "forward", 0, 0.5),))] * 2]


def test_all_three(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path / "new" / "bubbles")
    assert (files, files.folder) == ({}, tmp_path / "new" / "bubbles")
    files.write(lambda: REPORT, TRACED)
    names = {"report": "report.json", "page": "report.html", "trace": "trace.json"}
    assert files == {name: files.folder / file for name, file in names.items()}
    assert read(files["report"]) == read(REPORT.write(tmp_path / "same.json"))
    assert packed(files["page"])[0][0]["run"]["model"] == "HSTU"
    assert "step 3" in {event["name"] for event in json.loads(files["trace"].read_text())["traceEvents"]}


def test_no_trace_without_steps(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path)
    files.write(lambda: REPORT, [])
    assert sorted(files) == ["page", "report"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]
    files.refresh(lambda: report_of(np.array([[step(0.1)]])))
    assert len(read(files["report"])["ranks"]) == 2, "the last report is not overwritten by one on the way"


@pytest.mark.parametrize("aligned", [True, False])
def test_the_trace_has_the_kineto_events_and_divides_waits_as_the_report_does(
    tmp_path: Path, monkeypatch: Any, aligned: bool
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(module, "write_trace", lambda *arguments, **named: given.append((arguments, named)) or arguments[0])
    waits = WaitAttribution(aligned, 0.0, None if aligned else "the clocks drift")
    ReportFiles(tmp_path).write(lambda: replace(REPORT, wait_attribution=waits), TRACED, ["events"])
    assert given == [((tmp_path / "trace.json", TRACED, ["events"]), {"aligned": aligned})]


def test_the_report_alone_is_refreshed_as_often_as_costs_next_to_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    now, written = [500.0], []
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def report() -> BubbleReport:
        written.append(now[0])
        now[0] += 0.25  # what it takes
        return REPORT

    files = ReportFiles(tmp_path)
    for _ in range(400):
        files.refresh(report)
        now[0] += 1.0
    assert written[0] == 500.0
    assert [after - before for before, after in zip(written, written[1:])] == [0.25 + 125] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert files == {"report": tmp_path / "report.json"}


def test_files_that_cannot_be_written_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    files = ReportFiles(tmp_path / "taken")
    assert str(tmp_path / "taken") in files.problem()
    with pytest.warns(UserWarning, match="taken"):
        files.refresh(lambda: REPORT)
    with pytest.warns(UserWarning, match="taken"):
        files.write(lambda: REPORT, TRACED)
    assert files == {}


def test_the_folder_is_made_and_loses_windows_of_an_earlier_run_with_more_ranks(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path / "new" / "one")
    assert files.problem() is None and list(files.folder.iterdir()) == []
    for rank in range(3):
        files.kineto_file(rank).parent.mkdir(exist_ok=True)
        files.kineto_file(rank).touch()
    (files.folder / "torch_profiler" / "mine.json").touch()
    assert files.problem() is None
    assert [path.name for path in (files.folder / "torch_profiler").iterdir()] == ["mine.json"]
