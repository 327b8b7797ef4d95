import os
import time
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from lightning_freescale.profiling.clock_sync.alignment import Alignment
from lightning_freescale.testing import RankFailed, run_distributed

HOUR = 3600.0
GAP = 1e5  # so long that what a busy machine does to round trips is little beside what clocks do
LATE = 0.1


class Clock:
    """A rank's own: hours off, faster or slower, and able to skip what a test will not wait for."""

    def __init__(self, offset, drift):
        self.offset, self.rate, self.skipped = offset, 1 + drift, 0.0

    def __call__(self):
        return self.shows(self.true())

    def true(self):
        return time.perf_counter() + self.skipped

    def shows(self, true):
        return true * self.rate + self.offset


class Late(Clock):
    """Rank 0 stamps its answers ``LATE`` before it sends them, where ``late(round)`` says so."""

    calls, late = 0, staticmethod(lambda k: False)

    def __call__(self):
        shown = super().__call__()
        self.calls += 1
        if self.calls % 2 == 0 and self.late(self.calls // 2 - 1):
            time.sleep(LATE)
        return shown


def clocks(drifts):
    """All ranks' clocks; hours apart."""
    return [Clock(-7 * HOUR * rank + HOUR, drift) for rank, drift in enumerate(drifts)]


def errors(alignment, all_clocks, true):
    """How far this rank's mapping is from what rank 0's clock showed, at true times."""
    own, reference = all_clocks[dist.get_rank()], all_clocks[0]
    return np.abs(alignment.to_rank_zero(own.shows(true)) - reference.shows(true))


def synced(drifts, syncs, gap=GAP):
    """An alignment after ``syncs``, ``gap`` seconds from each other; every rank's clocks, and when the syncs were."""
    everyone = clocks(drifts)
    alignment, times = Alignment(everyone[dist.get_rank()]), []
    for index in range(syncs):
        for clock in everyone:
            clock.skipped = gap * index
        alignment.measure_offset(dist.group.WORLD)
        times.append(everyone[0].true())
    return alignment, everyone, np.array(times)


def claims(alignment, all_clocks, true):
    """Errors, and what the alignment says they are at most."""
    return errors(alignment, all_clocks, true), alignment.uncertainty_at(all_clocks[dist.get_rank()].shows(true))


def run_claims(drifts, syncs, ask):
    def rank():
        alignment, everyone, times = synced(drifts, syncs)
        return *claims(alignment, everyone, ask(times)), dict(alignment.figures())

    return run_distributed(rank, len(drifts))


def test_one_clock_for_all_ranks_between_measurements():
    for error, claim, figures in run_claims([3e-5, 2e-4, -2e-4, 0.0], 3, lambda times: np.linspace(times[0], times[-1], 101)):
        assert (error <= claim).all()
        assert claim.max() < 1.0  # of the 3 to 23 s that the clocks drift from one to the next
        assert figures["syncs"] == 3


def test_between_measurements_the_offset_is_interpolated_not_held():
    """Far better than is claimed, as these clocks' rates do not change."""
    ranks = run_claims([0.0, 2e-4], 2, lambda times: times.mean(keepdims=True))
    assert ranks[1][0].max() < 0.1  # holding it: 10


def test_the_drift_carries_on_before_and_after():
    far = np.array([-HOUR, -1.0, 1.0, HOUR])
    ranks = run_claims([0.0, 2e-4, -5e-5], 2, lambda times: np.where(far < 0, times[0], times[-1]) + far)
    for error, claim, _ in ranks:
        assert (error <= claim).all()
    assert all((claim < 0.15).all() for _, claim, _ in ranks)  # the drift alone: 0.72 in an hour
    assert ranks[1][2]["drift"] == pytest.approx(-2e-4, abs=1e-6)
    assert ranks[2][2]["drift"] == pytest.approx(5e-5, abs=1e-6)
    assert ranks[0][2]["drift"] == 0


def test_one_measurement_claims_no_more_than_quartz_allows():
    ranks = run_claims([0.0, 9e-5, -9e-5], 1, lambda times: times + np.array([-HOUR, 0.0, HOUR]))
    for rank, (error, claim, figures) in enumerate(ranks):
        assert (error <= claim).all()
        assert figures["drift"] == 0
        assert error[0] == error[2] == 0 if rank == 0 else min(error[0], error[2]) > 0.3  # so the claim is needed
        assert claim[1] < 0.1


def test_measurements_too_close_together_tell_no_drift():
    def rank():
        alignment, everyone, times = synced([0.0, 5e-5], 2, gap=0.0)
        return *claims(alignment, everyone, times[-1:] + 1000.0), dict(alignment.figures())

    error, claim, figures = run_distributed(rank, 2)[1]
    assert figures["drift"] == 0
    assert error < claim
    assert 0.1 <= claim < 0.2


def test_uncertainty_grows_until_the_next_measurement():
    def rank():
        everyone = clocks([0.0, 0.0])
        own = everyone[dist.get_rank()]
        alignment, seen, began = Alignment(own), [], own()
        for skipped in (0.0, GAP):
            own.skipped = skipped
            alignment.measure_offset(dist.group.WORLD)
            seen.append(alignment.uncertainty_at(np.linspace(began, own(), 10_001)).max())
            own.skipped += GAP / 2
            seen.append(alignment.uncertainty_at(np.linspace(began, own(), 10_001)).max())
        return seen

    reference, (first, later, between, again) = run_distributed(rank, 2)
    assert reference == [0.0] * 4
    assert first < 0.1
    assert later == pytest.approx(first + 5.0, abs=0.01)
    assert 0.1 <= between < 0.3  # half of GAP from the nearer one at 2 millionths
    assert again > between


def test_rank_zero_keeps_its_own_clock():
    def rank():
        alignment, everyone, times = synced([1e-4, -1e-4], 2)
        stamps = everyone[0].shows(times)
        return (
            stamps,
            alignment.to_rank_zero(stamps),
            alignment.to_rank_zero(5.0),
            dict(alignment.figures()),
            alignment.uncertainty_at(stamps),
        )

    stamps, mapped, single, figures, uncertainty = run_distributed(rank, 2)[0]
    assert (stamps == mapped).all() and single == 5.0 and (uncertainty == 0).all()
    assert figures == {"round_trip_s": 0.0, "syncs": 2, "rejected": 0, "drift": 0.0}


def test_arrays_and_floats_are_mapped_alike():
    def rank():
        alignment, _, _ = synced([0.0, 1e-4], 2)
        stamps = np.array([[1.0, 500.0, 1e6], [3.0, 4.0, 5.0]])
        one_by_one = [[alignment.to_rank_zero(float(x)) for x in row] for row in stamps]
        doubts = [[alignment.uncertainty_at(float(x)) for x in row] for row in stamps]
        return alignment.to_rank_zero(stamps), one_by_one, alignment.uncertainty_at(stamps), doubts

    for mapped, one_by_one, doubt, doubts in run_distributed(rank, 2):
        assert (mapped == one_by_one).all() and (doubt == doubts).all()
        assert type(one_by_one[0][0]) is float and type(doubts[0][0]) is float


def late_sync(syncs, rounds=20):
    """Rank 1's error, claim and figures after measurements whose answers are late as ``syncs`` say, a second apart."""

    def rank():
        everyone = [Late(HOUR, 0.0), Clock(-HOUR, 0.0)]
        alignment, seen = Alignment(everyone[dist.get_rank()]), []
        for late in syncs:
            everyone[0].calls, everyone[0].late = 0, late
            alignment.measure_offset(dist.group.WORLD, rounds)
            error, claim = claims(alignment, everyone, np.array([everyone[0].true()]))
            seen.append((float(error[0]), float(claim[0]), dict(alignment.figures())))
        return seen

    return run_distributed(rank, 2)[1]


def test_late_answers_do_not_move_the_offset():
    ((error, claim, figures),) = late_sync([lambda k: k % 4 != 0])
    assert error <= claim < LATE / 4  # one late answer alone is off by LATE / 2
    assert figures["rejected"] >= 15
    assert figures["round_trip_s"] < LATE / 3


@pytest.mark.slow
def test_a_measurement_under_load_is_not_used():
    quiet, loaded = late_sync([lambda k: False, lambda k: True])
    assert loaded[0] <= loaded[1] < LATE / 4
    assert loaded[2]["syncs"] == 1
    assert loaded[2]["rejected"] == quiet[2]["rejected"] + 20
    assert loaded[2]["round_trip_s"] == quiet[2]["round_trip_s"]


def test_a_first_measurement_under_load_is_used_until_there_is_a_better_one():
    loaded, quiet = late_sync([lambda k: True, lambda k: False])
    assert LATE / 4 < loaded[0] <= loaded[1] < LATE  # off by half of LATE, and it says so
    assert loaded[2]["syncs"] == 1
    assert quiet[0] <= quiet[1] < LATE / 4
    assert quiet[2]["syncs"] == 1 and quiet[2]["rejected"] >= 20


def test_a_measurement_under_load_is_used_where_nothing_better_is_known():
    """After two hours, the first measurement promises no more than 0.7 s; this one half of LATE."""

    def rank():
        everyone = [Late(HOUR, 0.0), Clock(-HOUR, 9e-5)]
        alignment = Alignment(everyone[dist.get_rank()])
        for hours, late in ((0, False), (2, True)):
            for clock in everyone:
                clock.skipped = hours * HOUR
            everyone[0].calls, everyone[0].late = 0, lambda k, late=late: late
            alignment.measure_offset(dist.group.WORLD, 10)
        return *claims(alignment, everyone, np.array([everyone[0].true()])), dict(alignment.figures())

    error, claim, figures = run_distributed(rank, 2)[1]
    assert error <= claim < LATE
    assert figures["syncs"] == 2


def test_nobody_measures_before_all_are_here():
    """Rank 2 comes late: rank 1, whose turn is first, would measure while rank 2 still computes."""

    def rank():
        stamps = []

        def clock():
            stamps.append(time.perf_counter())
            return stamps[-1]

        time.sleep(0.5 if dist.get_rank() == 2 else 0.0)
        alignment = Alignment(clock)
        alignment.measure_offset(dist.group.WORLD, 5)
        now = time.perf_counter()
        return stamps, abs(alignment.to_rank_zero(now) - now), alignment.uncertainty_at(now)

    (reference, *_), (first, *_), (late, *_) = ranks = run_distributed(rank, 3)
    assert first[0] < late[0] < min(first[1], reference[0])  # its first question is answered when all are here
    assert all(error <= claim < 0.25 for _, error, claim in ranks)  # the wait for the late rank is no round trip


@pytest.mark.slow
def test_nobody_leaves_before_all_have_measured():
    """Rank 0 is slow to answer: rank 1, whose turn is first, must stay idle during rank 2's."""

    def rank():
        clock = Late(0.0, 0.0)
        clock.late = lambda k: dist.get_rank() == 0
        Alignment(clock).measure_offset(dist.group.WORLD, 10)
        return time.perf_counter()

    _, first, second = run_distributed(rank, 3)
    assert abs(first - second) < 5 * LATE  # rank 2's turn takes 10


def test_one_rank_needs_no_group():
    def rank():
        alignment = Alignment()
        alignment.measure_offset(dist.group.WORLD)
        return alignment.to_rank_zero(1.5)

    alignment = Alignment()
    alignment.measure_offset(None)
    assert alignment.to_rank_zero(1.5) == 1.5
    assert (alignment.uncertainty_at(np.array([1.0, 1e9])) == 0).all()
    assert run_distributed(rank, 1) == [1.5]


def test_one_rank_asks_nobody(monkeypatch):
    class Silent:
        def size(self):
            return 1

        def __getattr__(self, name):
            raise AssertionError(f"the group was asked for {name}")

    Alignment().measure_offset(Silent())


def test_nothing_is_mapped_before_the_first_measurement():
    alignment = Alignment()
    for ask in (lambda: alignment.to_rank_zero(1.0), lambda: alignment.uncertainty_at(1.0)):
        with pytest.raises(RuntimeError, match=r"call measure_offset\(group\) first"):
            ask()
    assert alignment.figures() == {"round_trip_s": 0.0, "syncs": 0, "rejected": 0, "drift": 0.0}


def test_rounds_must_be_positive():
    with pytest.raises(ValueError, match=r"rounds=0.*1 or more"):
        Alignment().measure_offset(None, rounds=0)


def failure(world_size, culprit):
    """What every other rank raises when one falls silent in the midst, and how long it took."""

    def rank():
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
        Alignment().measure_offset(group, 2)
        store = dist.distributed_c10d._get_default_store()
        others = [f"failed {rank}" for rank in range(world_size) if rank != culprit]
        if dist.get_rank() == culprit:
            store.wait(others)  # silent until all others have said what they have to say
            return "silent", 0.0
        began = time.perf_counter()
        try:
            Alignment().measure_offset(group)
        except RuntimeError as error:
            return str(error), time.perf_counter() - began
        finally:
            store.set(f"failed {dist.get_rank()}", "")
        return "no error", 0.0

    return run_distributed(rank, world_size)


@pytest.mark.parametrize("culprit", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_silent_rank_is_named_within_the_timeout(culprit):
    ranks = failure(3, culprit)
    told = {rank: answer for rank, answer in enumerate(ranks) if rank != culprit}
    for rank, (text, seconds) in told.items():
        lost = culprit if rank == 0 else 0
        assert f"clock alignment: rank {rank} lost rank {lost}" in text
        assert seconds < 20


@pytest.mark.usefixtures("patient")
def test_a_dead_rank_is_named():
    with pytest.raises(RankFailed, match="clock alignment: rank 0 lost rank 2"):
        failure_raised(3, 2)


def failure_raised(world_size, culprit):
    def rank():
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))

        def clock():
            if dist.get_rank() == culprit and next(calls) == 7:
                os._exit(9)
            return time.perf_counter()

        calls = iter(range(1000))
        Alignment(clock).measure_offset(group)

    return run_distributed(rank, world_size)
