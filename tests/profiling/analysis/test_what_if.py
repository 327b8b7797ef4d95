"""Steps as segments, and what-if replays of them against runs that really were without this or that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.breakdown import intervals_of
from lightning_freescale.profiling.analysis.rank_window import COLUMNS, RankSegments, segments_of
from lightning_freescale.profiling.analysis.replay import Replay, Schedule
from lightning_freescale.profiling.analysis.what_if import WhatIf, what_if
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep
from tests.helpers.profiled_runs import Rank, meet, planned_run, random_run, run_behind_workers, run_segments, wall


def _segments(spans: list[tuple], collectives: list[tuple], last: list[float], name: str = "rows") -> RankSegments:
    step = ResolvedStep(
        0.0,
        10.0,
        spans=tuple(Interval(kind, kind, *times) for kind, *times in spans),
        collectives=tuple(ResolvedCollective(name, key, *times) for key, *times in collectives),
    )
    return segments_of(step, last, intervals_of(step, last))


CASES = {
    "segments end with a collective": (
        [("data", 0, 1), ("forward", 2, 4), ("backward", 5, 9)],
        [("b", 7.0, 7.5, 8.5, 8.5), ("a", 1.5, 4.0, 5.0, 5.0)],
        [8.0, 3.0],
        [
            {"data": 1, "compute": 2, "other": 1, "ahead": 2.5, "transfer": 2},
            {"compute": 2.5, "ahead": 0.5, "transfer": 0.5},
            {"compute": 0.5, "other": 1},
        ],
    ),
    "a wait without length parts a span": (
        [("forward", 0, 10)],
        [("a", 2.0, 4.0, 4.0, 3.0)],
        [2.5],
        [{"compute": 4, "ahead": 2, "transfer": 0.5}, {"compute": 6}],
    ),
    "an end that is noticed late": (
        [("forward", 0, 4), ("forward", 6, 10)],
        [("a", 4.0, 4.0, 6.0, 5.0)],
        [4.5],
        [{"compute": 4, "transfer": 0.5}, {"compute": 4, "other": 1}],
    ),
    "work while waiting, as if the rank had begun to wait later": (
        [("forward", 0, 2), ("forward", 3, 6), ("backward", 8, 10)],
        [("a", 1.0, 2.0, 8.0, 8.0)],
        [4.0],
        [{"compute": 5, "ahead": 4, "transfer": 4}, {"compute": 2}],
    ),
    "a wait within a wait": (
        [("forward", 0, 2), ("forward", 6, 7)],
        [("a", 2.0, 2.0, 8.0, 8.0), ("b", 1.0, 4.0, 5.0, 5.0)],
        [2.0, 4.5],
        [{"compute": 3, "ahead": 1, "transfer": 6}, {"ahead": 7, "transfer": 0.5}, {"other": 2}],
    ),
    "a pause, and clocks that disagree": (
        [("pause", 0, 3), ("forward", 3, 5)],
        [("a", 5.0, 5.0, 6.0, 6.0)],
        [7.0],
        [{"pause": 3, "compute": 2, "transfer": -1}, {"other": 4}],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_seconds_of_segments(case: str) -> None:
    spans, collectives, last, expected = CASES[case]
    found = _segments(spans, collectives, last)
    rows = [{name: round(value, 9) for name, value in zip(COLUMNS, row) if abs(value) > 1e-9} for row in found.seconds]
    assert rows == expected
    assert found.keys == tuple(sorted(key for key, *_ in collectives)) and (found.start, found.end) == (0, 10)


def _exchange_of_messages(rank: int, gap: float = 1e-5) -> RankSegments:
    """Both ranks send and receive, and wait for what they sent first; rank 1 is 3 s late."""
    first, second = ["world 0>1 0:0.0", "world 1>0 0:0.0"][:: 1 if rank == 0 else -1]
    called, end = 1.0 + 3.0 * rank, 5.0 + gap
    waits = [(first, called, called, 4.5, 4.5), (second, called, 4.5 + gap, end, end)]
    return _segments([("forward", 0.0, called)], waits, [4.0, 4.0], "send")


def test_ranks_agree_on_the_order_of_messages_that_they_wait_for_together() -> None:
    schedule = Schedule([[_exchange_of_messages(0), _exchange_of_messages(1)]])
    assert schedule.steps.tolist() == [0]
    assert schedule.column("compute").sum(axis=0) == pytest.approx([1.0, 4.0])
    # with work in between, each rank waits for the other's second message: no order would do
    assert Schedule([[_exchange_of_messages(0, 0.1), _exchange_of_messages(1, 0.1)]]).steps.size == 0
    keys = [f"world 0>1 0:3.{number}" for number in (9, 10)]
    waits = [(key, 1.0, 1.0 + k, 2.0 + k, 2.0 + k) for k, key in enumerate(keys)]
    assert _segments([], waits, [1.0, 1.0], "recv").keys == tuple(keys), "messages of a pair stay in their order"


sizes = st.tuples(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 10))


def _plan(seed: int, ranks: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (steps, ranks)
    return rng.lognormal(0, 1, shape), rng.exponential(0.3, shape), rng.exponential(0.4, shape)


def _even(compute: np.ndarray) -> np.ndarray:
    return np.broadcast_to(compute.mean(axis=1, keepdims=True), compute.shape)


def _by_name(cases: tuple[WhatIf, ...]) -> dict[str, WhatIf]:
    return {case.name: case for case in cases}


@given(sizes, st.integers(0, 4))
@settings(max_examples=60)
def test_no_case_beats_its_limit_or_does_harm(size: tuple[int, int, int], prefetched: int) -> None:
    """With subgroups, pauses, exchanges issued a step ahead, ends that are noticed late, and clocks that disagree."""
    replay = Replay(run_segments(random_run(*size)), prefetched)
    assert replay.error < 1e-9
    assert replay.speed_up() == pytest.approx(1.0, abs=1e-9)
    limit = replay.limit(replay.compute) + 1e-9
    for gain in (replay.speed_up(overlap=True), replay.speed_up(data=False), replay.speed_up(host=False)):
        assert 1 - 1e-9 <= gain <= limit
    even, less = _even(replay.compute), 0.85 * replay.compute
    assert replay.speed_up(even) - 1e-9 <= replay.speed_up(even, overlap=True) <= limit
    assert 1 - 1e-9 <= replay.speed_up(less) <= replay.limit(less) + 1e-9
    for case in what_if(replay):
        assert 1 <= case.speed_up <= case.limit


@given(sizes)
@settings(max_examples=25)
def test_altered_runs_take_what_was_foretold(size: tuple[int, int, int]) -> None:
    compute, data, transfer = _plan(*size)
    run = planned_run(compute, data, transfer)
    cases = _by_name(what_if(Replay(run_segments(run))))
    balanced = wall(planned_run(_even(compute), data, transfer))
    assert cases["perfect balance"].speed_up == pytest.approx(max(1.0, wall(run) / balanced))
    assert cases["no data wait"].speed_up == pytest.approx(wall(run) / wall(planned_run(compute, 0 * data, transfer)))
    assert cases["no data wait"].limit == pytest.approx(wall(run) / compute.sum())


def test_equal_histories_leave_slow_ranks_slow() -> None:
    costs = np.random.default_rng(1).lognormal(0, 0.3, (40, 4))
    speed, transfer = np.array([1.0, 1.3, 1.0, 1.0]), np.full((40, 4), 0.01)
    run = planned_run(costs * speed, 0 * costs, transfer)
    measured = wall(run) / wall(planned_run(_even(costs) * speed, 0 * costs, transfer))
    cases = _by_name(what_if(Replay(run_segments(run)), expected=costs))
    assert cases["equal histories"].speed_up == pytest.approx(measured, abs=1e-6)
    assert 1.05 < measured < cases["perfect balance"].speed_up - 0.05
    assert "equal histories" not in _by_name(what_if(Replay(run_segments(run))))


def _blocking(transfer: float, *steps: Sequence[float], crew: Sequence[Rank] = ()) -> list[list[RankSegments]]:
    """In each step the ranks compute for so long, and meet."""
    crew, run = crew or [Rank() for _ in steps[0]], []
    for step, computes in enumerate(steps):
        for rank, compute in zip(crew, computes):
            rank.work("forward", compute)
        meet(crew, str(step), [transfer] * len(crew))
        run.append([rank.step() for rank in crew])
    return run_segments(run)


def test_what_exceeds_the_compute_stays_exposed() -> None:
    assert Replay(_blocking(4.0, *[(1.0, 1.0)] * 3)).speed_up(overlap=True) == pytest.approx(5 / 4)
    assert Replay(_blocking(0.5, *[(1.0, 1.0)] * 3)).speed_up(overlap=True) == pytest.approx(1.5)
    assert Replay(_blocking(4.0, *[(1.0, 1.0)] * 3)).speed_up(np.full((3, 2), 2.0), overlap=True) == pytest.approx(5 / 4)


def test_clocks_that_disagree_do_not_make_overlap_look_harmful() -> None:
    """Let the last rank arrive, by its clock, after the others have the result."""
    replay = Replay(_blocking(0.1, *[(1.0, 3.0)] * 3, crew=[Rank(), Rank(offset=1.0)]))
    assert replay.error < 1e-9
    assert 1 <= replay.speed_up(overlap=True) < 1.05


def test_balance_that_does_harm_or_lets_another_rank_compute() -> None:
    """Let the rank that computes less wait for data."""
    compute, data = np.tile([1.0, 3.0], (5, 1)), np.tile([2.0, 0.0], (5, 1))
    cases = _by_name(what_if(Replay(run_segments(planned_run(compute, data, np.full((5, 2), 0.1))))))
    assert cases["perfect balance"].speed_up == 1 and "longer" in (cases["perfect balance"].note or "")
    assert cases["balance + overlap"].speed_up >= cases["full overlap"].speed_up > 1
    run, crew = [], [Rank(), Rank()]
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
    assert replay.speed_up(np.array([[2.0, 2.0], [0.0, 0.0]])) == pytest.approx(9 / 7)
    assert replay.speed_up(data=False) == 1


def _pausing(compute: np.ndarray) -> list[list[RankSegments]]:
    """Return steps whose ranks meet at the end of a pause, which the replay does not know."""
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
    replay, even = Replay(_pausing(np.tile([1.0, 3.0], (3, 1)))), Replay(_pausing(np.full((3, 2), 2.0)))
    assert replay.error == pytest.approx(0)
    assert replay.speed_up(np.full((3, 2), 2.0)) == pytest.approx(replay.limit(replay.compute) / even.limit(even.compute))


def test_gap_between_steps_sets_the_clocks_anew() -> None:
    """Rank 1 is 5 s late after the gap, which is no rank's compute: balance before it does not help after it."""
    crew, run = [Rank(), Rank()], []
    for step, late in enumerate((0.0, 5.0)):
        crew[1].now += late
        for rank, c in zip(crew, (1.0, 3.0)):
            rank.begin()
            rank.work("forward", c)
        meet(crew, str(step), [0.0, 0.0])
        run.append([rank.step() for rank in crew])
    replay = Replay(run_segments(run))
    assert replay.error == pytest.approx(0)
    # before the gap 2 x 3 s, after it 8 s, without a wait of rank 1; even: 2 x 2 s, and 7 + 2 s
    assert replay.speed_up(np.full((2, 2), 2.0)) == pytest.approx((6 + 11) / (4 + 9))


