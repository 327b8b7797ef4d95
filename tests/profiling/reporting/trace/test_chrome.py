from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.profiling.reporting.trace.chrome import Slice, nested, rows_without_overlap

_SLICES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12)


def _slices(*edges):
    return [Slice(start, end, f"{start}-{end}", "x") for start, end in edges]


def _edges(slices):
    return [(s.start, s.end) for s in slices]


def test_slices_that_nest_or_touch_stay_as_they_are():
    edges = [(0, 10), (0, 5), (2, 5), (5, 10), (10, 20), (12, 12)]
    settled = nested(_slices(*reversed(edges)))
    assert _edges(settled) == edges and all(s.args is None for s in settled)


def test_of_two_that_cross_the_earlier_is_cut_and_says_what_it_lasted():
    first, second = nested(_slices((0, 80), (40, 120)))
    assert (first.end, first.args) == (40, {"uncut_s": 10e-6})
    assert (second.start, second.end, second.args) == (40, 120, None)


def test_a_cut_goes_through_all_that_cross():
    assert _edges(nested(_slices((0, 20), (1, 18), (2, 4), (10, 30)))) == [(0, 10), (1, 10), (2, 4), (10, 30)]


def test_settling_keeps_the_slices_it_was_given():
    given_ = _slices((0, 10), (5, 15))
    nested(given_)
    assert _edges(given_) == [(0, 10), (5, 15)]


@given(_SLICES)
def test_settled_slices_nest_and_none_is_lost(edges):
    settled = nested(_slices(*((start, start + length) for start, length in edges)))
    assert sorted(s.start for s in settled) == sorted(start for start, _ in edges)
    for k, inner in enumerate(settled):
        for outer in settled[:k]:
            assert inner.start >= outer.start and (inner.start >= outer.end or inner.end <= outer.end)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=12))
def test_lanes_do_not_overlap_and_are_as_few_as_can_be(edges):
    slices = _slices(*((start, start + length) for start, length in edges))
    rows = rows_without_overlap(slices)
    assert sorted(_edges(s for row in rows for s in row)) == sorted(_edges(slices))
    assert all(a.end <= b.start for row in rows for a, b in zip(row, row[1:]))
    busiest = max((sum(s.start <= t < s.end for s in slices) for t in range(45)), default=0)
    assert len(rows) == busiest
