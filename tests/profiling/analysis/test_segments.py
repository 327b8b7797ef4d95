"""A step as laps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.breakdown import attribute
from lightning_freescale.profiling.analysis.intervals import intervals_of
from lightning_freescale.profiling.analysis.segments import COLUMNS, RankSegments, laps_of
from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedSpan, ResolvedStep
from tests.helpers.profiled_runs import laps, random_run


def _laps(spans: list[tuple], collectives: list[tuple], last: list[float], end: float = 10.0) -> RankSegments:
    step = ResolvedStep(
        0.0,
        end,
        spans=tuple(ResolvedSpan(kind, kind, *times) for kind, *times in spans),
        collectives=tuple(ResolvedCollective(key, key, *times) for key, *times in collectives),
    )
    return laps_of(step, last, intervals_of(step, last))


def _rows(laps: RankSegments) -> list[dict[str, float]]:
    return [{name: round(value, 9) for name, value in zip(COLUMNS, row) if abs(value) > 1e-9} for row in laps.seconds]


def test_a_lap_ends_with_a_collective() -> None:
    spans = [("data", 0, 1), ("forward", 2, 4), ("backward", 5, 9)]
    laps = _laps(spans, [("b", 7.0, 7.5, 8.5, 8.5), ("a", 1.5, 4.0, 5.0, 5.0)], [8.0, 3.0])
    assert laps.keys == ("a", "b")
    assert (laps.start, laps.end) == (0.0, 10.0)
    assert _rows(laps) == [
        {"data": 1, "compute": 2, "other": 1, "ahead": 2.5, "transfer": 2},
        {"compute": 2.5, "ahead": 0.5, "transfer": 0.5},
        {"compute": 0.5, "other": 1},
    ]


def test_wait_without_length_parts_a_span() -> None:
    laps = _laps([("forward", 0, 10)], [("a", 2.0, 4.0, 4.0, 3.0)], [2.5])
    assert _rows(laps) == [{"compute": 4, "ahead": 2, "transfer": 0.5}, {"compute": 6}]


def test_end_that_is_noticed_late() -> None:
    """The exchange is over at 5, the rank goes on at 6."""
    laps = _laps([("forward", 0, 4), ("forward", 6, 10)], [("a", 4.0, 4.0, 6.0, 5.0)], [4.5])
    assert _rows(laps) == [{"compute": 4, "transfer": 0.5}, {"compute": 4, "other": 1}]


def test_work_while_waiting() -> None:
    """Done while the rank waits from 2 to 8: as if it had begun to wait 3 s later."""
    laps = _laps([("forward", 0, 2), ("forward", 3, 6), ("backward", 8, 10)], [("a", 1.0, 2.0, 8.0, 8.0)], [4.0])
    assert _rows(laps) == [{"compute": 5, "ahead": 4, "transfer": 4}, {"compute": 2}]


def test_wait_within_a_wait() -> None:
    spans = [("forward", 0, 2), ("forward", 6, 7)]
    laps = _laps(spans, [("a", 2.0, 2.0, 8.0, 8.0), ("b", 1.0, 4.0, 5.0, 5.0)], [2.0, 4.5])
    assert laps.keys == ("a", "b")
    assert _rows(laps) == [{"compute": 3, "ahead": 1, "transfer": 6}, {"ahead": 7, "transfer": 0.5}, {"other": 2}]


def test_pause_and_disagreeing_clocks() -> None:
    laps = _laps([("pause", 0, 3), ("forward", 3, 5)], [("a", 5.0, 5.0, 6.0, 6.0)], [7.0])
    assert _rows(laps) == [{"pause": 3, "compute": 2, "transfer": -1}, {"other": 4}]


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_work_is_that_of_the_parts(seed: int) -> None:
    run = random_run(seed, 3, 4)
    for ranks, made in zip(run, laps(run)):
        for step, rank in zip(ranks, made):
            parts = attribute(step, [c.done for c in step.collectives])
            compute, data = rank.seconds[:, 0].sum(), rank.seconds[:, 1].sum()
            assert (compute, data) == (pytest.approx(parts.compute), pytest.approx(parts.data_wait))
            assert rank.end - rank.start - rank.seconds[:, 3].sum() == pytest.approx(parts.wall)
            assert np.all(rank.seconds[:, :5] >= 0)
