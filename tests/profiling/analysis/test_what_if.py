"""What-if replays, against runs that really were without this or that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.contention import Contention
from lightning_freescale.profiling.analysis.replay import Replay
from lightning_freescale.profiling.analysis.segments import RankSegments
from lightning_freescale.profiling.analysis.what_if import WhatIf, what_if
from tests.helpers.profiled_runs import Rank, meet, planned_run, random_run, run_behind_workers, run_segments, wall

sizes = st.tuples(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 10))


def _plan(seed: int, ranks: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (steps, ranks)
    return rng.lognormal(0, 1, shape), rng.exponential(0.3, shape), rng.exponential(0.4, shape)


def _by_name(cases: tuple[WhatIf, ...]) -> dict[str, WhatIf]:
    return {case.name: case for case in cases}


@given(sizes)
@settings(deadline=None, max_examples=30)
def test_unaltered_run_comes_out_as_measured(size: tuple[int, int, int]) -> None:
    """With subgroups, pauses, exchanges issued a step ahead, ends that are noticed late, and clocks that disagree."""
    replay = Replay(run_segments(random_run(*size)))
    assert replay.left_out == 0
    assert replay.error < 1e-9
    assert replay.speed_up() == pytest.approx(1.0, abs=1e-9)


@given(sizes)
@settings(deadline=None, max_examples=30)
def test_no_case_beats_its_limit_or_does_harm(size: tuple[int, int, int]) -> None:
    run = run_segments(random_run(*size))
    replay = Replay(run)
    even = np.broadcast_to(replay.compute.mean(axis=1, keepdims=True), replay.compute.shape)
    limit = replay.limit(replay.compute) + 1e-9
    overlap, data, host = replay.speed_up(overlap=True), replay.speed_up(data=False), replay.speed_up(host=False)
    assert 1 - 1e-9 <= overlap <= limit
    assert 1 - 1e-9 <= data <= limit
    assert 1 - 1e-9 <= host <= limit
    balance, both = replay.speed_up(even), replay.speed_up(even, overlap=True)
    assert balance - 1e-9 <= both <= limit
    hidden = 0.5 * replay.compute
    less = replay.speed_up(replay.compute - 0.3 * hidden)
    assert 1 - 1e-9 <= less <= replay.limit(replay.compute - 0.3 * hidden) + 1e-9
    for case in what_if(Replay(run), Contention(0.3, 0.01), hidden):
        assert 1 <= case.speed_up <= case.limit


@given(sizes)
@settings(deadline=None, max_examples=25)
def test_even_compute_cannot_hurt_ranks_that_are_alike_in_all_else(size: tuple[int, int, int]) -> None:
    replay = Replay(run_segments(random_run(*size, simple=True)))
    even = np.broadcast_to(replay.compute.mean(axis=1, keepdims=True), replay.compute.shape)
    assert replay.speed_up(even) >= 1 - 1e-9


@given(sizes)
@settings(deadline=None, max_examples=25)
def test_altered_runs_take_what_was_foretold(size: tuple[int, int, int]) -> None:
    compute, data, transfer = _plan(*size)
    run = planned_run(compute, data, transfer)
    cases = _by_name(what_if(Replay(run_segments(run))))
    balanced = wall(planned_run(np.broadcast_to(compute.mean(axis=1, keepdims=True), compute.shape), data, transfer))
    assert cases["perfect balance"].speed_up == pytest.approx(max(1.0, wall(run) / balanced))
    assert cases["no data wait"].speed_up == pytest.approx(wall(run) / wall(planned_run(compute, 0 * data, transfer)))
    assert cases["no data wait"].limit == pytest.approx(wall(run) / compute.sum())


def test_long_compute_hides_all() -> None:
    run = Replay(run_segments(planned_run(np.full((5, 2), 10.0), np.zeros((5, 2)), np.full((5, 2), 1.0))))
    assert 1 < run.speed_up(overlap=True) == pytest.approx(run.limit(run.compute))


def _blocking(compute: float, transfer: float) -> list[list[RankSegments]]:
    crew = [Rank(), Rank()]
    run = []
    for step in range(3):
        for rank in crew:
            rank.work("forward", compute)
        meet(crew, str(step), [transfer] * 2)
        run.append([rank.step() for rank in crew])
    return run_segments(run)


def test_what_exceeds_the_compute_stays_exposed() -> None:
    assert Replay(_blocking(1.0, 4.0)).speed_up(overlap=True) == pytest.approx(5 / 4)
    assert Replay(_blocking(1.0, 0.5)).speed_up(overlap=True) == pytest.approx(1.5)
    assert Replay(_blocking(1.0, 4.0)).speed_up(np.full((3, 2), 2.0), overlap=True) == pytest.approx(5 / 4)


def test_clocks_that_disagree_do_not_make_overlap_look_harmful() -> None:
    """By its clock the last rank arrives after the others have the result."""
    crew, run = [Rank(), Rank(offset=1.0)], []
    for step in range(3):
        for rank, compute in zip(crew, (1.0, 3.0)):
            rank.work("forward", compute)
        meet(crew, str(step), [0.1, 0.1])
        run.append([rank.step() for rank in crew])
    replay = Replay(run_segments(run))
    assert replay.error < 1e-9
    assert 1 <= replay.speed_up(overlap=True) < 1.05


def test_harmful_balance_counts_as_none_and_says_so() -> None:
    """The rank that computes less waits for data."""
    compute, data = np.tile([1.0, 3.0], (5, 1)), np.tile([2.0, 0.0], (5, 1))
    cases = _by_name(what_if(Replay(run_segments(planned_run(compute, data, np.full((5, 2), 0.1))))))
    assert cases["perfect balance"].speed_up == 1
    assert "longer" in (cases["perfect balance"].note or "")
    assert cases["balance + overlap"].speed_up >= cases["full overlap"].speed_up > 1


def test_rank_without_compute_gets_its_share() -> None:
    run = []
    crew = [Rank(), Rank()]
    for _ in range(3):
        crew[0].work("data", 1.0)
        crew[1].work("forward", 2.0)
        run.append([rank.step() for rank in crew])
    assert Replay(run_segments(run)).speed_up(np.ones((3, 2))) == pytest.approx(3 / 3)


def test_rank_that_arrives_while_it_waits_does_so_by_the_end_of_the_wait() -> None:
    """Compute could hide both exchanges; the second was joined half-way through the wait for the first."""
    crew = [Rank(), Rank()]
    for rank in crew:
        rank.work("forward", 20.0)
    meet(crew, "first", [10.0, 10.0])
    meet(crew, "second", [8.0, 8.0], [25.0, 25.0])
    assert Replay(run_segments([[rank.step() for rank in crew]])).speed_up(overlap=True) == pytest.approx(33 / 20)


@pytest.mark.parametrize("gap", [0.0, 7.0])
def test_arrival_before_a_gap_is_not_moved(gap: float) -> None:
    """Joined after the first forward, which matters for what follows at once, not for what follows a gap."""
    crew = [Rank(), Rank()]
    for rank in crew:
        rank.work("forward", 4.0)
    joined = [rank.now for rank in crew]
    run = [[rank.step() for rank in crew]]
    for rank in crew:
        rank.now += gap
        rank.begin()
        rank.work("data", 1.0)
    meet(crew, "joined early", [gap + 5.0] * 2, joined)
    run.append([rank.step() for rank in crew])
    replay = Replay(run_segments(run))
    half = np.array([[2.0, 2.0], [0.0, 0.0]])
    assert replay.speed_up(half) == pytest.approx(9 / 7)
    assert replay.speed_up(data=False) == 1


def test_contention() -> None:
    steps = _blocking(2.0, 1.0)
    case = _by_name(what_if(Replay(steps), Contention(0.25, 0.01), np.full((3, 2), 2.0)))["no contention"]
    assert (case.speed_up, case.limit) == (pytest.approx(3 / 2.5), pytest.approx(3 / 1.5))
    assert "25%" in (case.note or "")
    case = _by_name(what_if(Replay(steps), Contention(0.0, 0.1, "within the noise"), np.full((3, 2), 2.0)))["no contention"]
    assert case == WhatIf("no contention", None, None, "within the noise")
    assert "no contention" not in _by_name(what_if(Replay(steps)))
    with pytest.raises(ValueError, match="hidden"):
        what_if(Replay(steps), Contention(0.25, 0.01))


def test_without_divided_waits_balance_and_overlap_are_left_out_and_say_why() -> None:
    run = run_segments(planned_run(*_plan(3, 2, 6)))
    hidden = np.full((6, 2), 0.1)
    known, undivided = (_by_name(what_if(Replay(run), Contention(0.3, 0.01), hidden, divided=each)) for each in (True, False))
    for name in ("perfect balance", "full overlap", "balance + overlap"):
        assert (undivided[name].speed_up, undivided[name].limit) == (None, None)
        assert "clocks" in (undivided[name].note or "")
    for name in ("no data wait", "no contention"):
        assert undivided[name] == known[name]


def _pausing(compute: np.ndarray) -> list[list[RankSegments]]:
    """The ranks meet at the end of the pause, which the replay is not told of."""
    crew, run = [Rank(), Rank()], []
    for step, seconds in enumerate(compute):
        for rank, c in zip(crew, seconds):
            if step == 2:
                rank.work("pause", 100.0 - rank.now)
            rank.work("forward", c)
        if step != 1:
            meet(crew, str(step), [0.1, 0.1])
        run.append([rank.step() for rank in crew])
    return run_segments(run)


def test_ranks_leave_a_pause_as_they_did() -> None:
    compute = np.array([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]])
    replay = Replay(_pausing(compute))
    even = Replay(_pausing(np.full((3, 2), 2.0)))
    assert replay.error == pytest.approx(0)
    assert replay.speed_up(np.full((3, 2), 2.0)) == pytest.approx(replay.limit(replay.compute) / even.limit(even.compute))


def test_gap_between_steps_sets_the_clocks_anew() -> None:
    """Rank 1 is 5 s late after the gap, which is nobody's compute: balance before it does not help after it."""
    crew, run = [Rank(), Rank()], []
    for step, late in enumerate((0.0, 5.0)):
        for rank, c, wait in zip(crew, (1.0, 3.0), (0.0, late)):
            rank.now += wait
            rank.begin()
            rank.work("forward", c)
        meet(crew, str(step), [0.0, 0.0])
        run.append([rank.step() for rank in crew])
    replay = Replay(run_segments(run))
    assert replay.error == pytest.approx(0)
    # before the gap 2 x 3 s, after it 8 s of which rank 1 waits for none; even: 2 x 2 s, and 7 + 2 s
    assert replay.speed_up(np.full((2, 2), 2.0)) == pytest.approx((6 + 11) / (4 + 9))


