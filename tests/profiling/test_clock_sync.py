"""Rank 0's clock on every rank: how good it is, what it claims to be wrong by at most, and what a lost rank does to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_freescale.profiling import clock_sync as module
from lightning_freescale.profiling.clock_sync import WANDER, WORST_DRIFT, Alignment, Measurement, Offsets
from lightning_freescale.testing import run_distributed

OFFSET = 1000.0  # rank 0's clock minus ours
UNIT = 2.0**-10  # exact in floating point


def units(number):
    """Up to what the clocks may drift in a round."""
    return pytest.approx(number * UNIT, rel=0.01)


def stamps(*rounds, drift=0.0):
    """Rounds of (units the question took, units rank 0 needed, units the answer took), one after the other."""
    rows, now = [], 0.0
    for forth, answering, back in rounds:
        heard, answered = now + forth, now + forth + answering
        rows.append([now, heard * (1 + drift) + OFFSET / UNIT, answered * (1 + drift) + OFFSET / UNIT, answered + back])
        now = answered + back + 1
    return np.array(rows) * UNIT


@pytest.mark.parametrize(
    ("rounds", "margin", "round_trip", "time"),
    [
        ([(4, 0, 4)], 4, 8, 4),
        ([(4, 100, 4)], 4, 8, 54),  # the time rank 0 takes to answer does not count
        ([(6, 0, 4), (4, 0, 7)], 4, 10, 10.5),  # the fastest question and the fastest answer: asked at 11, heard at 10
    ],
)
def test_the_offset_is_half_way_between_the_closest_bounds(rounds, margin, round_trip, time):
    found = Measurement.from_stamps(stamps(*rounds))
    assert (found.offset, found.margin, found.round_trip) == (OFFSET, units(margin), round_trip * UNIT)
    assert (found.time, found.rounds, found.rejected) == (time * UNIT, len(rounds), 0)


@pytest.mark.parametrize("slow", [(30, 0, 2), (2, 0, 30)])
def test_slow_rounds_are_rejected(slow):
    found = Measurement.from_stamps(stamps((4, 0, 21), (4, 0, 4), (4, 0, 20), slow))
    assert (found.rounds, found.rejected) == (4, 2)
    assert (found.offset, found.margin) == (OFFSET, units(4))  # not 1 off, from the way of 2
    assert found.time == 30 * UNIT  # the middle of the second, the best


@pytest.mark.parametrize("drift", [0.0, WORST_DRIFT, -WORST_DRIFT])
def test_the_truth_is_within_the_margin_whatever_the_ways_take(drift):
    """Also where one way takes next to nothing, so that the clocks' drift from round to round counts."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        ways = draw.integers([0, 0, 1000], [2, 2, 1100], size=(draw.integers(1, 60), 3))[:, draw.permutation(3)]
        found = Measurement.from_stamps(stamps(*ways.tolist(), drift=drift))
        truth = OFFSET + found.time * drift
        assert abs(found.offset - truth) <= found.margin + 1e-9  # for rounding


@pytest.mark.parametrize(("size", "rounds", "asked"), [(2, 40, 40), (17, 40, 40), (65, 40, 10), (257, 40, 8), (257, 3, 3)])
def test_many_ranks_ask_less_often(size, rounds, asked, monkeypatch):
    class Group:
        def size(self):
            return size

        def rank(self):
            return 0

    counts = []
    monkeypatch.setattr(module, "_Line", lambda group, other: other)
    monkeypatch.setattr(module, "_answer", lambda other, clock, rounds: iter([counts.append((other, rounds))]))
    assert module.measure(Group(), None, rounds) is None
    assert counts == [(other, asked) for other in range(1, size)]


pytestmark = pytest.mark.xdist_group("timing")
HOUR = 3600.0
GAP = 1e5  # so long that what a busy machine does to round trips is little beside what clocks do
LATE = 0.1


class Clock:
    """Clock of a rank with an offset of hours and a drift, which can skip time."""

    def __init__(self, offset: float, drift: float) -> None:
        self.offset, self.rate, self.skipped = offset, 1 + drift, 0.0

    def __call__(self) -> float:
        return self.shows(self.true())

    def true(self) -> float:
        return time.perf_counter() + self.skipped

    def shows(self, true: Any) -> Any:
        return true * self.rate + self.offset