def test_without_padding() -> None:
    replay = Replay(_blocking(1.0, *[(2.0, 2.0)] * 3))
    case = _by_name(what_if(replay, padding=0.75))["no padding"]
    assert (case.speed_up, case.limit) == (pytest.approx(3 / 1.5), pytest.approx(3 / 0.5))
    assert "predicted" in (case.note or "")
    assert all("no padding" not in _by_name(what_if(replay, padding=padding)) for padding in (None, 0.0))


def test_without_divided_waits_balance_and_overlap_are_left_out() -> None:
    run = run_segments(planned_run(*_plan(3, 2, 6)))
    known, undivided = (_by_name(what_if(Replay(run), padding=0.3, divided=each)) for each in (True, False))
    for name in ("perfect balance", "full overlap", "balance + overlap"):
        assert (undivided[name].speed_up, undivided[name].limit) == (None, None)
        assert "clocks" in (undivided[name].note or "")
    for name in ("no data wait", "no host overhead", "no padding"):
        assert undivided[name] == known[name]


def test_steps_without_a_common_order_are_left_out() -> None:
    run = run_segments(planned_run(*_plan(3, 2, 6)))
    rank = run[3][1]
    turned = replace(rank, keys=rank.keys[::-1])
    replay = Replay([*run[:3], [run[3][0], turned], *run[4:]])
    assert replay.schedule.steps.tolist() == [0, 1, 2, 4, 5]
    assert replay.error < 1e-9
    expected = np.insert(replay.compute, 3, [9.0, 1.0], axis=0)
    equal = _by_name(what_if(replay, expected=expected))["equal histories"].speed_up
    assert equal == pytest.approx(replay.speed_up(_even(replay.compute)), abs=1e-12) and equal > 1
    assert what_if(Replay([[run[3][0], turned]])) == ()
    twice = replace(rank, keys=(rank.keys[0], *rank.keys[:-1]))
    assert not len(Replay([[run[3][0], twice]]).schedule.steps)


