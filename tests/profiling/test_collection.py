"""Steps that ranks recorded on their way to rank 0, and their exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_freescale.profiling.analysis.breakdown import WAITS, column
from lightning_freescale.profiling.analysis.rank_window import RankWindow
from lightning_freescale.profiling.collection import rank_exchange as module
from lightning_freescale.profiling.collection.rank_exchange import RankExchange, StepBuffer
from lightning_freescale.profiling.recording.records import (
    Collective,
    HostClock,
    Interval,
    ResolvedCollective,
    ResolvedStep,
    StepRecord,
)
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.document import WaitAttribution
from lightning_freescale.testing import run_distributed


def _same(seconds: float) -> float:
    return seconds


def _steps(first: int, until: int) -> list[StepRecord]:
    return [StepRecord(float(index), index + 1.0, index) for index in range(first, until)]


def _background(timeline: Timeline, name: str, arrive: float, done: float) -> None:
    timeline.background.append(Collective(name, "", arrive, done=done))


def _indices(steps: list[StepRecord] | list[ResolvedStep]) -> list[int]:
    return [step.index for step in steps]


def _hidden(*steps: ResolvedStep) -> list[list[str]]:
    return [[one.name for one in step.hidden] for step in steps]


def _window(buffer: StepBuffer, records: list[StepRecord], leave: int = 0) -> list[ResolvedStep]:
    for record in records:
        buffer.add_step(record)
    return buffer.resolve_taken(buffer.take_steps(leave), _same)


def test_the_newest_wait_and_times_are_rank_0s(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 3)
    assert _indices(_window(buffer, _steps(0, 6), leave=2)) == [0, 1, 2, 3]
    assert (_indices(buffer.waiting), _indices(list(buffer.recent))) == ([4, 5], [1, 2, 3])
    _background(timeline, "late", 4.5, 5.5)
    fifth, sixth = buffer.resolve_taken(buffer.take_steps(0), lambda seconds: seconds + 100)
    assert (fifth.start, sixth.end, [one.arrive for one in sixth.hidden]) == (104, 106, [104.5])
    assert (buffer.waiting, buffer.count, _indices(list(buffer.recent))) == ([], 6, [3, 4, 5])


def test_exchanges_do_not_pile_up(timeline: Timeline) -> None:
    buffer, seen = StepBuffer(timeline, 10), Counter()
    for first in range(0, 400, 4):
        for index in range(first, first + 4):
            _background(timeline, f"at {index}", index + 0.5, index + 1.5)
        for names in _hidden(*_window(buffer, _steps(first, first + 4))):
            seen.update(names)
        assert len(buffer._background) <= 1
        assert not timeline.background
    assert seen == {f"at {index}": 1 if index == 399 else 2 for index in range(400)}, "the last one's second step has not come"


def test_steps_in_between_leave_what_others_need(timeline: Timeline) -> None:
    buffer = StepBuffer(timeline, 10)
    for record in (*_steps(0, 1), *_steps(3, 4)):
        buffer.add_step(record)
    _background(timeline, "across", 0.5, 3.5)
    watched = buffer.resolve_only(_steps(1, 3), _same)
    steps = buffer.resolve_taken(buffer.take_steps(0), _same)
    assert _hidden(*watched, *steps) == [["across"]] * 4
    assert _indices(list(buffer.recent)) == [0, 3], "watched steps are kept elsewhere"


@pytest.mark.parametrize(
    ("resolved", "taken", "waiting", "rest"),
    [
        (4, 0, 2, [0, 1, 2, 3, 4, 5]),
        (2, 2, 2, [2, 3, 4, 5]),  # those taken last were not resolved
        (0, 0, 1, [0]),
        (2, 0, 0, [0, 1]),
    ],
)
def test_the_rest_is_what_was_taken_last_and_what_waits(
    resolved: int, taken: int, waiting: int, rest: list[int], timeline: Timeline
) -> None:
    buffer, total = StepBuffer(timeline, 10), resolved + taken + waiting
    if resolved:
        _window(buffer, _steps(0, resolved))
    for record in _steps(resolved, total):
        buffer.add_step(record)
    if taken:
        buffer.take_steps(waiting)
    records, steps = buffer.resolve_rest(_same)
    assert _indices(records) == _indices(steps) == rest
    assert _indices(list(buffer.recent)) == list(range(total)), "none twice"


def _step(arrivals: dict[str, float], wall: float = 1.0, index: int = 7, moved: int | None = None) -> ResolvedStep:
    """Return a step whose collectives end at 0.9."""
    collectives = tuple(ResolvedCollective("c", key, at, at, 0.9, 0.9, moved) for key, at in arrivals.items())
    return ResolvedStep(0.0, wall, index, 3, (), collectives)


def _waits(windows: list[RankWindow], name: str = "straggler_wait") -> list[list[float]]:
    return [column(window.breakdown, name).round(6).tolist() for window in windows]


def _check_subgroups() -> None:
    """Collectives of some ranks are matched by key; the clocks' figures are the worst of all ranks."""
    rank = dist.get_rank()
    exchange = RankExchange(dist.group.WORLD, HostClock())
    assert exchange.wait_attribution().clock is None, "nothing is known of the others"
    exchange.alignment.uncertainty_at = lambda _: 0.0  # however busy the machine is
    exchange.alignment.figures = lambda: {"drift": [0.0, 1e-6, -5e-6][rank], "syncs": rank, "round_trip_s": 0.1 * rank}
    pair, world = {"pair:7.0": (0.1, 0.3, None)[rank]}, {"world:7.0": (0.5, 0.5, 0.75)[rank]}
    first = replace(_step(pair if rank < 2 else {}), features=f"rank {rank}")
    windows = exchange.exchange_steps([first, _step(world, index=8), _step({"own": 0.2}, index=9)])
    if rank:
        assert windows is None
        return
    assert [window.steps for window in windows] == [[7, 8, 9]] * 3
    assert _waits(windows) == [[0.2, 0.25, 0], [0, 0.25, 0], [0, 0, 0]]
    assert _waits(windows, "transfer") == [[0.6, 0.15, 0.7], [0.6, 0.15, 0.7], [0, 0.15, 0.7]]
    assert [window.features[0] for window in windows] == ["rank 0", "rank 1", "rank 2"]
    assert [window.exchanges["c"].last for window in windows] == [1, 2, 2]
    waiting = exchange.wait_attribution()
    assert (waiting.aligned, waiting.clock) == (True, {"drift": -5e-6, "syncs": 2, "round_trip_s": 0.2})


