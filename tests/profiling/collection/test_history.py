"""What rank 0 keeps of all ranks' steps, and the report that comes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.analysis.planned import PlannedStep
from lightning_freescale.profiling.analysis.rank_window import ExchangeSums, RankWindow, window_of
from lightning_freescale.profiling.collection.history import History
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep
from lightning_freescale.profiling.reporting.facts import Overhead, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport
from tests.helpers.profiled_runs import run_behind_workers
from tests.helpers.reports import RUN

FORWARD = ((1.0, 2.0), (2.0, 2.0))  # seconds in even and odd steps, of two ranks


def _step(index: int, rank: int) -> ResolvedStep:
    """It begins at ``10 * index``; the ranks meet when both have computed, for half a second."""
    start, compute = 10.0 * index, FORWARD[index % 2]
    arrive, last = start + compute[rank], start + max(compute)
    spans = (Interval("forward", "forward", start, arrive),)
    meeting = ResolvedCollective("rows", f"rows:{index}", arrive, arrive, last + 0.5, last + 0.5, moved=100)
    return ResolvedStep(start, last + 1, index, 10 + rank, spans, (meeting,))


def _windows(indices: range, features: Any = ((1.0,), (1.0,))) -> list[RankWindow]:
    last = [[10.0 * index + max(FORWARD[index % 2])] for index in indices]
    many = len(indices)
    return [window_of([_step(i, rank) for i in indices], last, [features[rank]] * many, [rank + 1.0] * many) for rank in (0, 1)]


def _history(*windows: list[RankWindow], max_steps: int = 100, fit_costs: Any = None) -> History:
    history = History(RUN, max_steps, fit_costs)
    for each in windows:
        history.add_windows(each)
    return history


def _report(history: History, traced: Any = None, **options: Any) -> BubbleReport:
    return history.build_report(Status(), WaitAttribution(True, 1e-6), Overhead(1e-3, 1e-4), traced, **options)


def _traced(indices: range) -> list[list[ResolvedStep]]:
    return [[_step(i, 0), _step(i, 1)] for i in indices]


def test_steps_ranks_and_parts_are_in_their_places() -> None:
    report = _report(_history(_windows(range(3, 5)), _windows(range(5, 6))))
    assert list(report.steps) == [3, 4, 5]
    assert report.samples.tolist() == [[10, 11]] * 3
    assert column(report.breakdown, "forward").tolist() == [[2, 2], [1, 2], [2, 2]]
    assert column(report.breakdown, "straggler_wait").tolist() == [[0, 0], [1, 0], [0, 0]]
    assert (report.run, report.status.complete, report.overhead.total) == (RUN, True, pytest.approx(1.1e-3))


def test_what_the_plans_say_is_of_the_steps_in_the_report() -> None:
    history = _history(max_steps=2)
    plans = [PlannedStep(1.0 + step, 1.0, 1.0) for step in range(3)]
    history.add_windows(_windows(range(2)), plans[:2])
    history.add_windows(_windows(range(2, 3)), plans[2:])
    balance = _report(history).balance
    assert balance is not None and balance.steps == 2
    seconds = [sum(FORWARD[1]), sum(FORWARD[0])]
    assert balance.unbalanced == pytest.approx((2.0 * seconds[0] + 3.0 * seconds[1]) / sum(seconds))
    history.add_windows(_windows(range(3, 4)))
    assert _report(history).balance is None, "of the last step nothing is known"


def test_only_the_last_steps_are_kept() -> None:
    history = _history(_windows(range(4)), _windows(range(4, 7)), max_steps=5)
    report = _report(history, _traced(range(5, 7)))
    assert list(report.steps) == [2, 3, 4, 5, 6]
    assert report.breakdown.shape[:2] == report.samples.shape == (5, 2)
    assert history.added == 7
    assert report.exchanges[0].per_step == 1, "figures are of all steps, per step"


def test_exchanges_of_windows_that_are_not_kept_are_forgotten() -> None:
    early = _windows(range(4))
    early[0].exchanges["early"] = ExchangeSums(count=1)
    early[1].host = {"early": 1.0}
    assert "early" in _report(_history(early, _windows(range(4, 7)), max_steps=4)).host, "a part of its steps is kept"
    report = _report(_history(early, _windows(range(4, 7)), max_steps=3))
    assert [figures.name for figures in report.exchanges] == ["rows"]
    assert "early" not in report.host


def test_figures_of_exchanges_are_means_over_steps_and_ranks() -> None:
    (rows,) = _report(_history(_windows(range(2)), _windows(range(2, 4)))).exchanges
    assert (rows.name, rows.per_step, rows.moved) == ("rows", 1, 100)
    assert rows.straggler_wait == pytest.approx((1 + 0) / 2 / 2)  # rank 0 waits in even steps
    assert rows.transfer == pytest.approx(0.5)
    assert rows.hidden == 0
    assert rows.last == (2, 4)


def test_ranks_need_not_have_the_same_exchanges() -> None:
    windows = _windows(range(4))
    windows[1].exchanges["sometimes"] = ExchangeSums(count=2, hidden=4.0, moved=80, last=2)
    windows[1].exchanges["objects"] = ExchangeSums(count=4, moved=80, unknown=1)
    report = _report(_history(windows))
    by_name = {figures.name: figures for figures in report.exchanges}
    sometimes = by_name["sometimes"]
    assert (sometimes.per_step, sometimes.hidden, sometimes.moved, sometimes.last) == (0.25, 0.5, 10, (0, 2))
    assert by_name["objects"].moved is None, "of some nobody knows the bytes"
    assert report.last == (2, 4 + 2)


def test_host_overhead_is_a_mean_over_steps_and_ranks() -> None:
    windows = _windows(range(2)), _windows(range(2, 4))
    for window in (windows[0][0], windows[1][1]):
        window.host = {"hooks": 2.0}
    windows[0][1].host = {"loop": 4.0}
    windows[1][0].host = {}
    assert _report(_history(*windows)).host == {"hooks": 4.0 / 2 / 4, "loop": 4.0 / 2 / 4}


def test_scalars_are_of_the_newest_steps() -> None:
    history = _history(_windows(range(8)), _windows(range(9, 10)))
    assert history.newest_scalars()["freescale/bubble/compute_imbalance"] == 1, "an odd step alone"
    assert history.newest_scalars()["freescale/bubble/samples_per_s"] == pytest.approx(21 / 3)
    several = _history(_windows(range(8)), _windows(range(8, 11)))
    assert several.newest_scalars()["freescale/bubble/compute_imbalance"] == pytest.approx((2 + 2 + 2) / (1.5 + 2 + 1.5))
    forgetful = _history(_windows(range(8)), max_steps=3)
    assert forgetful.newest_scalars()["freescale/bubble/step_s"] == 3


def test_a_report_on_the_way_leaves_out_what_takes_time() -> None:
    history = _history(_windows(range(4)))
    on_the_way = _report(history)
    assert (on_the_way.what_if, on_the_way.median_step) == ((), None)
    without_trace = _report(history, [], device_idle={"steps": 3})
    assert without_trace.what_if
    assert (without_trace.median_step, without_trace.device_idle) == (None, {"steps": 3})
    at_the_end = _report(history, _traced(range(4)))
    assert at_the_end.median_step is not None
    gains = {case.name: case.speed_up for case in at_the_end.what_if}
    assert gains["perfect balance"] == pytest.approx((3 + 3) / (2.5 + 3))


def test_replays_are_of_the_steps_they_have_the_segments_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_freescale.profiling.collection.history._REPLAYED", 3)
    assert _report(_history(_windows(range(8))), []).what_if


def _undivided(indices: range) -> list[RankWindow]:
    """As of an exchange at which the ranks' clocks disagreed."""
    arrived = [[[10.0 * index + max(FORWARD[index % 2])] for index in indices]] * 2
    many = [None] * len(indices)
    return [window_of([_step(i, rank) for i in indices], arrived[rank], many, many, divided=False) for rank in (0, 1)]


