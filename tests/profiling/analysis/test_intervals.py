"""A step cut into intervals without overlap."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.breakdown import attribute
from lightning_freescale.profiling.analysis.intervals import (
    Arrival,
    arrivals_of,
    hidden_seconds,
    intervals_of,
    last_arrivals,
    wall_of,
)
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep

times = st.integers(0, 12).map(float)
kinds = st.sampled_from(["data", "forward", "backward", "optimizer", "host", "pause"])
spans = st.lists(st.tuples(kinds, times, times), max_size=6)
waits = st.lists(st.tuples(times, times, times, times), max_size=3)


def _step(spans: list[tuple], collectives: list[tuple]) -> ResolvedStep:
    return ResolvedStep(
        0.0,
        10.0,
        spans=tuple(Interval(kind, kind, *sorted(ends)) for kind, *ends in spans),
        collectives=tuple(ResolvedCollective("a", str(k), *c, c[-1]) for k, c in enumerate(collectives)),
    )


def _cut(spans: list[tuple], collectives: Sequence[tuple] = (), last: Sequence[float] | None = ()) -> list[tuple]:
    return [(i.kind, i.start, i.end) for i in intervals_of(_step(spans, collectives), last)]


def test_wait_is_cut_where_the_last_rank_arrives() -> None:
    whole = [("forward", 0.0, 10.0)]
    cut = _cut(whole, [(3.0, 4.0, 8.0)], [6.0])
    assert cut == [("forward", 0, 4), ("straggler_wait", 4, 6), ("transfer", 6, 8), ("forward", 8, 10)]
    assert _cut(whole, [(3.0, 4.0, 8.0)], [2.0])[1] == ("transfer", 4, 8)
    assert _cut(whole, [(3.0, 4.0, 8.0)], [9.0])[1] == ("straggler_wait", 4, 8)


def test_wait_is_undivided_where_nobody_knows_when_the_last_rank_arrived() -> None:
    step = _step([("forward", 0.0, 10.0)], [(3.0, 4.0, 6.0), (5.0, 6.0, 8.0)])
    assert [(i.kind, i.name, i.start, i.end) for i in intervals_of(step, None)] == [
        ("forward", "forward", 0, 4), ("wait", "a", 4, 6), ("wait", "a", 6, 8), ("forward", "forward", 8, 10),
    ]  # fmt: skip


def test_the_last_arrival_at_each_collective_and_whose_it_is() -> None:
    ranks = [_step([], [(at, 9.0, 9.5) for at in times]) for times in ((3.0, 6.0), (4.0,), (2.0, 6.0))]
    last = last_arrivals(map(arrivals_of, ranks))
    assert last == {"0": Arrival(4.0, 1), "1": Arrival(6.0, 0)}, "of ranks that arrive at once the first counts"


@pytest.mark.parametrize("last", [2.0, 5.0, 7.5])
def test_what_begins_within_a_wait_counts_whole(last: float) -> None:
    """Whenever the last rank arrives."""
    cut = _cut([("forward", 4.0, 7.0)], [(3.0, 3.0, 8.0)], [last])
    assert ("forward", 4, 7) in cut
    assert sum(end - start for kind, start, end in cut if kind in ("straggler_wait", "transfer")) == 2


def test_pause_goes_before_all() -> None:
    cut = _cut([("pause", 2, 6), ("forward", 3, 8)])
    assert cut == [("unexplained", 0, 2), ("pause", 2, 6), ("forward", 6, 8), ("host", 8, 10)]


def test_a_pause_inside_another_is_taken_out_of_the_wall_time_once() -> None:
    """A checkpoint that validation saves; or two that overlap, one beyond the step."""
    assert wall_of(_step([("pause", 1, 8), ("pause", 4, 8), ("forward", 8, 9)], [])) == 3
    assert wall_of(_step([("pause", 1, 4), ("pause", 3, 5), ("pause", 9, 12)], [])) == 5


@given(spans)
def test_the_wall_time_is_that_of_the_breakdown(found: list[tuple]) -> None:
    step = _step(found, [])
    assert wall_of(step) == pytest.approx(attribute(step, ()).wall)


def test_gaps_know_their_neighbours() -> None:
    intervals = intervals_of(_step([("data", 1, 2), ("forward", 3, 4), ("backward", 6, 7)], [(4.5, 4.5, 5.5)]), [5.0])
    gaps = [(i.start, i.name) for i in intervals if i.kind == "host"]
    assert gaps == [
        (0, "loop, before the batch"),
        (2, "hooks before forward"),
        (4, "between forward and backward"),
        (5.5, "between forward and backward"),
        (7, "hooks after the step"),
    ]
    after_data = intervals_of(_step([("data", 0, 1)], []), [])[-1]
    assert (after_data.kind, after_data.name) == ("unexplained", "unexplained"), "nothing was trained"


def test_hidden_is_compute_beside_any_exchange() -> None:
    intervals = [Interval("forward", "", 0, 4), Interval("data", "", 4, 6), Interval("backward", "", 6, 8)]
    assert hidden_seconds([(1, 3), (2, 5), (2, 2.5), (7, 7), (7, 20)], intervals) == 4
    assert hidden_seconds([(1, 4), (2, 3), (3.5, 3.75)], intervals) == 3


@given(spans, waits)
def test_intervals_cover_the_step_once(found: list[tuple], collectives: list[tuple]) -> None:
    collectives = [(min(a, *ends), *sorted(ends)) for a, _, *ends in collectives]
    intervals = intervals_of(_step(found, collectives), [5.0] * len(collectives))
    assert (intervals[0].start, intervals[-1].end) == (0, 10)
    assert all(i.end > i.start for i in intervals)
    assert [i.end for i in intervals[:-1]] == [i.start for i in intervals[1:]]
    for interval in intervals:
        within = interval.start + 0.5
        about = [(s[0], *sorted(s[1:])) for s in found] + [("wait", *c[1:]) for c in collectives]
        about = [i for i in about if i[1] < within < i[2]]
        latest = max((i[1] for i in about), default=None)
        if any(i[0] == "pause" for i in about):
            assert interval.kind == "pause"
        elif latest is None:
            assert interval.kind in ("host", "unexplained")
        else:
            kind = "wait" if interval.kind in ("straggler_wait", "transfer") else interval.kind
            assert kind in {i[0] for i in about if i[1] == latest}
