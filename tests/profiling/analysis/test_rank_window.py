"""What a rank finds out about its own steps: breakdown, segments, and sums of its exchanges and of its host's overhead."""

from __future__ import annotations

import pytest

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES, column
from lightning_freescale.profiling.analysis.rank_window import ExchangeSums, window_of
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep

SPANS = (
    Interval("data", "fetch", 0, 1),
    Interval("forward", "forward", 2, 4),
    Interval("backward", "backward", 4, 8),
    Interval("optimizer", "optimizer", 9, 10),
)
ROWS = ResolvedCollective("rows", "rows:0", 2.0, 3.0, 3.75, 3.75, moved=100)  # arrived a second ahead
GRADIENTS = ResolvedCollective("gradients", "g:0", 6.0, 6.0, 7.0, 7.0, moved=None)
STEP = ResolvedStep(0, 11, 5, 32, SPANS, (ROWS, GRADIENTS))


def _same(sums: ExchangeSums, **values: float) -> None:
    assert vars(sums) == pytest.approx({**vars(ExchangeSums()), **values})


def test_the_steps_themselves() -> None:
    other = ResolvedStep(11, 12, 6, 31)
    window = window_of([STEP, other], [[3.25, 6.5], []], ["features", None], [1.5, None])
    assert (window.steps, window.samples, window.features) == ([5, 6], [32, 31], ["features", None])
    assert window.predicted == [1.5, None]
    assert window.breakdown.shape == (2, len(PART_NAMES))
    assert column(window.breakdown, "wall").tolist() == [11, 1]
    assert column(window.breakdown, "straggler_wait").tolist() == [0.75, 0]
    assert column(window.breakdown, "transfer").tolist() == [1.0, 0]
    assert [each.keys for each in window.segments] == [("rows:0", "g:0"), ()]
    assert [each.start for each in window.segments] == [0, 11]


def test_sums_of_exchanges_by_name() -> None:
    window = window_of([STEP, STEP], [[3.25, 6.5], [2.0, 6.0]], [None, None], [None, None])
    assert list(window.exchanges) == ["rows", "gradients"]
    rows, gradients = window.exchanges.values()
    _same(rows, count=2, straggler_wait=0.25, transfer=0.5 + 0.75, hidden=2 * 1.0, moved=200, last=1)
    _same(gradients, count=2, straggler_wait=0.5, transfer=0.5 + 1.0, unknown=2, last=1)


@pytest.mark.parametrize(("last", "straggler_wait"), [(-5.0, 0.0), (99.0, 1.0)])
def test_a_wait_is_split_within_itself(last: float, straggler_wait: float) -> None:
    gradients = window_of([STEP], [[2.0, last]], [None], [None]).exchanges["gradients"]
    assert (gradients.straggler_wait, gradients.transfer) == (straggler_wait, 1 - straggler_wait)


def test_alone_a_rank_does_not_know_who_came_last() -> None:
    window = window_of([STEP], [[2.0, 6.0]], [None], [None], alone=True)
    assert [sums.last for sums in window.exchanges.values()] == [0, 0]


def test_undivided_waits_are_one_figure_of_their_exchange_and_nobody_came_last() -> None:
    window = window_of([STEP], [[3.25, 6.5]], [None], [None], divided=False)
    assert column(window.breakdown, "wait").tolist() == [1.75]
    assert not column(window.breakdown, "straggler_wait").any() and not column(window.breakdown, "transfer").any()
    rows, gradients = window.exchanges.values()
    _same(rows, count=1, wait=0.75, hidden=1.0, moved=100)
    _same(gradients, count=1, wait=1.0, unknown=1)


def test_exchanges_of_other_threads_are_hidden_and_counted_where_they_begin() -> None:
    rows = ResolvedCollective("rows", "", 7.0, 7.0, 7.0, 12.5, moved=50)
    steps = [
        ResolvedStep(0, 11, 5, 32, SPANS, (), (rows,)),
        ResolvedStep(11, 13, 6, 32, (Interval("forward", "forward", 11, 13),), (), (rows,)),
    ]
    window = window_of(steps, [[], []], [None, None], [None, None])
    assert list(window.exchanges) == ["rows (background)"]
    sums = window.exchanges["rows (background)"]
    assert sums.count == 1
    assert (sums.hidden, sums.straggler_wait, sums.transfer, sums.last) == (pytest.approx(2.0 + 1.5), 0, 0, 0)
    assert column(window.breakdown, "hidden").tolist() == [2.0, 1.5]


def test_bytes_in_the_background_count_once() -> None:
    rows = ResolvedCollective("rows", "", 7.0, 7.0, 7.0, 12.5, moved=50)
    steps = [ResolvedStep(0, 11, hidden=(rows,)), ResolvedStep(11, 13, hidden=(rows,))]
    sums = window_of(steps, [[], []], [None, None], [None, None]).exchanges["rows (background)"]
    assert (sums.count, sums.moved) == (1, 50)


def test_host_overhead_by_section() -> None:
    host = window_of([STEP, STEP], [[2.0, 6.0]] * 2, [None, None], [None, None]).host
    expected = {"hooks before forward": 1, "between backward and optimizer": 1, "hooks after the step": 1}
    assert host == pytest.approx({section: 2 * seconds for section, seconds in expected.items()})


def test_time_nobody_knows_of_is_not_the_hosts() -> None:
    assert window_of([ResolvedStep(0, 5)], [[]], [None], [None]).host == {}