def test_steps_with_divided_waits_speak_for_a_window_without() -> None:
    report = _report(_history(_windows(range(4)), _undivided(range(4, 6)), _windows(range(6, 10))), [])
    assert report.replayed is not None and report.replayed.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    gains = {case.name: case.speed_up for case in report.what_if}
    assert gains["perfect balance"] == pytest.approx((3 + 3) / (2.5 + 3)) and gains["full overlap"] is not None
    replay = report.document()["replay"]
    assert (replay["steps"], replay["first_step"], replay["last_step"]) == (8, 0, 9)
    assert replay["shares"]["wait"] == 0 < report.shares["wait"]
    assert replay["step_s"] == pytest.approx(3.0)


def test_too_few_steps_with_divided_waits_speak_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_freescale.profiling.collection.history._ENOUGH", 0.5)
    report = _report(_history(_windows(range(2)), _undivided(range(2, 6))), [])
    gains = {case.name: case.speed_up for case in report.what_if}
    assert gains["perfect balance"] is None and gains["no data wait"] is not None
    assert report.replayed.tolist() == list(range(6))


def test_waits_for_data_of_loader_workers_are_replayed_as_such() -> None:
    """A rank that is ready earlier waits as much longer."""
    last = []
    run = run_behind_workers(np.tile([[0.2, 0.8], [0.8, 0.2]], (10, 1)), [1.1] * 20)
    for ranks in run:
        last.append([max(moments) for moments in zip(*([c.arrive for c in step.collectives] for step in ranks))])
    many = [None] * len(run)
    windows = [window_of([step[rank] for step in run], last, many, many) for rank in (0, 1)]

    def balance(workers: int | None) -> float | None:
        history = History(replace(RUN, num_workers=workers), 100, None)
        history.add_windows(windows)
        return next(case.speed_up for case in _report(history, []).what_if if case.name == "perfect balance")

    assert balance(1) == pytest.approx(1.0, abs=0.02)
    assert balance(0) == balance(None) != pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(("limit", "value"), [("_REPLAYED", 3), ("_REPLAYED_OF_RANKS", 7)])
