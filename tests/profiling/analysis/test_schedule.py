"""Steps of all ranks in one order."""

from __future__ import annotations

import numpy as np

from lightning_freescale.profiling.analysis.schedule import Schedule
from lightning_freescale.profiling.analysis.segments import COLUMNS, RankSegments


def _rank(keys: str, start: float = 0.0, end: float = 1.0) -> RankSegments:
    seconds = np.arange(1.0, (len(keys) + 1) * len(COLUMNS) + 1).reshape(-1, len(COLUMNS)) * 1e-3
    return RankSegments(start, end, tuple(keys), tuple(keys), seconds)


def test_rows_follow_the_order_that_all_ranks_kept() -> None:
    schedule = Schedule.of([[_rank("acd"), _rank("bd")]])
    part = np.isfinite(schedule.column("transfer"))
    assert part.tolist() in ([[True, False], [False, True], [True, False], [True, True], [False, False]],
                             [[True, False], [True, False], [False, True], [True, True], [False, False]],
                             [[False, True], [True, False], [True, False], [True, True], [False, False]])  # fmt: skip
    passes = ~part.any(axis=1)
    assert passes.tolist() == [False] * 4 + [True], "what follows the last collective"
    assert (schedule.column("compute")[:-1][~part[:-1]] == 0).all()
    for rank, laps in enumerate((_rank("acd"), _rank("bd"))):
        mine = np.append(np.flatnonzero(part[:, rank]), 4)
        np.testing.assert_array_equal(schedule.column("compute")[mine, rank], laps.seconds[:, 0])
        np.testing.assert_array_equal(schedule.column("ahead")[mine, rank], laps.seconds[:, COLUMNS.index("ahead")])


def test_seams() -> None:
    steps = [[_rank("a", 0, 1)], [_rank("a", 1, 2)], [_rank("a", 2.5, 3)], [_rank("aa", 3, 4)], [_rank("a", 4, 5)]]
    schedule = Schedule.of(steps)
    assert schedule.seams.tolist() == [True, False, True, True]
    assert schedule.left_out == 1
    pause = 1e-3 * sum(4 + 6 * row for row in range(2))
    np.testing.assert_allclose(schedule.walls[:, 0], np.array([1, 1, 0.5, 1]) - pause)


def test_sums_and_values_of_steps() -> None:
    schedule = Schedule.of([[_rank("a", 0, 1)], [_rank("ab", 1, 2)]])
    np.testing.assert_allclose(schedule.per_step(np.ones((5, 1)))[:, 0], [2, 3])
    np.testing.assert_allclose(schedule.per_row(np.array([[7.0], [8.0]]))[:, 0], [7, 7, 8, 8, 8])
