"""The split of a step's wall time, on steps whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from lightning_freescale.profiling.attribution import Parts, ResolvedStep, attribute, bubble
from lightning_freescale.profiling.clock import offset_to_rank_zero
from lightning_freescale.profiling.gather import gather_parts
from lightning_freescale.profiling.report import BubbleReport
from lightning_freescale.testing import run_distributed


def _step(*collectives: tuple[str, float, float, float], spans: list | None = None) -> ResolvedStep:
    return ResolvedStep(
        0.0, 10.0, 1, spans or [("data", "fetch", 0.0, 1.0), ("compute", "forward", 2.0, 9.0)], list(collectives)
    )


def test_wait_is_split_at_the_last_arrival() -> None:
    step = _step(("a2a", 3.0, 3.0, 7.0))
    assert attribute(step, [6.0]) == Parts(10.0, 1.0, 3.0, 3.0, 1.0, 2.0, 0.0)
    assert attribute(step, [3.0]).straggler_wait == 0.0
    assert attribute(step, [8.0]) == Parts(10.0, 1.0, 3.0, 4.0, 0.0, 2.0, 0.0)


def test_what_compute_hid_is_not_exposed() -> None:
    """Issued at 3, needed at 6, done at 6.5: half a second of it shows."""
    parts = attribute(_step(("a2a", 3.0, 6.0, 6.5)), [5.0])
    assert (parts.straggler_wait, parts.transfer) == (0.0, 0.5)


def test_pauses_are_no_part_of_the_step() -> None:
    spans = [("compute", "forward", 1.0, 4.0), ("pause", "validation", 4.0, 9.0), ("data", "fetch", 5.0, 6.0)]
    parts = attribute(_step(("reduce", 6.0, 6.0, 8.0), spans=spans), [7.0])
    assert parts == Parts(5.0, 0.0, 3.0, 0.0, 0.0, 2.0, 0.0)


def test_wait_outside_of_compute() -> None:
    assert attribute(_step(("sigterm", 1.0, 1.0, 2.0)), [2.0]) == Parts(10.0, 1.0, 7.0, 1.0, 0.0, 1.0, 0.0)


def _gathered(name: str) -> list:
    rank = dist.get_rank()
    steps = [_step((name if rank else "a2a", 3.0 + rank, 3.0 + rank, 7.0))]
    parts, samples = gather_parts(steps, dist.group.WORLD)
    return [parts, samples]


def test_gathered_over_ranks() -> None:
    for parts, samples in run_distributed(_gathered, 2, "a2a"):
        assert parts.shape == (1, 2, 7)
        assert samples.tolist() == [[1, 1]]
        assert parts[0, :, 3].tolist() == [1.0, 0.0], "rank 0 waits one second for rank 1"
    with pytest.raises(Exception, match="different collectives"):
        run_distributed(_gathered, 2, "other")


def test_clock_offset_on_one_machine_is_nil() -> None:
    for offset in run_distributed(lambda: offset_to_rank_zero(dist.group.WORLD), 3):
        assert abs(offset) < 0.01


def test_report() -> None:
    step = [[2.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], [2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]]
    report = BubbleReport(np.array([step] * 3), np.array([[1, 3]] * 3))
    assert report.bubble == bubble(report.parts) == 0.25
    assert report.shares["straggler_wait"] == 0.25
    assert report.compute_imbalance == pytest.approx(2 / 1.5)
    assert report.samples_per_second == 2.0
    assert report.scalars()["freescale/bubble"] == 0.25
    assert "bubble 25.0%" in str(report)
    assert "1.33x faster" in str(report)