def test_steps_without_a_common_order_are_left_out() -> None:
    run = run_segments(planned_run(*_plan(1, 2, 6)))
    rank = run[3][1]
    turned = replace(rank, keys=rank.keys[::-1])
    broken = [*run[:3], [run[3][0], turned], *run[4:]]
    replay = Replay(broken)
    assert replay.left_out == 1
    assert replay.schedule.steps.tolist() == [0, 1, 2, 4, 5]
    assert replay.error < 1e-9
    hidden = np.arange(12.0).reshape(6, 2) * 1e-3
    less = replay.speed_up(replay.compute - 0.5 * hidden[[0, 1, 2, 4, 5]])
    assert what_if(Replay(broken), Contention(0.5, 0.1), hidden)[-1].speed_up == pytest.approx(less, abs=1e-12)
    twice = replace(rank, keys=(rank.keys[0], *rank.keys[:-1]))
    assert Replay([[run[3][0], twice]]).left_out == 1
    assert what_if(Replay([[run[3][0], turned]])) == ()


def test_inexact_replay_is_noted() -> None:
    """A rank missing from an exchange that the others waited for."""
    run = run_segments([ranks[:1] for ranks in planned_run(*_plan(2, 2, 6))])
    wrong = [[replace(rank, end=rank.end + 1.0, seconds=rank.seconds) for rank in step] for step in run]
    replay = Replay(wrong)
    assert replay.error > 0.1
    assert all("off" in (case.note or "") for case in what_if(Replay(wrong)))
    assert all(case.note is None or "off" not in case.note for case in what_if(Replay(run)))