def _claims(alignment: Alignment, clocks: Sequence[Clock], true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At true times: how far the alignment is from what rank 0's clock showed, and what it says this is at most."""
    shown = clocks[dist.get_rank()].shows(true)
    return np.abs(alignment.to_rank_zero(shown) - clocks[0].shows(true)), alignment.uncertainty_at(shown)


def _synced(drifts: Sequence[float], syncs: int) -> tuple[Alignment, list[Clock], np.ndarray]:
    """Return an alignment after ``syncs`` measurements, ``GAP`` seconds apart, the clocks of all ranks, and the times."""
    everyone = [Clock(-7 * HOUR * rank + HOUR, drift) for rank, drift in enumerate(drifts)]
    alignment, times = Alignment(everyone[dist.get_rank()]), []
    for index in range(syncs):
        for clock in everyone:
            clock.skipped = GAP * index
        alignment.measure_offset(dist.group.WORLD)
        times.append(everyone[0].true())
    return alignment, everyone, np.array(times)


def test_one_clock_for_all_ranks() -> None:
    drifts = [3e-5, 2e-4, -2e-4, 0.0]
    far = np.array([-HOUR, -1.0, 1.0, HOUR])

    def rank() -> None:
        own = dist.get_rank()
        alignment, everyone, times = _synced(drifts, 3)
        error, claim = _claims(alignment, everyone, np.linspace(times[0], times[-1], 101))
        assert (error <= claim).all() and claim.max() < 1.0, "the clocks drift by 3 to 23 s from one to the next"
        error, claim = _claims(alignment, everyone, np.where(far < 0, times[0], times[-1]) + far)
        assert (error <= claim).all() and claim.max() < 0.2, "the drift alone: up to 0.8 in an hour"
        figures = alignment.figures()
        assert figures["syncs"] == 3 and figures["drift"] == pytest.approx(drifts[0] - drifts[own], abs=1e-6)
        stamps = everyone[own].shows(times)
        one_by_one = [alignment.to_rank_zero(float(stamp)) for stamp in stamps]
        doubts = [alignment.uncertainty_at(float(stamp)) for stamp in stamps]
        assert alignment.to_rank_zero(stamps).tolist() == one_by_one and alignment.uncertainty_at(stamps).tolist() == doubts
        assert isinstance(one_by_one[0], float) and isinstance(doubts[0], float)
        if own == 0:
            assert one_by_one == stamps.tolist() and doubts == [0.0] * 3
            assert figures == {"round_trip_s": 0.0, "syncs": 3, "rejected": 0, "drift": 0.0}

    run_distributed(rank, 4)


def test_no_rank_measures_before_all_are_here_or_leaves_before_all_have_measured() -> None:
    def rank() -> tuple[list[float], float, float, float]:
        stamps: list[float] = []

        def clock() -> float:
            stamps.append(time.perf_counter())
            if dist.get_rank() == 0 and len(stamps) % 2 == 0:
                time.sleep(LATE)  # rank 0 is slow to answer: rank 1, whose turn is first, must stay during rank 2's
            return stamps[-1]

        time.sleep(0.5 if dist.get_rank() == 2 else 0.0)  # rank 1, whose turn is first, would measure while rank 2 computes
        alignment = Alignment(clock)
        alignment.measure_offset(dist.group.WORLD, 10)
        now = time.perf_counter()
        return stamps, abs(alignment.to_rank_zero(now) - now), alignment.uncertainty_at(now), now

    (reference, *_), (first, *_, left), (late, *_, last) = ranks = run_distributed(rank, 3)
    assert first[0] < late[0] < min(first[1], reference[0])  # its first question is answered when all are here
    assert all(error <= claim < 0.25 for _, error, claim, _ in ranks)  # the wait for the late rank is no round trip
    assert abs(left - last) < 5 * LATE  # rank 2's turn takes 10


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_silent_rank_is_named_within_the_timeout(culprit: int) -> None:
    def rank() -> tuple[str, float]:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
        Alignment().measure_offset(group, 2)
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == culprit:
            store.wait([f"failed {rank}" for rank in range(3) if rank != culprit])
            return "silent", 0.0
        began = time.perf_counter()
        with pytest.raises(RuntimeError) as error:
            Alignment().measure_offset(group)
        store.set(f"failed {dist.get_rank()}", "")
        return str(error.value), time.perf_counter() - began

    for one, (text, seconds) in enumerate(run_distributed(rank, 3)):
        if one != culprit:
            assert f"rank {one} lost rank {0 if one else culprit}" in text
            assert seconds < 20


class Silent:
    def size(self) -> int:
        return 1


def test_one_rank_needs_no_group() -> None:
    alignment = Alignment()
    for group in (None, Silent()):
        alignment.measure_offset(group)
        assert alignment.to_rank_zero(1.5) == 1.5
        assert (alignment.uncertainty_at(np.array([1.0, 1e9])) == 0).all()
    now = iter(range(1000))
    alignment = Alignment(lambda: float(next(now)))
    for _ in range(200):
        alignment.measure_offset(None)
    assert 32 <= alignment.figures()["syncs"] <= 64


def _at(time: float, offset: float, margin: float = 1e-5) -> Measurement:
    return Measurement(time, offset, margin, round_trip=2 * margin, rounds=1, rejected=0)


def test_a_measurement_under_load_is_used_where_nothing_better_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a measurement as loaded if its round trip is more than three times the smallest."""

    def used(*found: Measurement) -> tuple[float, float, list[float]]:
        ahead, alignment = iter(found), Alignment()
        monkeypatch.setattr(module, "measure", lambda *_: next(ahead))
        for _ in found:
            alignment.measure_offset(SimpleNamespace(size=lambda: 2))
        figures = alignment.figures()
        return figures["syncs"], figures["rejected"], alignment.to_rank_zero(np.array([0.0, 1.0])).tolist()

    quiet, later, loaded = _at(0.0, 3.0, 2**-16), _at(1.0, 3.0, 2**-16), _at(0.5, 3.25, 0.25)
    assert used(loaded) == (1, 0, [3.25, 4.25])
    assert used(loaded, quiet) == used(quiet, loaded) == (1, 1, [3.0, 4.0]), "quiet is known better"
    assert used(loaded, quiet, later, loaded) == (2, 2, [3.0, 4.0])
    assert used(quiet, _at(1.0, 3.0, 3 * 2**-16))[:2] == (2, 0), "three times"
    assert used(quiet, _at(0.1, 3.0, 3.5 * 2**-16))[:2] == (1, 1), "more than three times"
    assert used(quiet, _at(7200.0, 3.25, 0.25))[:2] == (2, 0), "after two hours the first one promises no more than 0.7 s"


def test_pieces_between_measurements_and_the_drift_beyond() -> None:
    offsets = Offsets([_at(10.0, 3.0)])
    assert offsets.offset_at(np.array([-1e5, 10.0, 1e5])).tolist() == [3.0, 3.0, 3.0]
    margins = offsets.margin_at(np.array([0.0, 10.0, 30.0]))
    assert margins == pytest.approx([1e-5 + 10 * WORST_DRIFT, 1e-5, 1e-5 + 20 * WORST_DRIFT])
    offsets = Offsets([_at(0.0, 1.0), _at(100.0, 1.01), _at(200.0, 1.01)])
    found = offsets.offset_at(np.array([-100.0, 0.0, 50.0, 100.0, 150.0, 200.0, 300.0]))
    assert found == pytest.approx([0.995, 1.0, 1.005, 1.01, 1.01, 1.01, 1.015], abs=1e-12)
    assert offsets.drift == pytest.approx(5e-5)  # the first and the last are furthest apart
    offsets = Offsets([_at(0.0, 0.5, margin=0.5), _at(100.0, 0.0), _at(300.0, 0.01)])
    assert offsets.drift == pytest.approx(5e-5)
    assert offsets.doubt == pytest.approx(2e-5 / 200 + WANDER)


@pytest.mark.parametrize(("apart", "known"), [(0.1, False), (0.19, False), (0.21, True), (10.0, True)])
def test_a_drift_is_known_once_its_doubt_is_below_the_worst(apart: float, known: bool) -> None:
    offsets = Offsets([_at(0.0, 0.0), _at(apart, 1e-5)])
    assert ((offsets.drift != 0), (offsets.doubt < WORST_DRIFT)) == (known, known)
    assert offsets.doubt <= WORST_DRIFT


def test_margins_are_those_around_what_a_rate_may_wander_and_its_changes() -> None:
    offsets = Offsets([_at(0.0, 0.0, margin=1e-5), _at(100.0, 0.0, margin=3e-5)])
    doubt = 4e-5 / 100 + WANDER
    within = [1e-5, 1.5e-5 + 25 * WANDER, 2e-5 + 50 * WANDER, 2.5e-5 + 25 * WANDER, 3e-5]
    found = offsets.margin_at(np.array([-10.0, 0.0, 25.0, 50.0, 75.0, 100.0, 110.0]))
    assert found == pytest.approx([1e-5 + 10 * doubt, *within, 3e-5 + 10 * doubt])
    # off the line by 1 ms, and the margins of the three measurements explain 20 us
    straight, bent = (Offsets([_at(0.0, 0.0), _at(50.0, middle), _at(100.0, 0.0)]) for middle in (1.9e-5, 1e-3))
    assert straight.margin_at(0.0) == pytest.approx(1e-5)
    assert bent.margin_at(np.array([0.0, 50.0])) == pytest.approx([1e-5 + 9.8e-4] * 2)


def test_the_margin_holds_whatever_the_clocks_do_within_the_bounds() -> None:
    """Rates turn within WANDER, and offsets are wrong within their margins."""
    draw = np.random.default_rng(0)
    grid = np.linspace(0.0, 400.0, 4001)
    for _ in range(50):
        rates = 1e-4 * draw.uniform(-1, 1) + WANDER / 2 * draw.choice([-1, 1], size=40).repeat(100)
        truth = np.concatenate([[0.0], np.cumsum(rates * 0.1)])
        chosen = np.sort(draw.choice(len(grid), size=5, replace=False))
        margins = draw.uniform(1e-6, 1e-4, size=5)
        found = [_at(grid[k], truth[k] + draw.uniform(-1, 1) * margin, margin) for k, margin in zip(chosen, margins)]
        offsets = Offsets(found)
        assert (np.abs(offsets.offset_at(grid) - truth) <= offsets.margin_at(grid)).all()