def test_nothing_to_replay_and_inexact_replays() -> None:
    run = run_segments([ranks[:1] for ranks in planned_run(*_plan(2, 2, 6))])
    idle = run_segments(planned_run(np.zeros((2, 2)), np.ones((2, 2)), np.ones((2, 2))))
    assert what_if(Replay([])) == what_if(Replay(idle)) == ()
    replay = Replay([[replace(rank, end=rank.end + 1.0) for rank in step] for step in run])
    assert replay.error > 0.1
    assert all("deviates" in (case.note or "") for case in what_if(replay))
    assert all(case.note is None or "deviates" not in case.note for case in what_if(Replay(run)))


ALTERNATING = np.tile([[0.2, 0.8], [0.8, 0.2]], (30, 1))


@pytest.mark.parametrize(
    ("making", "bound"),
    [([1.1] * 60, True), ([0.3 if k % 10 else 2.5 for k in range(60)], False)],
    ids=["the loader decides", "a batch in ten is late"],
)
def test_workers_make_batches_whatever_the_rank_does(making: list[float], bound: bool) -> None:
    """Time saved elsewhere is waited for data: as in a run in which it is saved."""
    run = run_behind_workers(ALTERNATING, making)
    balance = wall(run) / wall(run_behind_workers(_even(ALTERNATING), making))
    host = wall(run) / wall(run_behind_workers(ALTERNATING, making, host=0.0))
    assert balance < 1.02 if bound else balance > 1.2
    replay = Replay(run_segments(run), prefetched=2)
    assert replay.error < 1e-9 and replay.speed_up() == pytest.approx(1.0, abs=1e-9)
    cases, alone = _by_name(what_if(replay)), _by_name(what_if(Replay(run_segments(run))))
    assert cases["perfect balance"].speed_up == pytest.approx(balance, abs=0.01)
    assert cases["no host overhead"].speed_up == pytest.approx(host, abs=0.01)
    assert cases["no data wait"].speed_up == alone["no data wait"].speed_up > 1.1, "which removes all of it"
    if bound:
        assert alone["perfect balance"].speed_up > 1.2, "where the rank makes its batches itself"
        assert not any("workers" in (case.note or "") for case in cases.values())