def test_nothing_to_replay() -> None:
    assert what_if(Replay([])) == ()
    idle = planned_run(np.zeros((2, 2)), np.ones((2, 2)), np.ones((2, 2)))
    assert what_if(Replay(run_segments(idle))) == ()


def test_equal_histories_leave_slow_ranks_slow() -> None:
    costs = np.random.default_rng(1).lognormal(0, 0.3, (40, 4))
    speed, transfer = np.array([1.0, 1.3, 1.0, 1.0]), np.full((40, 4), 0.01)
    run = planned_run(costs * speed, 0 * costs, transfer)
    equal = np.broadcast_to(costs.mean(axis=1, keepdims=True), costs.shape)
    measured = wall(run) / wall(planned_run(equal * speed, 0 * costs, transfer))
    cases = _by_name(what_if(Replay(run_segments(run)), expected=costs))
    assert cases["equal histories"].speed_up == pytest.approx(measured, abs=1e-6)
    assert 1.05 < measured < cases["perfect balance"].speed_up - 0.05
    assert "equal histories" not in _by_name(what_if(Replay(run_segments(run))))


ALTERNATING = np.tile([[0.2, 0.8], [0.8, 0.2]], (30, 1))


@pytest.mark.parametrize(
    ("making", "bound"),
    [([1.1] * 60, True), ([0.3 if k % 10 else 2.5 for k in range(60)], False)],
    ids=["the loader decides", "a batch in ten is late"],
)
def test_workers_make_batches_whatever_the_rank_does(making: list[float], bound: bool) -> None:
    """Time saved elsewhere is waited for data: as in a run in which it is saved."""
    run, even = run_behind_workers(ALTERNATING, making), np.full_like(ALTERNATING, 0.5)
    balance = wall(run) / wall(run_behind_workers(even, making))
    host = wall(run) / wall(run_behind_workers(ALTERNATING, making, host=0.0))
    assert balance < 1.02 if bound else balance > 1.2
    replay = Replay(run_segments(run), prefetched=2)
    assert replay.error < 1e-9 and replay.speed_up() == pytest.approx(1.0, abs=1e-9)
    cases = _by_name(what_if(replay))
    assert cases["perfect balance"].speed_up == pytest.approx(balance, abs=0.01)
    assert cases["no host overhead"].speed_up == pytest.approx(host, abs=0.01)
    alone = _by_name(what_if(Replay(run_segments(run))))
    assert cases["no data wait"].speed_up == alone["no data wait"].speed_up > 1.1, "which removes all of it"
    if bound:
        assert alone["perfect balance"].speed_up > 1.2, "where the rank makes its batches itself"