def test_collectives_of_some_ranks_are_matched_by_key() -> None:
    run_distributed(_check_subgroups, 3)


WALLS = (1.1, 0.9)


def _exchanged(*uncertainties: tuple[float, float]) -> tuple[list[list[float] | None], WaitAttribution, float]:
    """Waits of rank 0 in exchanges of two steps, in which the ranks' clocks may be wrong by so much; how they were divided."""
    rank, answers = dist.get_rank(), []
    exchange = RankExchange(dist.group.WORLD, HostClock())
    exchange.spent_here = [0.25, 0.75][rank]
    for uncertainty in uncertainties:
        exchange.alignment.uncertainty_at = lambda _, mine=uncertainty[rank]: mine
        wall = WALLS[rank]
        validation = Interval("pause", "validation", wall, wall + 5)
        checkpoint = Interval("pause", "checkpoint", wall + 1, wall + 5)
        step = replace(_step({"world:7.0": 0.1 + 0.5 * rank}, wall + 5, moved=10**8), spans=(validation, checkpoint))
        windows = exchange.exchange_steps([step] * 2)
        answers.append(None if windows is None else [_waits(windows, name)[0][0] for name in WAITS])
    return answers, exchange.wait_attribution(), exchange.spent


def test_clocks_are_good_enough_up_to_two_percent_of_a_step_on_the_worst_rank() -> None:
    good, bad = [(0, 0.0199), (0.01, 0.004)], [(0, 0.001), (0, 0.0201), (0, 0.001)]
    first, second = run_distributed(lambda: (_exchanged(*good), _exchanged(*bad)), 2)
    answers, waiting, spent = first[0]
    assert answers == [[0.5, 0.3, 0.0]] * 2
    assert (waiting.aligned, waiting.reason, waiting.uncertainty) == (True, None, 0.0199)
    assert spent == second[0][2] == 0.75
    answers, waiting, _ = first[1]
    assert answers == [[0.5, 0.3, 0.0], [0.0, 0.0, 0.8], [0.5, 0.3, 0.0]], "undivided"
    assert (waiting.aligned, waiting.uncertainty) == (False, 0.0201)
    assert "20.10 ms" in waiting.reason and "2 of 6 steps" in waiting.reason
    assert second[1][1].reason == waiting.reason, "the ranks decide alike"


