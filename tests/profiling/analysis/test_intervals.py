"""A step cut into pieces without overlap."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.intervals import Interval, hidden_seconds, host_section, intervals_of
from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedSpan, ResolvedStep

times = st.integers(0, 12).map(float)
kinds = st.sampled_from(["data", "forward", "backward", "optimizer", "host", "pause"])
spans = st.lists(st.tuples(kinds, times, times), max_size=6)
waits = st.lists(st.tuples(times, times, times, times), max_size=3)


def _step(spans: list[tuple], collectives: list[tuple]) -> ResolvedStep:
    return ResolvedStep(
        0.0,
        10.0,
        spans=tuple(ResolvedSpan(kind, kind, *sorted(ends)) for kind, *ends in spans),
        collectives=tuple(ResolvedCollective("a", str(k), *c, c[-1]) for k, c in enumerate(collectives)),
    )


def _cut(spans: list[tuple], collectives: Sequence[tuple] = (), last: Sequence[float] = ()) -> list[tuple]:
    return [(p.kind, p.start, p.end) for p in intervals_of(_step(spans, collectives), last)]


def test_wait_is_cut_where_the_last_rank_arrives() -> None:
    whole = [("forward", 0.0, 10.0)]
    cut = _cut(whole, [(3.0, 4.0, 8.0)], [6.0])
    assert cut == [("forward", 0, 4), ("straggler_wait", 4, 6), ("transfer", 6, 8), ("forward", 8, 10)]
    assert _cut(whole, [(3.0, 4.0, 8.0)], [2.0])[1] == ("transfer", 4, 8)
    assert _cut(whole, [(3.0, 4.0, 8.0)], [9.0])[1] == ("straggler_wait", 4, 8)


@pytest.mark.parametrize("last", [2.0, 5.0, 7.5])
def test_what_begins_within_a_wait_counts_whole(last: float) -> None:
    """Whenever the last rank arrives."""
    cut = _cut([("forward", 4.0, 7.0)], [(3.0, 3.0, 8.0)], [last])
    assert ("forward", 4, 7) in cut
    assert sum(end - start for kind, start, end in cut if kind in ("straggler_wait", "transfer")) == 2


def test_pause_goes_before_all() -> None:
    cut = _cut([("pause", 2, 6), ("forward", 3, 8)])
    assert cut == [("gap", 0, 2), ("pause", 2, 6), ("forward", 6, 8), ("gap", 8, 10)]


def test_gaps_know_their_neighbours() -> None:
    pieces = intervals_of(_step([("data", 1, 2), ("forward", 3, 4), ("backward", 6, 7)], [(4.5, 4.5, 5.5)]), [5.0])
    gaps = [(p.start, host_section(p)) for p in pieces if p.kind == "gap"]
    assert gaps == [
        (0, "loop, before the batch"),
        (2, "hooks before forward"),
        (4, "between forward and backward"),
        (5.5, "between forward and backward"),
        (7, "hooks after the step"),
    ]
    assert host_section(Interval("gap", "data|", 0, 1)) is None


def test_hidden_is_compute_beside_any_exchange() -> None:
    pieces = [Interval("forward", "", 0, 4), Interval("data", "", 4, 6), Interval("backward", "", 6, 8)]
    assert hidden_seconds([(1, 3), (2, 5), (2, 2.5), (7, 7), (7, 20)], pieces) == 4
    assert hidden_seconds([(1, 4), (2, 3), (3.5, 3.75)], pieces) == 3


@given(spans, waits)
def test_pieces_cover_the_step_once(found: list[tuple], collectives: list[tuple]) -> None:
    collectives = [(min(a, *ends), *sorted(ends)) for a, _, *ends in collectives]
    pieces = intervals_of(_step(found, collectives), [5.0] * len(collectives))
    assert (pieces[0].start, pieces[-1].end) == (0, 10)
    assert all(p.end > p.start for p in pieces)
    assert [p.end for p in pieces[:-1]] == [p.start for p in pieces[1:]]
    for piece in pieces:
        within = piece.start + 0.5
        about = [(s[0], *sorted(s[1:])) for s in found] + [("wait", *c[1:]) for c in collectives]
        about = [i for i in about if i[1] < within < i[2]]
        latest = max((i[1] for i in about), default=None)
        if any(i[0] == "pause" for i in about):
            assert piece.kind == "pause"
        elif latest is None:
            assert piece.kind == "gap"
        else:
            kind = "wait" if piece.kind in ("straggler_wait", "transfer") else piece.kind
            assert kind in {i[0] for i in about if i[1] == latest}