def test_workers_that_nobody_waited_for_may_be_no_faster_and_that_is_said() -> None:
    steps = run_segments(run_behind_workers(ALTERNATING, [0.3] * 60))
    cases = _by_name(what_if(Replay(steps, prefetched=2)))
    assert cases["perfect balance"].speed_up > 1.2 and "workers keep up" in (cases["perfect balance"].note or "")
    assert "workers" not in (_by_name(what_if(Replay(steps)))["perfect balance"].note or "")
    starved = _by_name(what_if(Replay(run_segments(run_behind_workers(ALTERNATING, [1.1] * 60)), prefetched=2)))
    assert not any("workers" in (case.note or "") for case in starved.values())


def test_a_batch_that_takes_long_to_take_over_is_not_waited_for() -> None:
    """As one that workers had ready, but that is large: it lasts as long however late the rank asks."""
    compute = np.random.default_rng(1).lognormal(0, 0.3, (60, 2))
    run = run_segments(planned_run(compute, np.full((60, 2), 0.3), np.full((60, 2), 0.01)))
    behind, alone = (_by_name(what_if(Replay(run, prefetched=each)))["perfect balance"] for each in (2, 0))
    assert behind.speed_up == alone.speed_up > 1.05
    assert "workers keep up" in (behind.note or "")


def test_waits_that_shrink_when_a_rank_asks_later_are_for_a_moment() -> None:
    compute = np.random.default_rng(1).lognormal(0, 0.3, (60, 2))
    making = [2.4] * 60
    even = np.broadcast_to(compute.mean(axis=1, keepdims=True), compute.shape)
    measured = wall(run_behind_workers(compute, making)) / wall(run_behind_workers(even, making))
    foreseen = _by_name(what_if(Replay(run_segments(run_behind_workers(compute, making)), prefetched=2)))
    assert foreseen["perfect balance"].speed_up == pytest.approx(measured, abs=0.02) and measured < 1.05


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(1, 4))
def test_no_case_does_harm_behind_workers(size: tuple[int, int, int], prefetched: int) -> None:
    replay = Replay(run_segments(random_run(*size)), prefetched)
    assert replay.speed_up() == pytest.approx(1.0, abs=1e-9)
    for case in what_if(replay, Contention(0.3, 0.01), 0.5 * replay.compute):
        assert 1 <= case.speed_up <= case.limit
    for less in (replay.speed_up(overlap=True), replay.speed_up(data=False), replay.speed_up(host=False)):
        assert less >= 1 - 1e-9