def test_replayed_are_the_last_steps(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"lightning_freescale.profiling.collection.history.{limit}", value)
    report = _report(_history(_windows(range(9)), max_steps=8), [])
    assert report.document()["replay"]["first_step"] == 6
    assert report.replayed.tolist() == [5, 6, 7]
    gains = {case.name: case.speed_up for case in report.what_if}
    assert gains["perfect balance"] == pytest.approx((3 + 3 + 3) / (2.5 + 3 + 2.5)), "even, odd, even"


def test_the_median_step_is_the_one_of_median_length_without_pauses() -> None:
    traced = _traced(range(1, 4))  # all of three seconds
    lengths = {1: (3.0, 9.0), 2: (3.5, 4.0), 3: (3.2, 5.0)}
    for row in traced:
        for rank, step in enumerate(row):
            end = step.start + lengths[step.index][rank]
            pause = (Interval("pause", "validation", step.start + 3, step.start + 9),) if step.index == 1 else ()
            row[rank] = ResolvedStep(step.start, end, step.index, 1, step.spans + (pause if rank else ()), step.collectives)
    median = _report(_history(_windows(range(1, 4))), traced).median_step
    assert median["step"] == 2, "the slowest rank counts: 3, 4 and 5 seconds"
    first, second = median["ranks"]
    assert first[:3] == [
        ["forward", "forward", 0, 1.0],
        ["straggler_wait", "rows", 1.0, 2.0],
        ["transfer", "rows", 2.0, 2.5],
    ]
    assert second[:2] == [["forward", "forward", 0, 2.0], ["transfer", "rows", 2.0, 2.5]]


def test_of_an_even_number_of_steps_the_lower_median_is_told_from_its_first_stamp() -> None:
    traced = _traced(range(2))
    late = traced[0][1]
    traced[0][1] = ResolvedStep(late.start + 0.25, late.end, 0, 1, late.spans, late.collectives)
    median = _report(_history(_windows(range(2))), traced).median_step
    assert median["step"] == 0
    assert median["ranks"][0][0][2] == 0
    assert median["ranks"][1][0][2] == 0.25


def _fitting(seen: list[Any]) -> Any:
    def fit_costs(features: np.ndarray, compute: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seen.append((features, compute))
        return features[..., 0], np.array([1.0, 1.5])

    return fit_costs


def test_features_explain_the_imbalance() -> None:
    seen: list[Any] = []
    report = _report(_history(_windows(range(4), ((1.0, 5.0), (2.0, 6.0))), fit_costs=_fitting(seen)))
    ((features, compute),) = seen
    assert features.shape == (4, 2, 2)
    assert features[0].tolist() == [[1, 5], [2, 6]]
    assert compute.tolist() == [[1, 2], [2, 2], [1, 2], [2, 2]]
    assert report.imbalance.method == "cost model"
    assert report.imbalance.data == pytest.approx(0.5)
    assert report.imbalance.scores == (1.0, 1.5)


def test_features_of_the_steps_that_are_kept() -> None:
    seen: list[Any] = []
    _report(_history(_windows(range(4)), _windows(range(4, 7)), max_steps=5, fit_costs=_fitting(seen)))
    assert [given.shape for given in seen[0]] == [(5, 2, 1), (5, 2)]


@pytest.mark.parametrize("features", [((1.0,), None), (None, None)])
def test_features_that_a_rank_does_not_know_explain_nothing(features: Any) -> None:
    seen: list[Any] = []
    report = _report(_history(_windows(range(4), features), fit_costs=_fitting(seen)))
    assert report.imbalance.method == "ranks"
    assert not seen


def test_without_anybody_to_explain_them_or_with_a_refusal_it_is_the_ranks() -> None:
    for fit_costs in (None, lambda features, compute: None):
        assert _report(_history(_windows(range(4)), fit_costs=fit_costs)).imbalance.method == "ranks"


def test_one_rank_has_no_imbalance() -> None:
    assert _report(_history(_windows(range(4))[:1]), _traced(range(4))).imbalance is None
