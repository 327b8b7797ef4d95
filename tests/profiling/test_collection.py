"""What ranks recorded on its way to rank 0: steps, their exchange, what rank 0 keeps, and the report of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_freescale.profiling.analysis.breakdown import WAITS, column
from lightning_freescale.profiling.analysis.imbalance import PlannedStep
from lightning_freescale.profiling.analysis.rank_window import ExchangeSums, RankWindow, window_of
from lightning_freescale.profiling.collection import rank_exchange as module
from lightning_freescale.profiling.collection.history import History
from lightning_freescale.profiling.collection.rank_exchange import RankExchange, StepBuffer
from lightning_freescale.profiling.recording.records import (
    Collective,
    HostClock,
    Interval,
    ResolvedCollective,
    ResolvedStep,
    StepRecord,
)
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.document import Overhead, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.testing import run_distributed
from tests.helpers.profiled_runs import run_behind_workers
from tests.helpers.reports import RUN


def _same(seconds: float) -> float:
    return seconds


@pytest.fixture
def timeline() -> Timeline:
    made = Timeline()
    made.enable(torch.device("cpu"))
    return made


def _steps(first: int, until: int) -> list[StepRecord]:
    """Of a second each."""
    return [StepRecord(float(index), index + 1.0, index) for index in range(first, until)]


def _background(timeline: Timeline, name: str, arrive: float, done: float) -> None:
    timeline.background.append(Collective(name, "", arrive, done=done))


def _indices(steps: list[StepRecord] | list[ResolvedStep]) -> list[int]:
    return [step.index for step in steps]


def _hidden(*steps: ResolvedStep) -> list[list[str]]:
    return [[one.name for one in step.hidden] for step in steps]


def _window(buffer: StepBuffer, records: list[StepRecord], leave: int = 0) -> list[ResolvedStep]:
    for record in records:
        buffer.add_step(record)
    return buffer.resolve_taken(buffer.take_steps(leave), _same)


def test_the_newest_wait_and_times_are_rank_0s(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 3)
    assert _indices(_window(buffer, _steps(0, 6), leave=2)) == [0, 1, 2, 3]
    assert (_indices(buffer.waiting), _indices(list(buffer.recent))) == ([4, 5], [1, 2, 3])
    _background(timeline, "late", 4.5, 5.5)
    fifth, sixth = buffer.resolve_taken(buffer.take_steps(0), lambda seconds: seconds + 100)
    assert (fifth.start, sixth.end, [one.arrive for one in sixth.hidden]) == (104, 106, [104.5])
    assert (buffer.waiting, buffer.count, _indices(list(buffer.recent))) == ([], 6, [3, 4, 5])


def test_exchanges_do_not_pile_up(timeline: Timeline) -> None:
    buffer, seen = StepBuffer(timeline, 10), Counter()
    for first in range(0, 400, 4):
        for index in range(first, first + 4):
            _background(timeline, f"at {index}", index + 0.5, index + 1.5)
        for names in _hidden(*_window(buffer, _steps(first, first + 4))):
            seen.update(names)
        assert len(buffer._background) <= 1
        assert not timeline.background
    assert seen == {f"at {index}": 1 if index == 399 else 2 for index in range(400)}, "the last one's second step has not come"


def test_steps_in_between_leave_what_others_need(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 10)
    for record in (*_steps(0, 1), *_steps(3, 4)):
        buffer.add_step(record)
    _background(timeline, "across", 0.5, 3.5)
    watched = buffer.resolve_only(_steps(1, 3), _same)
    steps = buffer.resolve_taken(buffer.take_steps(0), _same)
    assert _hidden(*watched, *steps) == [["across"]] * 4
    assert _indices(list(buffer.recent)) == [0, 3], "watched steps are kept elsewhere"


@pytest.mark.parametrize(
    ("resolved", "taken", "waiting", "rest"),
    [
        (4, 0, 2, [0, 1, 2, 3, 4, 5]),
        (2, 2, 2, [2, 3, 4, 5]),  # those taken last were not resolved
        (0, 0, 1, [0]),
        (2, 0, 0, [0, 1]),
    ],
)
def test_the_rest_is_what_was_taken_last_and_what_waits(
    resolved: int, taken: int, waiting: int, rest: list[int], timeline: Timeline
) -> None:
    buffer, total = StepBuffer(timeline, 10), resolved + taken + waiting
    if resolved:
        _window(buffer, _steps(0, resolved))
    for record in _steps(resolved, total):
        buffer.add_step(record)
    if taken:
        buffer.take_steps(waiting)
    records, steps = buffer.resolve_rest(_same)
    assert _indices(records) == _indices(steps) == rest
    assert _indices(list(buffer.recent)) == list(range(total)), "none twice"


def _step(arrivals: dict[str, float], wall: float = 1.0, index: int = 7, moved: int | None = None) -> ResolvedStep:
    """Every collective ends at 0.9."""
    collectives = tuple(ResolvedCollective("c", key, at, at, 0.9, 0.9, moved) for key, at in arrivals.items())
    return ResolvedStep(0.0, wall, index, 3, (), collectives)


def _waits(windows: list[RankWindow], name: str = "straggler_wait") -> list[list[float]]:
    return [column(window.breakdown, name).round(6).tolist() for window in windows]


def _check_subgroups() -> None:
    """Collectives of some ranks are matched by key; the clocks' figures are the worst of all ranks."""
    rank = dist.get_rank()
    exchange = RankExchange(dist.group.WORLD, HostClock())
    assert exchange.wait_attribution().clock is None, "nothing is known of the others"
    exchange.alignment.uncertainty_at = lambda _: 0.0  # however busy the machine is
    exchange.alignment.figures = lambda: {"drift": [0.0, 1e-6, -5e-6][rank], "syncs": rank, "round_trip_s": 0.1 * rank}
    pair, world = {"pair:7.0": (0.1, 0.3, None)[rank]}, {"world:7.0": (0.5, 0.5, 0.75)[rank]}
    steps = [_step(pair if rank < 2 else {}), _step(world, index=8), _step({"own": 0.2}, index=9)]
    windows = exchange.exchange_steps(steps, [f"rank {rank}", None, None], [None] * 3)
    if rank:
        assert windows is None
        return
    assert [window.steps for window in windows] == [[7, 8, 9]] * 3
    assert _waits(windows) == [[0.2, 0.25, 0], [0, 0.25, 0], [0, 0, 0]]
    assert _waits(windows, "transfer") == [[0.6, 0.15, 0.7], [0.6, 0.15, 0.7], [0, 0.15, 0.7]]
    assert [window.features[0] for window in windows] == ["rank 0", "rank 1", "rank 2"]
    assert [window.exchanges["c"].last for window in windows] == [1, 2, 2]
    waiting = exchange.wait_attribution()
    assert (waiting.aligned, waiting.clock) == (True, {"drift": -5e-6, "syncs": 2, "round_trip_s": 0.2})


