import numpy as np
import pytest

from lightning_freescale.profiling.clock_sync.alignment import WANDER, Offsets
from lightning_freescale.profiling.clock_sync.ping_pong import WORST_DRIFT, Measurement


def at(time, offset, margin=1e-5):
    return Measurement(time, offset, margin, round_trip=2 * margin, rounds=1, rejected=0)


def test_one_measurement_holds_everywhere():
    offsets = Offsets([at(10.0, 3.0)])
    assert offsets.offset_at(np.array([-1e5, 10.0, 1e5])).tolist() == [3.0, 3.0, 3.0]
    assert offsets.margin_at(np.array([0.0, 10.0, 30.0])) == pytest.approx(
        [1e-5 + 10 * WORST_DRIFT, 1e-5, 1e-5 + 20 * WORST_DRIFT]
    )


def test_pieces_between_and_the_drift_beyond():
    offsets = Offsets([at(0.0, 1.0), at(100.0, 1.01), at(200.0, 1.01)])
    assert offsets.offset_at(np.array([0.0, 50.0, 100.0, 150.0, 200.0])) == pytest.approx(
        [1.0, 1.005, 1.01, 1.01, 1.01], abs=1e-12
    )
    assert offsets.drift == pytest.approx(5e-5)  # the first and the last are furthest apart
    assert offsets.offset_at(np.array([-100.0, 300.0])) == pytest.approx([0.995, 1.015], abs=1e-12)


def test_the_drift_is_told_by_the_pair_that_leaves_least_doubt():
    offsets = Offsets([at(0.0, 0.5, margin=0.5), at(100.0, 0.0), at(300.0, 0.01)])
    assert offsets.drift == pytest.approx(5e-5)
    assert offsets.doubt == pytest.approx(2e-5 / 200 + WANDER)


@pytest.mark.parametrize(("apart", "known"), [(0.1, False), (0.19, False), (0.21, True), (10.0, True)])
def test_a_drift_is_known_once_its_doubt_is_below_the_worst(apart, known):
    offsets = Offsets([at(0.0, 0.0), at(apart, 1e-5)])
    assert (offsets.drift != 0) == known
    assert (offsets.doubt < WORST_DRIFT) == known
    assert offsets.doubt <= WORST_DRIFT


def test_margins_between_are_those_around_and_what_a_rate_may_wander():
    offsets = Offsets([at(0.0, 0.0, margin=1e-5), at(100.0, 0.0, margin=3e-5)])
    assert offsets.margin_at(np.array([0.0, 25.0, 50.0, 75.0, 100.0])) == pytest.approx(
        [1e-5, 1.5e-5 + 25 * WANDER, 2e-5 + 50 * WANDER, 2.5e-5 + 25 * WANDER, 3e-5]
    )
    doubt = 4e-5 / 100 + WANDER
    assert offsets.margin_at(np.array([-10.0, 110.0])) == pytest.approx([1e-5 + 10 * doubt, 3e-5 + 10 * doubt])


def test_a_rate_that_changes_shows_in_the_margin():
    """Off the line by 1 ms, of which the margins of the three measurements explain 20 us."""
    straight, bent = (Offsets([at(0.0, 0.0), at(50.0, middle), at(100.0, 0.0)]) for middle in (1.9e-5, 1e-3))
    assert straight.margin_at(0.0) == pytest.approx(1e-5)
    assert bent.margin_at(np.array([0.0, 50.0])) == pytest.approx([1e-5 + 9.8e-4] * 2)


def test_whatever_the_clocks_do_within_the_bounds_the_margin_holds():
    """Rates that turn within WANDER, offsets that are wrong within their margins."""
    draw = np.random.default_rng(0)
    grid = np.linspace(0.0, 400.0, 4001)
    for _ in range(50):
        rates = 1e-4 * draw.uniform(-1, 1) + WANDER / 2 * draw.choice([-1, 1], size=40).repeat(100)
        truth = np.concatenate([[0.0], np.cumsum(rates * 0.1)])
        chosen = np.sort(draw.choice(len(grid), size=5, replace=False))
        margins = draw.uniform(1e-6, 1e-4, size=5)
        found = [at(grid[k], truth[k] + draw.uniform(-1, 1) * margin, margin) for k, margin in zip(chosen, margins)]
        offsets = Offsets(found)
        assert (np.abs(offsets.offset_at(grid) - truth) <= offsets.margin_at(grid)).all()