def test_workers_that_no_rank_waited_for_may_be_no_faster() -> None:
    steps = run_segments(run_behind_workers(ALTERNATING, [0.3] * 60))
    case = _by_name(what_if(Replay(steps, prefetched=2)))["perfect balance"]
    assert case.speed_up > 1.2 and "workers" in (case.note or "")
    assert "workers" not in (_by_name(what_if(Replay(steps)))["perfect balance"].note or "")


def test_waits_as_long_whenever_a_rank_asks_are_no_waits_for_workers() -> None:
    """Use ready batches, whose waits do not depend on the time of the request; waits for workers shrink."""
    compute = np.random.default_rng(1).lognormal(0, 0.3, (60, 2))
    run = run_segments(planned_run(compute, np.full((60, 2), 0.3), np.full((60, 2), 0.01)))
    behind, alone = (_by_name(what_if(Replay(run, prefetched=each)))["perfect balance"] for each in (2, 0))
    assert behind.speed_up == alone.speed_up > 1.05
    assert "workers" in (behind.note or "")
    run = run_behind_workers(compute, [2.4] * 60)
    measured = wall(run) / wall(run_behind_workers(_even(compute), [2.4] * 60))
    foreseen = _by_name(what_if(Replay(run_segments(run), prefetched=2)))
    assert foreseen["perfect balance"].speed_up == pytest.approx(measured, abs=0.02) and measured < 1.05