def test_collectives_of_some_ranks_are_matched_by_key() -> None:
    run_distributed(_check_subgroups, 3)


WALLS = (1.1, 0.9)


def _exchanged(*uncertainties: tuple[float, float]) -> tuple[list[list[float] | None], WaitAttribution, float]:
    """Waits of rank 0 in exchanges of two steps, in which the ranks' clocks may be wrong by so much; how they were divided."""
    rank, answers = dist.get_rank(), []
    exchange = RankExchange(dist.group.WORLD, HostClock())
    exchange.spent_here = [0.25, 0.75][rank]
    for uncertainty in uncertainties:
        exchange.alignment.uncertainty_at = lambda _, mine=uncertainty[rank]: mine
        wall = WALLS[rank]
        validation = Interval("pause", "validation", wall, wall + 5)
        checkpoint = Interval("pause", "checkpoint", wall + 1, wall + 5)
        step = replace(_step({"world:7.0": 0.1 + 0.5 * rank}, wall + 5, moved=10**8), spans=(validation, checkpoint))
        windows = exchange.exchange_steps([step] * 2, [None] * 2, [None] * 2)
        answers.append(None if windows is None else [_waits(windows, name)[0][0] for name in WAITS])
    return answers, exchange.wait_attribution(), exchange.spent


