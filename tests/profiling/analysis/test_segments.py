"""A step as segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.breakdown import attribute
from lightning_freescale.profiling.analysis.intervals import intervals_of
from lightning_freescale.profiling.analysis.segments import COLUMNS, RankSegments, Schedule, segments_of
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep
from tests.helpers.profiled_runs import random_run, run_segments


def _segments(spans: list[tuple], collectives: list[tuple], last: list[float], end: float = 10.0) -> RankSegments:
    step = ResolvedStep(
        0.0,
        end,
        spans=tuple(Interval(kind, kind, *times) for kind, *times in spans),
        collectives=tuple(ResolvedCollective(key, key, *times) for key, *times in collectives),
    )
    return segments_of(step, last, intervals_of(step, last))


def _rows(segments: RankSegments) -> list[dict[str, float]]:
    return [{name: round(value, 9) for name, value in zip(COLUMNS, row) if abs(value) > 1e-9} for row in segments.seconds]


def test_a_segment_ends_with_a_collective() -> None:
    spans = [("data", 0, 1), ("forward", 2, 4), ("backward", 5, 9)]
    segments = _segments(spans, [("b", 7.0, 7.5, 8.5, 8.5), ("a", 1.5, 4.0, 5.0, 5.0)], [8.0, 3.0])
    assert segments.keys == ("a", "b")
    assert (segments.start, segments.end) == (0.0, 10.0)
    assert _rows(segments) == [
        {"data": 1, "compute": 2, "other": 1, "ahead": 2.5, "transfer": 2},
        {"compute": 2.5, "ahead": 0.5, "transfer": 0.5},
        {"compute": 0.5, "other": 1},
    ]


def test_wait_without_length_parts_a_span() -> None:
    segments = _segments([("forward", 0, 10)], [("a", 2.0, 4.0, 4.0, 3.0)], [2.5])
    assert _rows(segments) == [{"compute": 4, "ahead": 2, "transfer": 0.5}, {"compute": 6}]


def test_end_that_is_noticed_late() -> None:
    """The exchange is over at 5, the rank goes on at 6."""
    segments = _segments([("forward", 0, 4), ("forward", 6, 10)], [("a", 4.0, 4.0, 6.0, 5.0)], [4.5])
    assert _rows(segments) == [{"compute": 4, "transfer": 0.5}, {"compute": 4, "other": 1}]


def test_work_while_waiting() -> None:
    """Done while the rank waits from 2 to 8: as if it had begun to wait 3 s later."""
    segments = _segments([("forward", 0, 2), ("forward", 3, 6), ("backward", 8, 10)], [("a", 1.0, 2.0, 8.0, 8.0)], [4.0])
    assert _rows(segments) == [{"compute": 5, "ahead": 4, "transfer": 4}, {"compute": 2}]


def test_wait_within_a_wait() -> None:
    spans = [("forward", 0, 2), ("forward", 6, 7)]
    segments = _segments(spans, [("a", 2.0, 2.0, 8.0, 8.0), ("b", 1.0, 4.0, 5.0, 5.0)], [2.0, 4.5])
    assert segments.keys == ("a", "b")
    assert _rows(segments) == [{"compute": 3, "ahead": 1, "transfer": 6}, {"ahead": 7, "transfer": 0.5}, {"other": 2}]


def test_pause_and_disagreeing_clocks() -> None:
    segments = _segments([("pause", 0, 3), ("forward", 3, 5)], [("a", 5.0, 5.0, 6.0, 6.0)], [7.0])
    assert _rows(segments) == [{"pause": 3, "compute": 2, "transfer": -1}, {"other": 4}]


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_work_is_that_of_the_breakdown(seed: int) -> None:
    run = random_run(seed, 3, 4)
    for ranks, made in zip(run, run_segments(run)):
        for step, rank in zip(ranks, made):
            breakdown = attribute(step, [c.done for c in step.collectives])
            compute, data = rank.seconds[:, 0].sum(), rank.seconds[:, 1].sum()
            assert (compute, data) == (pytest.approx(breakdown.compute), pytest.approx(breakdown.data_wait))
            assert rank.end - rank.start - rank.seconds[:, 3].sum() == pytest.approx(breakdown.wall)
            assert np.all(rank.seconds[:, :5] >= 0)


def _rank(keys: str, start: float = 0.0, end: float = 1.0) -> RankSegments:
    seconds = np.arange(1.0, (len(keys) + 1) * len(COLUMNS) + 1).reshape(-1, len(COLUMNS)) * 1e-3
    return RankSegments(start, end, tuple(keys), seconds)


def test_rows_follow_the_order_that_all_ranks_kept() -> None:
    schedule = Schedule.from_steps([[_rank("acd"), _rank("bd")]])
    part = np.isfinite(schedule.column("transfer"))
    assert part.tolist() in ([[True, False], [False, True], [True, False], [True, True], [False, False]],
                             [[True, False], [True, False], [False, True], [True, True], [False, False]],
                             [[False, True], [True, False], [True, False], [True, True], [False, False]])  # fmt: skip
    passes = ~part.any(axis=1)
    assert passes.tolist() == [False] * 4 + [True], "what follows the last collective"
    assert (schedule.column("compute")[:-1][~part[:-1]] == 0).all()
    for rank, segments in enumerate((_rank("acd"), _rank("bd"))):
        mine = np.append(np.flatnonzero(part[:, rank]), 4)
        np.testing.assert_array_equal(schedule.column("compute")[mine, rank], segments.seconds[:, 0])
        np.testing.assert_array_equal(schedule.column("ahead")[mine, rank], segments.seconds[:, COLUMNS.index("ahead")])


def test_seams() -> None:
    steps = [[_rank("a", 0, 1)], [_rank("a", 1, 2)], [_rank("a", 2.5, 3)], [_rank("aa", 3, 4)], [_rank("a", 4, 5)]]
    schedule = Schedule.from_steps(steps)
    assert schedule.seams.tolist() == [True, False, True, True]
    assert schedule.left_out == 1
    pause = 1e-3 * sum(4 + 6 * row for row in range(2))
    np.testing.assert_allclose(schedule.walls[:, 0], np.array([1, 1, 0.5, 1]) - pause)


def test_sums_and_values_of_steps() -> None:
    schedule = Schedule.from_steps([[_rank("a", 0, 1)], [_rank("ab", 1, 2)]])
    np.testing.assert_allclose(schedule.per_step(np.ones((5, 1)))[:, 0], [2, 3])
    np.testing.assert_allclose(schedule.per_row(np.array([[7.0], [8.0]]))[:, 0], [7, 7, 8, 8, 8])


def _exchange_of_messages(rank: int, gap: float = 1e-5) -> RankSegments:
    """Both ranks send and receive, and wait for what they sent first; rank 1 is 3 s late."""
    keys = ["world 0>1 0:0.0", "world 1>0 0:0.0"][:: 1 if rank == 0 else -1]
    called = 1.0 + 3.0 * rank
    names = ("send", "recv")
    ends = (4.5, 4.5 + gap + 0.5)
    waits = ((called, called, ends[0]), (called, ends[0] + gap, ends[1]))
    step = ResolvedStep(
        0.0,
        6.0,
        spans=(Interval("forward", "forward", 0.0, called),),
        collectives=tuple(ResolvedCollective(n, k, *times, times[-1]) for n, k, times in zip(names, keys, waits)),
    )
    last = [4.0, 4.0]
    return segments_of(step, last, intervals_of(step, last))


def test_ranks_agree_on_the_order_of_messages_that_they_wait_for_together() -> None:
    schedule = Schedule.from_steps([[_exchange_of_messages(0), _exchange_of_messages(1)]])
    assert schedule.left_out == 0
    assert schedule.column("compute")[:, 0].sum() == pytest.approx(1.0)
    assert schedule.column("compute")[:, 1].sum() == pytest.approx(4.0)
    # with work in between, each rank waits for the other's second message: no order would do
    assert Schedule.from_steps([[_exchange_of_messages(0, 0.1), _exchange_of_messages(1, 0.1)]]).left_out == 1


def test_messages_of_a_pair_stay_in_their_order() -> None:
    keys = [f"world 0>1 0:3.{number}" for number in (9, 10)]
    collectives = tuple(ResolvedCollective("recv", key, 1.0, 1.0 + k, 2.0 + k, 2.0 + k) for k, key in enumerate(keys))
    segments = segments_of(ResolvedStep(0.0, 4.0, collectives=collectives), [1.0, 1.0], [])
    assert segments.keys == tuple(keys)
