"""The split of a step's wall time, on steps whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.breakdown import (
    ADDENDS,
    PART_NAMES,
    StepBreakdown,
    as_array,
    attribute,
    bubble,
    column,
)
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep

STAGES = [("data", 0.0, 1.0), ("forward", 2.0, 6.0), ("backward", 6.0, 8.0), ("optimizer", 8.0, 9.0)]


def _step(collectives: list[tuple[float, float, float]], stages: list = STAGES, hidden: list = ()) -> ResolvedStep:
    spans = tuple(Interval(kind, kind, start, end) for kind, start, end in stages)
    seen = tuple(ResolvedCollective("a2a", str(k), *times, times[-1]) for k, times in enumerate(collectives))
    elsewhere = tuple(ResolvedCollective("lane", "", start, start, start, end) for start, end in hidden)
    return ResolvedStep(0.0, 10.0, spans=spans, collectives=seen, hidden=elsewhere)


def _breakdown(**seconds: float) -> StepBreakdown:
    return StepBreakdown(**{**dict.fromkeys(PART_NAMES, 0.0), "wall": 10.0, **seconds})


def test_wait_is_split_at_the_last_arrival() -> None:
    step, rest = _step([(3.0, 3.0, 5.0)]), {"data_wait": 1.0, "backward": 2.0, "optimizer": 1.0, "host_overhead": 2.0}
    assert attribute(step, [4.5]) == _breakdown(forward=2.0, straggler_wait=1.5, transfer=0.5, **rest)
    assert attribute(step, [3.0]).straggler_wait == 0.0
    assert attribute(step, [8.0]) == _breakdown(forward=2.0, straggler_wait=2.0, **rest), (
        "a clock that is off moves the split only"
    )
    assert attribute(step, [4.0]).compute == 5.0


def test_a_wait_that_cannot_be_divided_is_one_figure() -> None:
    found = attribute(_step([(3.0, 3.0, 5.0)]), None)
    assert (found.wait, found.straggler_wait, found.transfer) == (2.0, 0.0, 0.0)
    assert sum(getattr(found, name) for name in ADDENDS) == found.wall


def test_what_compute_hid_is_not_exposed() -> None:
    """Issued at 3, needed at 6, done at 6.5: half a second of it shows, three are hidden."""
    breakdown = attribute(_step([(3.0, 6.0, 6.5)]), [5.0])
    assert (breakdown.straggler_wait, breakdown.transfer, breakdown.hidden) == (0.0, 0.5, 3.0)


def test_exchanges_of_other_threads_are_hidden_once_and_only_behind_compute() -> None:
    breakdown = attribute(_step([(3.0, 5.0, 5.5)], hidden=[(1.0, 3.5), (4.0, 5.0), (9.5, 12.0)]), [3.0])
    assert breakdown.hidden == 3.0, "2 to 5; what goes on while the rank waits, or the host works, hides nothing"


def test_pauses_are_no_part_of_the_step() -> None:
    stages = [("data", 0.0, 1.0), ("forward", 1.0, 4.0), ("pause", 4.0, 9.0), ("data", 5.0, 6.0)]
    breakdown = attribute(_step([(6.0, 6.0, 8.0)], stages), [7.0])
    assert breakdown == _breakdown(wall=5.0, data_wait=1.0, forward=3.0, host_overhead=1.0)


def test_time_between_known_stages_is_the_hosts_and_other_time_unexplained() -> None:
    assert attribute(_step([], [("forward", 2.0, 6.0)]), []) == _breakdown(forward=4.0, host_overhead=4.0, unexplained=2.0)
    assert attribute(_step([], [("data", 2.0, 6.0)]), []).unexplained == 4.0, "nothing was trained"
    assert attribute(_step([], []), []).unexplained == 10.0


def test_wait_outside_of_compute() -> None:
    breakdown = attribute(_step([(1.2, 1.2, 1.7)]), [1.4])
    assert breakdown.straggler_wait == pytest.approx(0.2)
    assert breakdown.transfer == pytest.approx(0.3)
    assert breakdown.host_overhead == pytest.approx(1.5)


def test_host_work_inside_a_stage_is_the_hosts() -> None:
    breakdown = attribute(_step([], [*STAGES, ("host", 3.0, 3.5)]), [])
    assert (breakdown.forward, breakdown.host_overhead) == (3.5, 2.5)


def test_columns_and_bubble() -> None:
    breakdown = as_array(
        [_breakdown(forward=2.0, backward=2.0, optimizer=1.0, transfer=5.0), _breakdown(wall=10.0, unexplained=10.0)]
    )
    assert column(breakdown, "compute").tolist() == [5.0, 0.0]
    assert column(breakdown, "transfer").tolist() == [5.0, 0.0]
    assert bubble(breakdown) == 0.75
    assert sum(breakdown[:, PART_NAMES.index(name)].sum() for name in ADDENDS) == breakdown[:, 0].sum()
    assert bubble(np.zeros((1, len(PART_NAMES)))) == 0.0