def test_clocks_are_good_enough_up_to_two_percent_of_a_step_on_the_worst_rank() -> None:
    good, bad = [(0, 0.0199), (0.01, 0.004)], [(0, 0.001), (0, 0.0201), (0, 0.001)]
    first, second = run_distributed(lambda: (_exchanged(*good), _exchanged(*bad)), 2)
    answers, waiting, spent = first[0]
    assert answers == [[0.5, 0.3, 0.0]] * 2
    assert (waiting.aligned, waiting.reason, waiting.uncertainty) == (True, None, 0.0199)
    assert spent == second[0][2] == 0.75
    answers, waiting, _ = first[1]
    assert answers == [[0.5, 0.3, 0.0], [0.0, 0.0, 0.8], [0.5, 0.3, 0.0]], "undivided"
    assert (waiting.aligned, waiting.uncertainty) == (False, 0.0201)
    assert "20.10 ms" in waiting.reason and "2 of 6 steps" in waiting.reason
    assert second[1][1].reason == waiting.reason, "the ranks decide alike"


def test_one_rank_alone() -> None:
    exchange = RankExchange(None, HostClock())
    (window,) = exchange.exchange_steps([_step({"a": 0.4})], [None], [None])
    assert (_waits([window]), _waits([window], "transfer")) == ([[0]], [[0.5]]), "it waits for no other"
    assert [sums.last for sums in window.exchanges.values()] == [0], "nor does another for it"
    assert exchange.wait_attribution() == WaitAttribution(True, 0.0)
    exchange = RankExchange(None, HostClock())
    exchange.group = SimpleNamespace()  # of others, which are not asked
    window = exchange.own_window([_step({"a": 0.5}), _step({"a": 0.7})], ["x", "y"], [1.0, None], "because")
    attribution = exchange.wait_attribution()
    assert (attribution.aligned, attribution.reason, window.features) == (False, "because", ["x", "y"])
    assert [_waits([window], name)[0] for name in WAITS] == [[0, 0], [0, 0], [0.4, 0.2]]
    assert [sums.last for sums in window.exchanges.values()] == [0]


def _never(_: RankExchange) -> None:
    pass


