"""A step cut into intervals without overlap, the split of its wall time, and the sums of a rank's window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.breakdown import (
    ADDENDS,
    PART_NAMES,
    Arrival,
    StepBreakdown,
    arrivals_of,
    as_array,
    attribute,
    bubble,
    column,
    hidden_seconds,
    intervals_of,
    last_arrivals,
    wall_of,
)
from lightning_freescale.profiling.analysis.rank_window import RankWindow, window_of
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep

STAGES = [("data", 0.0, 1.0), ("forward", 2.0, 6.0), ("backward", 6.0, 8.0), ("optimizer", 8.0, 9.0)]


def _step(spans: Sequence[tuple], collectives: Sequence[tuple] = (), hidden: Sequence[tuple] = ()) -> ResolvedStep:
    """Ten seconds; collectives by when the rank arrived, when it began to wait and when it went on."""
    return ResolvedStep(
        0.0,
        10.0,
        spans=tuple(Interval(kind, kind, start, end) for kind, start, end in spans),
        collectives=tuple(ResolvedCollective("a", str(k), *times, times[-1]) for k, times in enumerate(collectives)),
        hidden=tuple(ResolvedCollective("lane", "", start, start, start, end) for start, end in hidden),
    )


def _cut(spans: list[tuple], collectives: Sequence[tuple] = (), last: Sequence[float] | None = ()) -> list[tuple]:
    return [(i.kind, i.start, i.end) for i in intervals_of(_step(spans, collectives), last)]


@pytest.mark.parametrize(
    ("last", "parts"),
    [
        (6.0, [("straggler_wait", 4, 6), ("transfer", 6, 8)]),
        (2.0, [("transfer", 4, 8)]),
        (9.0, [("straggler_wait", 4, 8)]),
        (None, [("wait", 4, 8)]),
    ],
)
def test_wait_is_cut_where_the_last_rank_arrives(last: float | None, parts: list[tuple]) -> None:
    cut = _cut([("forward", 0.0, 10.0)], [(3.0, 4.0, 8.0)], None if last is None else [last])
    assert cut == [("forward", 0, 4), *parts, ("forward", 8, 10)]


def test_undivided_waits_of_one_name_are_two() -> None:
    cut = _cut([("forward", 0.0, 10.0)], [(3.0, 4.0, 6.0), (5.0, 6.0, 8.0)], None)
    assert cut == [("forward", 0, 4), ("wait", 4, 6), ("wait", 6, 8), ("forward", 8, 10)]


def test_the_last_arrival_at_each_collective_and_whose_it_is() -> None:
    ranks = [_step([], [(at, 9.0, 9.5) for at in times]) for times in ((3.0, 6.0), (4.0,), (2.0, 6.0))]
    last = last_arrivals(map(arrivals_of, ranks))
    assert last == {"0": Arrival(4.0, 1), "1": Arrival(6.0, 0)}, "of ranks that arrive at once the first counts"


def test_pauses_go_before_all_and_are_taken_out_of_the_wall_time_once() -> None:
    """Test a checkpoint that validation saves, and two pauses that overlap, one of them beyond the step."""
    assert _cut([("pause", 2, 6), ("forward", 3, 8)]) == [
        ("unexplained", 0, 2), ("pause", 2, 6), ("forward", 6, 8), ("host", 8, 10),
    ]  # fmt: skip
    assert wall_of(_step([("pause", 1, 8), ("pause", 4, 8), ("forward", 8, 9)])) == 3
    assert wall_of(_step([("pause", 1, 4), ("pause", 3, 5), ("pause", 9, 12)])) == 5


def test_gaps_know_their_neighbours() -> None:
    intervals = intervals_of(_step([("data", 1, 2), ("forward", 3, 4), ("backward", 6, 7)], [(4.5, 4.5, 5.5)]), [5.0])
    assert [(i.start, i.name) for i in intervals if i.kind == "host"] == [
        (0, "loop, before the batch"),
        (2, "hooks before forward"),
        (4, "between forward and backward"),
        (5.5, "between forward and backward"),
        (7, "hooks after the step"),
    ]
    after_data = intervals_of(_step([("data", 0, 1)]), [])[-1]
    assert (after_data.kind, after_data.name) == ("unexplained", "unexplained"), "nothing was trained"


def test_hidden_is_compute_beside_any_exchange() -> None:
    intervals = [Interval("forward", "", 0, 4), Interval("data", "", 4, 6), Interval("backward", "", 6, 8)]
    assert hidden_seconds([(1, 3), (2, 5), (2, 2.5), (7, 7), (7, 20)], intervals) == 4
    assert hidden_seconds([(1, 4), (2, 3), (3.5, 3.75)], intervals) == 3


times = st.integers(0, 12).map(float)
kinds = st.sampled_from(["data", "forward", "backward", "optimizer", "host", "pause"])
spans = st.lists(st.tuples(kinds, times, times).map(lambda s: (s[0], *sorted(s[1:]))), max_size=6)
waits = st.lists(st.tuples(times, times, times).map(sorted).map(tuple), max_size=3)


@given(spans, waits)
def test_intervals_cover_the_step_once(found: list[tuple], collectives: list[tuple]) -> None:
    step = _step(found, collectives)
    intervals = intervals_of(step, [5.0] * len(collectives))
    assert wall_of(step) == pytest.approx(attribute(step, [5.0] * len(collectives)).wall)
    assert (intervals[0].start, intervals[-1].end) == (0, 10)
    assert all(i.end > i.start for i in intervals)
    assert [i.end for i in intervals[:-1]] == [i.start for i in intervals[1:]]
    for interval in intervals:
        within = interval.start + 0.5
        about = [i for i in found + [("wait", *c[1:]) for c in collectives] if i[1] < within < i[2]]
        latest = max((i[1] for i in about), default=None)
        if any(i[0] == "pause" for i in about):
            assert interval.kind == "pause"
        elif latest is None:
            assert interval.kind in ("host", "unexplained")
        else:
            kind = "wait" if interval.kind in ("straggler_wait", "transfer") else interval.kind
            assert kind in {i[0] for i in about if i[1] == latest}


def _breakdown(**seconds: float) -> StepBreakdown:
    return StepBreakdown(**{**dict.fromkeys(PART_NAMES, 0.0), "wall": 10.0, **seconds})


def test_the_parts_of_a_step() -> None:
    step, rest = _step(STAGES, [(3.0, 3.0, 5.0)]), {"data_wait": 1.0, "backward": 2.0, "optimizer": 1.0, "host_overhead": 2.0}
    found = attribute(step, [4.5])
    assert found == _breakdown(forward=2.0, straggler_wait=1.5, transfer=0.5, **rest) and found.compute == 5.0
    assert attribute(step, None) == _breakdown(forward=2.0, wait=2.0, **rest)
    host = attribute(_step([*STAGES, ("host", 3.0, 3.5)]), [])
    assert (host.forward, host.host_overhead) == (3.5, 2.5), "host work inside a stage is the host's"
    outside = attribute(_step(STAGES, [(1.2, 1.2, 1.7)]), [1.4])
    parts = (outside.straggler_wait, outside.transfer, outside.host_overhead)
    assert parts == pytest.approx((0.2, 0.3, 1.5)), "a wait outside of compute"
    stages = [("data", 0.0, 1.0), ("forward", 1.0, 4.0), ("pause", 4.0, 9.0), ("data", 5.0, 6.0)]
    breakdown = attribute(_step(stages, [(6.0, 6.0, 8.0)]), [7.0])
    assert breakdown == _breakdown(wall=5.0, data_wait=1.0, forward=3.0, host_overhead=1.0)
    assert attribute(_step([("forward", 2.0, 6.0)]), []) == _breakdown(forward=4.0, host_overhead=4.0, unexplained=2.0)
    assert attribute(_step([("data", 2.0, 6.0)]), []).unexplained == 4.0, "nothing was trained"
    assert attribute(_step([]), []).unexplained == 10.0


def test_what_compute_hides_is_not_exposed() -> None:
    """Issued at 3, needed at 6, done at 6.5: half a second of it shows, three are hidden."""
    breakdown = attribute(_step(STAGES, [(3.0, 6.0, 6.5)]), [5.0])
    assert (breakdown.straggler_wait, breakdown.transfer, breakdown.hidden) == (0.0, 0.5, 3.0)
    breakdown = attribute(_step(STAGES, [(3.0, 5.0, 5.5)], hidden=[(1.0, 3.5), (4.0, 5.0), (9.5, 12.0)]), [3.0])
    assert breakdown.hidden == 3.0, "2 to 5; what goes on while the rank waits, or the host works, hides nothing"


def test_columns_and_bubble() -> None:
    parts = [_breakdown(forward=2.0, backward=2.0, optimizer=1.0, transfer=5.0), _breakdown(wall=10.0, unexplained=10.0)]
    breakdown = as_array(parts)
    assert column(breakdown, "compute").tolist() == [5.0, 0.0] == column(breakdown, "transfer").tolist()
    assert bubble(breakdown) == 0.75
    assert sum(column(breakdown, name).sum() for name in ADDENDS) == column(breakdown, "wall").sum()
    assert bubble(np.zeros((1, len(PART_NAMES)))) == 0.0


SPANS = (
    Interval("data", "fetch", 0, 1),
    Interval("forward", "forward", 2, 4),
    Interval("backward", "backward", 4, 8),
    Interval("optimizer", "optimizer", 9, 10),
)
ROWS = ResolvedCollective("rows", "rows:0", 2.0, 3.0, 3.75, 3.75, moved=100)  # arrived a second ahead
GRADIENTS = ResolvedCollective("gradients", "g:0", 6.0, 6.0, 7.0, 7.0, moved=None)
STEP = ResolvedStep(0, 11, 5, 32, SPANS, (ROWS, GRADIENTS))


def _window(*steps: tuple[ResolvedStep, list[float]], **options: bool) -> RankWindow:
    return window_of([step for step, _ in steps], [last for _, last in steps], **options)


def _sums(window: RankWindow) -> dict[str, dict[str, float]]:
    return {name: {key: value for key, value in vars(sums).items() if value} for name, sums in window.exchanges.items()}


def test_the_steps_themselves() -> None:
    other = ResolvedStep(11, 12, 6, 31)
    window = window_of([replace(STEP, features="features", predicted=1.5), other], [[3.25, 6.5], []])
    assert (window.steps, window.samples, window.features) == ([5, 6], [32, 31], ["features", None])
    assert (window.predicted, window.breakdown.shape) == ([1.5, None], (2, len(PART_NAMES)))
    assert column(window.breakdown, "wall").tolist() == [11, 1]
    assert column(window.breakdown, "straggler_wait").tolist() == [0.75, 0]
    assert column(window.breakdown, "transfer").tolist() == [1.0, 0]
    assert [(each.start, each.keys) for each in window.segments] == [(0, ("rows:0", "g:0")), (11, ())]


def test_sums_of_exchanges_by_name() -> None:
    last = (STEP, [3.25, 6.5]), (STEP, [2.0, 6.0])
    rows = {"count": 2, "straggler_wait": 0.25, "transfer": 0.5 + 0.75, "hidden": 2 * 1.0, "moved": 200, "last": 1}
    gradients = {"count": 2, "straggler_wait": 0.5, "transfer": 0.5 + 1.0, "unknown": 2, "last": 1}
    assert _sums(_window(*last)) == {"rows": rows, "gradients": gradients}
    alone = _sums(_window(*last, alone=True))
    assert "last" not in alone["rows"] and "last" not in alone["gradients"], "a rank does not know who came last"


def test_undivided_waits_are_one_figure_of_their_exchange_and_no_rank_came_last() -> None:
    window = _window((STEP, [3.25, 6.5]), divided=False)
    assert column(window.breakdown, "wait").tolist() == [1.75]
    assert not column(window.breakdown, "straggler_wait").any() and not column(window.breakdown, "transfer").any()
    rows = {"count": 1, "wait": 0.75, "hidden": 1.0, "moved": 100}
    assert _sums(window) == {"rows": rows, "gradients": {"count": 1, "wait": 1.0, "unknown": 1}}


def test_exchanges_of_other_threads_and_inside_a_pause() -> None:
    rows = ResolvedCollective("rows", "", 7.0, 7.0, 7.0, 12.5, moved=50)
    following = ResolvedStep(11, 13, 6, 32, (Interval("forward", "forward", 11, 13),), (), (rows,))
    window = _window((ResolvedStep(0, 11, 5, 32, SPANS, (), (rows,)), []), (following, []))
    assert _sums(window) == {"rows (background)": {"count": 1, "hidden": pytest.approx(2.0 + 1.5), "moved": 50}}
    assert column(window.breakdown, "hidden").tolist() == [2.0, 1.5]
    bound = ResolvedStep(0, 11, 5, 32, SPANS, (), (rows._replace(at_most=True),))
    assert column(_window((bound, [])).breakdown, "hidden").tolist() == [0.0], "for which only a bound is known"
    pause = Interval("pause", "validation", 5.5, 7.0)
    paused = ResolvedStep(0, 11, 5, 32, (*SPANS, pause), (ROWS, GRADIENTS))
    assert list(_window((paused, [3.25, 6.5])).exchanges) == ["rows"]


def test_host_overhead_by_section() -> None:
    host = _window((STEP, [2.0, 6.0]), (STEP, [2.0, 6.0])).host
    assert host == pytest.approx({"hooks before forward": 2, "between backward and optimizer": 2, "hooks after the step": 2})
    assert _window((ResolvedStep(0, 5), [])).host == {}, "unexplained time is not the host's"