def test_one_rank_alone() -> None:
    exchange = RankExchange(None, HostClock())
    (window,) = exchange.exchange_steps([_step({"a": 0.4})])
    assert (_waits([window]), _waits([window], "transfer")) == ([[0]], [[0.5]]), "it waits for no other"
    assert [sums.last for sums in window.exchanges.values()] == [0], "nor does another for it"
    assert exchange.wait_attribution() == WaitAttribution(True, 0.0)
    exchange = RankExchange(None, HostClock())
    exchange.group = SimpleNamespace()  # of others, which are not asked
    window = exchange.own_window([_step({"a": 0.5}), replace(_step({"a": 0.7}), features="y")], "because")
    attribution = exchange.wait_attribution()
    assert (attribution.aligned, attribution.reason, window.features) == (False, "because", [None, "y"])
    assert [_waits([window], name)[0] for name in WAITS] == [[0, 0], [0, 0], [0.4, 0.2]]
    assert [sums.last for sums in window.exchanges.values()] == [0]


def _never(_: RankExchange) -> None:
    pass


@pytest.mark.parametrize(
    ("between", "compared", "ties"),
    [
        # rarer and rarer; between epochs the device is idle
        (RankExchange.sync_clocks_if_due, [(second, True) for second in (0, 6, 17, 38, 79, 140, 201)], 7),
        # without epochs with the next exchange, in short, while the device is busy
        (_never, [(0, True), *((second, False) for second in (7, 19, 41, 83, 145, 207))], 1),
        (RankExchange.sync_clocks, [(second, True) for second in range(251)], 251),
    ],
    ids=["between epochs", "without epochs", "at the end"],
)
def test_when_clocks_are_compared(
    between: Callable[[RankExchange], None], compared: list[tuple[int, bool]], ties: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 250 exchanges, one a second: at which, and whether with all rounds; how often the device's clock is tied."""
    now, seen, tied, clock, measure = [0], [], [], HostClock(), module.Alignment.measure_offset

    def measured(alignment: Any, group: Any, rounds: int = 40) -> None:
        seen.append((now[0], rounds == 40))
        measure(alignment, group, rounds)

    clock.tie = lambda: tied.append(now[0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module.Alignment, "measure_offset", measured)
    monkeypatch.setattr(module.Alignment, "uncertainty_at", lambda self, seconds: 0.0)
    exchange = RankExchange(None, clock)
    for now[0] in range(1, 251):
        exchange.exchange_steps([_step({})])
        between(exchange)
    assert (seen, len(tied)) == (compared, ties)


def _due(after: tuple[float, float]) -> int:
    module._FIRST_SYNC, count = after[dist.get_rank()], []
    exchange = RankExchange(dist.group.WORLD, HostClock())
    measure = exchange.alignment.measure_offset
    exchange.alignment.measure_offset = lambda *a: count.append(measure(*a))
    exchange.exchange_steps([_step({})])
    exchange.sync_clocks_if_due()
    return len(count)


def test_rank_0_says_when_clocks_are_compared() -> None:
    assert run_distributed(lambda: (_due((-1.0, 1e9)), _due((1e9, -1.0))), 2) == [(1, 0)] * 2