@pytest.mark.parametrize(
    ("between", "compared", "ties"),
    [
        # rarer and rarer; between epochs the device is idle
        (RankExchange.sync_clocks_if_due, [(second, True) for second in (0, 6, 17, 38, 79, 140, 201)], 7),
        # without epochs with the next exchange, in short, while the device is busy
        (_never, [(0, True), *((second, False) for second in (7, 19, 41, 83, 145, 207))], 1),
        (RankExchange.sync_clocks, [(second, True) for second in range(251)], 251),
    ],
    ids=["between epochs", "without epochs", "at the end"],
)
def test_when_clocks_are_compared(
    between: Callable[[RankExchange], None], compared: list[tuple[int, bool]], ties: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 250 exchanges, one a second: at which, and whether with all rounds; how often the device's clock is tied."""
    now, seen, tied, clock = [0], [], [], HostClock()
    clock.tie = lambda: tied.append(now[0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module.Alignment, "measure_offset", lambda self, group, rounds=40: seen.append((now[0], rounds == 40)))
    monkeypatch.setattr(module.Alignment, "uncertainty_at", lambda self, seconds: 0.0)
    exchange = RankExchange(None, clock)
    for now[0] in range(1, 251):
        exchange.exchange_steps([_step({})], [None], [None])
        between(exchange)
    assert (seen, len(tied)) == (compared, ties)


def _due(after: tuple[float, float]) -> int:
    module._FIRST_SYNC, count = after[dist.get_rank()], []
    exchange = RankExchange(dist.group.WORLD, HostClock())
    measure = exchange.alignment.measure_offset
    exchange.alignment.measure_offset = lambda *a: count.append(measure(*a))
    exchange.exchange_steps([_step({})], [None], [None])
    exchange.sync_clocks_if_due()
    return len(count)


def test_rank_0_says_when_clocks_are_compared() -> None:
    assert run_distributed(lambda: (_due((-1.0, 1e9)), _due((1e9, -1.0))), 2) == [(1, 0)] * 2


FORWARD = ((1.0, 2.0), (2.0, 2.0))  # seconds in even and odd steps, of two ranks


def _computed(index: int, rank: int) -> ResolvedStep:
    """It begins at ``10 * index``; the ranks meet when both have computed, for half a second."""
    start, compute = 10.0 * index, FORWARD[index % 2]
    arrive, last = start + compute[rank], start + max(compute)
    spans = (Interval("forward", "forward", start, arrive),)
    meeting = ResolvedCollective("rows", f"rows:{index}", arrive, arrive, last + 0.5, last + 0.5, moved=100)
    return ResolvedStep(start, last + 1, index, 10 + rank, spans, (meeting,))


def _windows(first: int, until: int, features: Any = ((1.0,), (1.0,)), **options: bool) -> list[RankWindow]:
    steps, many = range(first, until), until - first
    last = [[10.0 * index + max(FORWARD[index % 2])] for index in steps]
    rows = [[_computed(index, rank) for index in steps] for rank in (0, 1)]
    return [window_of(rows[rank], last, [features[rank]] * many, [1.0] * many, **options) for rank in (0, 1)]


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
    plans = [PlannedStep(1.0 + step, 1.0, 1.0) for step in range(3)]
    history.add_windows(_windows(0, 2), plans[:2])
    history.add_windows(_windows(2, 3), plans[2:])
    balance, (even, odd) = _report(history).balance, map(sum, FORWARD)
    assert balance is not None and balance.steps == 2
    assert balance.unbalanced == pytest.approx((2.0 * odd + 3.0 * even) / (even + odd))
    history.add_windows(_windows(3, 4))
    assert _report(history).balance is None, "of the last step nothing is known"


def test_figures_are_means_over_steps_and_ranks() -> None:
    windows = _windows(0, 2), _windows(2, 4)
    for window in (windows[0][0], windows[1][1]):
        window.host = {"hooks": 2.0}
    windows[0][1].host, windows[1][0].host = {"loop": 4.0}, {}
    report = _report(_history(*windows))
    (rows,) = report.exchanges
    assert (rows.name, rows.per_step, rows.moved, rows.hidden, rows.last) == ("rows", 1, 100, 0, (2, 4))
    assert rows.straggler_wait == pytest.approx((1 + 0) / 2 / 2)  # rank 0 waits in even steps
    assert rows.transfer == pytest.approx(0.5)
    assert report.host == {"hooks": 4.0 / 2 / 4, "loop": 4.0 / 2 / 4}
    both = _windows(0, 4)  # ranks need not have the same exchanges
    both[1].exchanges["sometimes"] = ExchangeSums(count=2, hidden=4.0, moved=80, last=2)
    both[1].exchanges["objects"] = ExchangeSums(count=4, moved=80, unknown=1)
    report = _report(_history(both))
    _, sometimes, objects = report.exchanges
    assert (sometimes.name, sometimes.per_step, sometimes.hidden) == ("sometimes", 0.25, 0.5)
    assert (sometimes.moved, sometimes.last, objects.moved, report.last) == (10, (0, 2), None, (2, 4 + 2))


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

    features = ((1.0, 5.0), (2.0, 6.0))
    report = _report(_history(_windows(0, 3, features), _windows(3, 6, features), max_steps=4, fit_costs=fit_costs))
    ((given, compute),) = seen
    assert given.tolist() == [[[1, 5], [2, 6]]] * 4, "of the steps that are kept"
    assert compute.tolist() == [[1, 2], [2, 2], [1, 2], [2, 2]]
    imbalance = report.imbalance
    assert (imbalance.method, imbalance.data, imbalance.scores) == ("cost model", pytest.approx(0.5), (1.0, 1.5))
    for unknown in (((1.0,), None), (None, None)):
        assert _report(_history(_windows(0, 4, unknown), fit_costs=fit_costs)).imbalance.method == "ranks"
    assert len(seen) == 1
    for other in (None, lambda features, compute: None):
        assert _report(_history(_windows(0, 4), fit_costs=other)).imbalance.method == "ranks"
    assert _report(_history(_windows(0, 4)[:1]), _traced(0, 4)).imbalance is None, "one rank has none"
