"""From what every rank recorded to what rank 0 knows of all: who was waited for, how sure that is, when clocks are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.analysis.intervals import WAITS
from lightning_freescale.profiling.analysis.rank_window import RankWindow
from lightning_freescale.profiling.collection import rank_exchange as module
from lightning_freescale.profiling.collection.rank_exchange import RankExchange
from lightning_freescale.profiling.recording.clocks import HostClock
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep
from lightning_freescale.profiling.reporting.facts import WaitAttribution
from lightning_freescale.testing import run_distributed


class Ties(HostClock):
    """Counts how often it is tied."""

    count = 0

    def tie(self) -> None:
        self.count += 1


def _step(arrivals: dict[str, float], wall: float = 1.0, index: int = 7, moved: int | None = None) -> ResolvedStep:
    """Every collective ends at 0.9."""
    collectives = tuple(ResolvedCollective("c", key, at, at, 0.9, 0.9, moved) for key, at in arrivals.items())
    return ResolvedStep(0.0, wall, index, 3, (), collectives)


def _waits(windows: list[RankWindow], name: str = "straggler_wait") -> list[list[float]]:
    return [column(window.breakdown, name).round(6).tolist() for window in windows]


PAIRS = [{"pair:7.0": 0.1, "world:7.0": 0.5}, {"pair:7.0": 0.3, "world:7.0": 0.5}, {"world:7.0": 0.75, "own": 0.2}]


def _subgroups() -> Any:
    exchange = RankExchange(dist.group.WORLD, HostClock())
    exchange.alignment.uncertainty_at = lambda _: 0.0  # however busy the machine is
    steps = [
        _step({key: at for key, at in PAIRS[dist.get_rank()].items() if key == only}) for only in ("pair:7.0", "world:7.0")
    ]
    windows = exchange.exchange_steps([*steps, _step({"own": 0.2})], [f"rank {dist.get_rank()}", None, None], [None] * 3)
    return windows, exchange.wait_attribution()


def test_collectives_of_some_ranks_are_matched_by_key() -> None:
    (windows, waiting), *others = run_distributed(_subgroups, 3)
    assert [nothing for nothing, _ in others] == [None, None]
    assert _waits(windows) == [[0.2, 0.25, 0], [0, 0.25, 0], [0, 0, 0]]
    assert _waits(windows, "transfer") == [[0.6, 0.15, 0.7], [0.6, 0.15, 0.7], [0, 0.15, 0.7]]
    assert [window.features[0] for window in windows] == ["rank 0", "rank 1", "rank 2"]
    assert [window.exchanges["c"].last for window in windows] == [1, 2, 2]
    assert waiting.aligned


def _uncertain(uncertainties: list[list[float]], walls: list[float]) -> Any:
    rank, answers = dist.get_rank(), []
    exchange = RankExchange(dist.group.WORLD, HostClock())
    exchange.spent_here = [0.25, 0.75][rank]
    for uncertainty in uncertainties:
        exchange.alignment.uncertainty_at = lambda _, mine=uncertainty[rank]: mine
        step = _step({"world:7.0": 0.1 + 0.5 * rank}, walls[rank] + 5, moved=10**8)
        validation = Interval("pause", "validation", walls[rank], walls[rank] + 5)
        paused = replace(step, spans=(validation, validation._replace(name="checkpoint", start=walls[rank] + 1)))
        windows = exchange.exchange_steps([paused] * 2, [None] * 2, [None] * 2)
        answers.append(None if windows is None else [_waits(windows, name)[0][0] for name in WAITS])
    return answers, exchange.wait_attribution(), exchange.spent


def test_clocks_are_good_enough_up_to_two_percent_of_a_step_on_the_worst_rank() -> None:
    uncertainties = [[0, 0.0199], [0.01, 0.004]]
    (answers, waiting, spent), other = run_distributed(_uncertain, 2, uncertainties, [1.1, 0.9])
    assert answers == [[0.5, 0.3, 0.0]] * 2
    assert (waiting.aligned, waiting.reason, waiting.uncertainty) == (True, None, 0.0199)
    assert spent == other[2] == 0.75


def test_clocks_that_disagree_by_more_are_not_used() -> None:
    first, second = run_distributed(_uncertain, 2, [[0, 0.001], [0, 0.0201], [0, 0.001]], [1.1, 0.9])
    answers, waiting, _ = first
    assert answers == [[0.5, 0.3, 0.0], [0.0, 0.0, 0.8], [0.5, 0.3, 0.0]], "undivided"
    assert (waiting.aligned, waiting.uncertainty) == (False, 0.0201)
    assert "agreed only within 20.10 ms" in waiting.reason
    assert waiting.reason.endswith(": 2 of 6 steps")
    assert second[1].reason == waiting.reason, "the ranks decide alike"


def _clock() -> WaitAttribution:
    exchange, rank = RankExchange(dist.group.WORLD, HostClock()), dist.get_rank()
    assert exchange.wait_attribution().clock is None, "nothing is known of the others"
    exchange.alignment.figures = lambda: {"drift": [0.0, 1e-6, -5e-6][rank], "syncs": rank, "round_trip_s": 0.1 * rank}
    exchange.exchange_steps([_step({})], [None], [None])
    return exchange.wait_attribution()


def test_the_clocks_figures_are_the_worst_of_all_ranks() -> None:
    assert run_distributed(_clock, 3)[0].clock == {"drift": -5e-6, "syncs": 2, "round_trip_s": 0.2}


def test_the_waits_of_a_rank_alone_are_undivided_and_it_says_why() -> None:
    exchange = RankExchange(None, HostClock())
    exchange.group = SimpleNamespace()  # of others, which are not asked
    window = exchange.own_window([_step({"a": 0.5}), _step({"a": 0.7})], ["x", "y"], [1.0, None], "because")
    attribution = exchange.wait_attribution()
    assert (attribution.aligned, attribution.reason) == (False, "because")
    assert [_waits([window], name)[0] for name in WAITS] == [[0, 0], [0, 0], [0.4, 0.2]]
    assert window.features == ["x", "y"]
    assert [sums.last for sums in window.exchanges.values()] == [0]


def test_one_rank_waits_for_nobody() -> None:
    exchange = RankExchange(None, HostClock())
    (window,) = exchange.exchange_steps([_step({"a": 0.4})], [None], [None])
    assert (_waits([window]), _waits([window], "transfer")) == ([[0]], [[0.5]])
    assert [sums.last for sums in window.exchanges.values()] == [0], "nor does anybody for it"
    assert exchange.wait_attribution() == WaitAttribution(True, 0.0)


def _compared(monkeypatch: pytest.MonkeyPatch, between: Callable[[RankExchange], None]) -> tuple[list[tuple[int, bool]], int]:
    """Seconds at which clocks were compared in 250 exchanges, one a second, and whether with all rounds; ties."""
    now, seen, clock = [0], [], Ties()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module.Alignment, "measure_offset", lambda self, group, rounds=40: seen.append((now[0], rounds == 40)))
    monkeypatch.setattr(module.Alignment, "uncertainty_at", lambda self, seconds: 0.0)
    exchange = RankExchange(None, clock)
    for now[0] in range(1, 251):
        exchange.exchange_steps([_step({})], [None], [None])
        between(exchange)
    return seen, clock.count


def test_clocks_are_compared_rarer_and_rarer_between_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, ties = _compared(monkeypatch, lambda exchange: exchange.sync_clocks_if_due())
    assert seen == [(second, True) for second in (0, 6, 17, 38, 79, 140, 201)]
    assert ties == len(seen), "the device is idle"


def test_without_epochs_it_is_done_with_the_next_exchange_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, ties = _compared(monkeypatch, lambda exchange: None)
    assert seen == [(0, True), *((second, False) for second in (7, 19, 41, 83, 145, 207))]
    assert ties == 1, "the device is busy"


def test_at_the_end_it_is_done_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = _compared(monkeypatch, lambda exchange: exchange.sync_clocks())
    assert [second for second, _ in seen] == list(range(251)), "and it is not due then"


def _due(mine: list[float]) -> int:
    module._FIRST_SYNC, count = mine[dist.get_rank()], []
    exchange = RankExchange(dist.group.WORLD, HostClock())
    measure = exchange.alignment.measure_offset
    exchange.alignment.measure_offset = lambda *a: count.append(measure(*a))
    exchange.exchange_steps([_step({})], [None], [None])
    exchange.sync_clocks_if_due()
    return len(count)


@pytest.mark.parametrize(("mine", "compared"), [([-1.0, 1e9], 1), ([1e9, -1.0], 0)])
def test_rank_0_says_when(mine: list[float], compared: int) -> None:
    assert run_distributed(_due, 2, mine) == [compared] * 2


def test_windows_hold_whole_steps() -> None:
    exchange = RankExchange(None, HostClock())
    (window,) = exchange.exchange_steps([_step({}, index=i) for i in (4, 5)], [None, None], [None, None])
    assert window.steps == [4, 5]
    assert np.shape(window.breakdown)[0] == 2
