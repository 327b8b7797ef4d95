"""Steps of all ranks on rank 0: which are kept, and the report of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.analysis.imbalance import PlannedStep
from lightning_freescale.profiling.analysis.rank_window import ExchangeSums, RankWindow, window_of
from lightning_freescale.profiling.collection.history import History
from lightning_freescale.profiling.recording.records import (
    Interval,
    ResolvedCollective,
    ResolvedStep,
)
from lightning_freescale.profiling.reporting.document import Overhead, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport
from tests.helpers.profiled_runs import run_behind_workers
from tests.helpers.reports import RUN

FORWARD = ((1.0, 2.0), (2.0, 2.0))  # seconds in even and odd steps, of two ranks


def _computed(index: int, rank: int, features: Any = None) -> ResolvedStep:
    """Return a step that begins at ``10 * index``; the ranks meet for half a second when both have computed."""
    start, compute = 10.0 * index, FORWARD[index % 2]
    arrive, last = start + compute[rank], start + max(compute)
    spans = (Interval("forward", "forward", start, arrive),)
    meeting = ResolvedCollective("rows", f"rows:{index}", arrive, arrive, last + 0.5, last + 0.5, moved=100)
    return ResolvedStep(start, last + 1, index, 10 + rank, spans, (meeting,), (), features, 1.0)


def _windows(first: int, until: int, features: Any = ((1.0,), (1.0,)), **options: bool) -> list[RankWindow]:
    steps = range(first, until)
    last = [[10.0 * index + max(FORWARD[index % 2])] for index in steps]
    rows = [[_computed(index, rank, features[rank]) for index in steps] for rank in (0, 1)]
    return [window_of(rows[rank], last, **options) for rank in (0, 1)]


def _history(*windows: list[RankWindow], max_steps: int = 100, fit_costs: Any = None) -> History:
    history = History(RUN, max_steps, fit_costs)
    for each in windows:
        history.add_windows(each)
    return history


def _report(history: History, traced: Any = None, **options: Any) -> BubbleReport:
    return history.build_report(Status(), WaitAttribution(True, 1e-6), Overhead(1e-3, 1e-4), traced, **options)


def _gains(report: BubbleReport) -> dict[str, float | None]:
    return {case.name: case.speed_up for case in report.what_if}


def _traced(first: int, until: int) -> list[list[ResolvedStep]]:
    return [[_computed(index, 0), _computed(index, 1)] for index in range(first, until)]


def test_the_last_steps_of_every_rank_are_kept() -> None:
    history = _history(_windows(0, 4), _windows(4, 7), max_steps=5)
    report = _report(history, _traced(5, 7))
    assert list(report.steps) == [2, 3, 4, 5, 6] and history.added == 7
    assert report.samples.tolist() == [[10, 11]] * 5
    assert column(report.breakdown, "forward").tolist() == [[1, 2], [2, 2], [1, 2], [2, 2], [1, 2]]
    assert column(report.breakdown, "straggler_wait").tolist() == [[1, 0], [0, 0], [1, 0], [0, 0], [1, 0]]
    assert (report.run, report.status.complete, report.overhead.total) == (RUN, True, pytest.approx(1.1e-3))
    assert report.exchanges[0].per_step == 1, "figures are of all steps, per step"
    early = _windows(0, 4)
    early[0].exchanges["early"] = ExchangeSums(count=1)
    early[1].host = {"early": 1.0}
    assert "early" in _report(_history(early, _windows(4, 7), max_steps=4)).host, "a part of its steps is kept"
    report = _report(_history(early, _windows(4, 7), max_steps=3))
    assert [figures.name for figures in report.exchanges] == ["rows"] and "early" not in report.host


def test_plans_are_of_the_steps_in_the_report() -> None:
    history = _history(max_steps=2)
    plans = [PlannedStep(1.0 + step, 1.0, 1.0, padding=0.1 * step, padded="batch") for step in range(3)]
    history.add_windows(_windows(0, 2), plans[:2])
    history.add_windows(_windows(2, 3), plans[2:])
    report, (even, odd) = _report(history, []), map(sum, FORWARD)
    assert report.balance["compute"]["as_drawn"] == pytest.approx((2.0 * odd + 3.0 * even) / (even + odd))
    assert report.padded["tokens"] == pytest.approx((0.1 * odd + 0.2 * even) / (even + odd)) and "no padding" in _gains(report)
    history.add_windows(_windows(3, 4))
    assert _report(history).balance is _report(history).padded is None, "of the last step nothing is known"


def test_figures_are_means_over_steps_and_ranks() -> None:
    windows = _windows(0, 2), _windows(2, 4)
    for window in (windows[0][0], windows[1][1]):
        window.host = {"hooks": 2.0}
    windows[0][1].host, windows[1][0].host = {"loop": 4.0}, {}
    report = _report(_history(*windows))
    (rows,) = report.exchanges
    assert (rows.name, rows.per_step, rows.moved_bytes, rows.hidden_s, rows.last) == ("rows", 1, 100, 0, (2, 4))
    assert rows.straggler_wait_s == pytest.approx((1 + 0) / 2 / 2)  # rank 0 waits in even steps
    assert rows.transfer_s == pytest.approx(0.5)
    assert report.host == {"hooks": 4.0 / 2 / 4, "loop": 4.0 / 2 / 4}
    both = _windows(0, 4)  # ranks need not have the same exchanges
    both[1].exchanges["sometimes"] = ExchangeSums(count=2, hidden=4.0, moved=80, last=2)
    both[1].exchanges["objects"] = ExchangeSums(count=4, moved=80, unknown=1)
    report = _report(_history(both))
    _, sometimes, objects = report.exchanges
    assert (sometimes.name, sometimes.per_step, sometimes.hidden_s) == ("sometimes", 0.25, 0.5)
    assert (sometimes.moved_bytes, sometimes.last, objects.moved_bytes) == (10, (0, 2), None)
    assert [rank["last"] for rank in report.document()["ranks"]] == [2, 4 + 2]


def test_scalars_are_of_the_newest_steps() -> None:
    def scalars(history: History) -> tuple[float, float, float]:
        names = ("compute_imbalance", "samples_per_s", "step_s")
        return tuple(history.newest_scalars()[f"freescale/bubble/{name}"] for name in names)

    assert scalars(_history(_windows(0, 8), _windows(9, 10))) == pytest.approx((1, 21 / 3, 3)), "an odd step alone"
    assert scalars(_history(_windows(0, 8), _windows(8, 11)))[0] == pytest.approx((2 + 2 + 2) / (1.5 + 2 + 1.5))
    assert scalars(_history(_windows(0, 8), max_steps=3))[2] == 3


def test_a_report_on_the_way_leaves_out_what_takes_time() -> None:
    history = _history(_windows(0, 4))
    on_the_way, without_trace = _report(history), _report(history, [], device_idle={"steps": 3})
    assert (on_the_way.what_if, on_the_way.median_step) == ((), None)
    assert (without_trace.median_step, without_trace.device_idle) == (None, {"steps": 3})
    at_the_end = _report(history, _traced(0, 4))
    assert at_the_end.median_step is not None
    assert _gains(at_the_end)["perfect balance"] == _gains(without_trace)["perfect balance"] == pytest.approx(6 / 5.5)


def test_steps_with_divided_waits_speak_for_a_window_without(monkeypatch: pytest.MonkeyPatch) -> None:
    report = _report(_history(_windows(0, 4), _windows(4, 6, divided=False), _windows(6, 10)), [])
    assert report.replayed is not None and report.replayed.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    gains = _gains(report)
    assert gains["perfect balance"] == pytest.approx((3 + 3) / (2.5 + 3)) and gains["full overlap"] is not None
    replay = report.document()["replay"]
    assert (replay["steps"], replay["first_step"], replay["last_step"], replay["step_s"]) == (8, 0, 9, pytest.approx(3.0))
    assert replay["shares"]["wait"] == 0 < report.shares["wait"]
    monkeypatch.setattr("lightning_freescale.profiling.collection.history._ENOUGH", 0.5)  # which two of six steps are not
    report = _report(_history(_windows(0, 2), _windows(2, 6, divided=False)), [])
    gains = _gains(report)
    assert gains["perfect balance"] is None and gains["no data wait"] is not None
    assert report.replayed.tolist() == list(range(6))


def test_waits_for_data_of_loader_workers_are_replayed_as_such() -> None:
    """Check that a rank that is ready earlier waits longer."""
    last = []
    run = run_behind_workers(np.tile([[0.2, 0.8], [0.8, 0.2]], (10, 1)), [1.1] * 20)
    for ranks in run:
        last.append([max(moments) for moments in zip(*([c.arrive for c in step.collectives] for step in ranks))])
    windows = [window_of([step[rank] for step in run], last) for rank in (0, 1)]

    def balance(workers: int | None) -> float | None:
        history = History(replace(RUN, num_workers=workers), 100, None)
        history.add_windows(windows)
        return _gains(_report(history, []))["perfect balance"]

    assert balance(1) == pytest.approx(1.0, abs=0.02)
    assert balance(0) == balance(None) != pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(("limit", "value"), [("_REPLAYED", 3), ("_REPLAYED_OF_RANKS", 7)])
def test_replayed_are_the_last_steps(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"lightning_freescale.profiling.collection.history.{limit}", value)
    report = _report(_history(_windows(0, 9), max_steps=8), [])
    assert report.document()["replay"]["first_step"] == 6
    assert report.replayed.tolist() == [5, 6, 7]
    assert _gains(report)["perfect balance"] == pytest.approx((3 + 3 + 3) / (2.5 + 3 + 2.5)), "even, odd, even"


def test_the_median_step_is_the_one_of_median_length_without_pauses() -> None:
    traced = _traced(1, 5)  # all of three seconds
    lengths = {1: (3.0, 9.0), 2: (3.5, 4.0), 3: (3.2, 5.0), 4: (3.3, 6.0)}
    for row in traced:
        for rank, step in enumerate(row):
            end = step.start + lengths[step.index][rank]
            pause = (Interval("pause", "validation", step.start + 3, step.start + 9),) if step.index == 1 and rank else ()
            row[rank] = replace(step, end=end, spans=step.spans + pause)
    median = _report(_history(_windows(1, 5)), traced).median_step
    assert median["step"] == 2, "the slowest rank counts: 3, 4, 5 and 6 seconds, and the lower of the two in the middle"
    first, second = median["ranks"]
    assert first[:3] == [["forward", "forward", 0, 1.0], ["straggler_wait", "rows", 1.0, 2.0], ["transfer", "rows", 2.0, 2.5]]
    assert second[:2] == [["forward", "forward", 0, 2.0], ["transfer", "rows", 2.0, 2.5]]
    traced[1][1] = replace(traced[1][1], start=traced[1][1].start + 0.25)
    median = _report(_history(_windows(1, 5)), traced).median_step
    assert [rank[0][2] for rank in median["ranks"]] == [0, 0.25], "from its first stamp"


def test_features_explain_the_imbalance() -> None:
    seen: list[Any] = []

    def fit_costs(features: np.ndarray, compute: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seen.append((features, compute))
        return features[..., 0], np.array([1.0, 1.5])

    features = ((1.5, 5.0), (4 / 3, 6.0))  # rank 1 takes 1.5 times as long as they explain
    report = _report(_history(_windows(0, 3, features), _windows(3, 6, features), max_steps=4, fit_costs=fit_costs))
    ((given, compute),) = seen
    assert given.tolist() == [[[1.5, 5], [4 / 3, 6]]] * 4, "of the steps that are kept"
    assert compute.tolist() == [[1, 2], [2, 2], [1, 2], [2, 2]]
    imbalance = report.imbalance
    assert (imbalance.method, imbalance.data, imbalance.scores) == ("cost model", pytest.approx(1 / 12), (1.0, 1.5))
    for unknown in (((1.0,), None), (None, None)):
        assert _report(_history(_windows(0, 4, unknown), fit_costs=fit_costs)).imbalance.method == "ranks"
    assert len(seen) == 1
    for other in (None, lambda features, compute: None):
        assert _report(_history(_windows(0, 4), fit_costs=other)).imbalance.method == "ranks"
    assert _report(_history(_windows(0, 4)[:1]), _traced(0, 4)).imbalance is None, "one rank has none"
