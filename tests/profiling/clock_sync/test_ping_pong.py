import time

import numpy as np
import pytest
import torch.distributed as dist

from lightning_freescale.profiling.clock_sync import ping_pong
from lightning_freescale.profiling.clock_sync.ping_pong import WORST_DRIFT, Measurement
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


def test_like_ways_give_the_offset_and_half_the_round_trip():
    found = Measurement.from_stamps(stamps((4, 0, 4)))
    assert (found.offset, found.margin, found.round_trip) == (OFFSET, units(4), 8 * UNIT)
    assert (found.time, found.rounds, found.rejected) == (4 * UNIT, 1, 0)


def test_the_time_rank_zero_takes_to_answer_does_not_count():
    found = Measurement.from_stamps(stamps((4, 100, 4)))
    assert (found.offset, found.margin, found.round_trip) == (OFFSET, units(4), 8 * UNIT)


def test_the_fastest_way_there_and_the_fastest_way_back_count_each():
    """Neither round alone is right: one's question was late, the other's answer."""
    found = Measurement.from_stamps(stamps((6, 0, 4), (4, 0, 7)))
    assert (found.offset, found.margin, found.round_trip) == (OFFSET, units(4), 10 * UNIT)
    assert found.time == 10.5 * UNIT  # asked at 11, heard at 10


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
    monkeypatch.setattr(ping_pong, "_Line", lambda group, other: other)
    monkeypatch.setattr(ping_pong, "_answer", lambda other, clock, rounds: iter([counts.append((other, rounds))]))
    assert ping_pong.measure(Group(), None, rounds) is None
    assert counts == [(other, asked) for other in range(1, size)]


def test_all_ranks_agree_on_the_number_of_rounds(monkeypatch):
    monkeypatch.setattr(ping_pong, "_ALL_ROUNDS", 30)

    def rank():
        found = ping_pong.measure(dist.group.WORLD, time.perf_counter, 40)
        return found and found.rounds

    assert run_distributed(rank, 4) == [None, 10, 10, 10]
