import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep
from lightning_freescale.profiling.reporting.trace import Slice, nested, rows_without_overlap, write_trace
from tests.helpers.chrome_trace import read_trace
from tests.helpers.profiled_runs import random_run

ORIGIN = 5000.0
MS = 1e-3


def _spans(*spans):
    return tuple(Interval(kind, name, ORIGIN + start * MS, ORIGIN + end * MS) for kind, name, start, end in spans)


def _exchange(key, arrive, end, *, start=None, done=None, name="gradients", moved=None):
    start, done = arrive if start is None else start, end if done is None else done
    return ResolvedCollective(name, key, *(ORIGIN + t * MS for t in (arrive, start, end, done)), moved)


def _step(start, end, *, index=0, spans=(), collectives=(), hidden=()):
    return ResolvedStep(ORIGIN + start * MS, ORIGIN + end * MS, index, 32, _spans(*spans), tuple(collectives), tuple(hidden))


def _two_ranks():
    """Rank 1 needs 20 ms longer for its backward."""
    first = [("data", "data", 0, 10), ("forward", "forward", 10, 30), ("backward", "backward", 30, 70)]
    second = [("data", "data", 1, 10), ("forward", "forward", 10, 30), ("backward", "backward", 30, 90)]
    return [
        _step(0, 112, index=12, spans=first, collectives=[_exchange("world/1", 70, 100, moved=4096)]),
        _step(1, 111, index=12, spans=second, collectives=[_exchange("world/1", 90, 100)]),
    ]


def _busy(*ranks):
    """Return a step of each rank: a backward until a time, and an exchange between two other times."""
    return [
        _step(0, 40, spans=[("backward", "backward", 0, until)], collectives=[_exchange("world/1", arrive, end)])
        for until, arrive, end in ranks
    ]


@pytest.fixture
def written(tmp_path):
    return lambda *args, **kwargs: Shown(write_trace(tmp_path / "trace.json", *args, **kwargs))


class Shown:
    """Events that a reader shows, in milliseconds."""

    def __init__(self, path):
        self.events = read_trace(path)
        self.other = json.loads(path.read_text())["otherData"]
        names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in self.events if e["ph"] == "M"}
        processes = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
        self._places = {(pid, tid): (processes[pid], name) for (kind, pid, tid), name in names.items() if kind == "thread_name"}

    def _of(self, process, thread):
        return [e for e in self.events if e["ph"] == "X" and self.place(e) == (process, thread)]

    def slices(self, process, thread):
        near = partial(pytest.approx, abs=2e-4)
        return [(e["name"], near(e["ts"] / 1e3), near((e["ts"] + e["dur"]) / 1e3)) for e in self._of(process, thread)]

    def args(self, process, thread):
        return [e.get("args") for e in self._of(process, thread)]

    def place(self, event):
        return self._places[event["pid"], event["tid"]]

    def threads(self, process):
        return [thread for owner, thread in self._places.values() if owner == process]

    def arrows(self):
        """From slice to slice; a place is process, thread and the innermost slice there."""
        ends = {(e["id"], e["ph"]): self._around(e) for e in self.events if e["ph"] in "sf"}
        return [(place, ends[number, "f"]) for (number, phase), place in ends.items() if phase == "s"]

    def _around(self, flow):
        around = [e for e in self._of(*self.place(flow)) if e["ts"] <= flow["ts"] < e["ts"] + e["dur"]]
        return (*self.place(flow), around[-1]["name"])


def test_every_rank_shows_its_steps_stages_and_waits_on_one_clock(written):
    shown = written([_two_ranks()])
    assert shown.slices("rank 0", "step") == [("step 12", 0, 112)]
    assert shown.slices("rank 1", "step") == [("step 12", 1, 111)]
    assert shown.args("rank 0", "step") == [{"samples": 32}]
    assert shown.slices("rank 0", "stages") == [("data", 0, 10), ("forward", 10, 30), ("backward", 30, 70)]
    assert shown.slices("rank 1", "stages") == [("data", 1, 10), ("forward", 10, 30), ("backward", 30, 90)]
    # waits are split at the last arrival, and say who it was
    assert shown.slices("rank 0", "waits") == [("straggler wait: gradients", 70, 90), ("transfer: gradients", 90, 100)]
    assert shown.slices("rank 1", "waits") == [("transfer: gradients", 90, 100)]
    assert shown.args("rank 0", "waits") == [{"moved_bytes": 4096, "last_rank": 1, "straggler_wait_s": 0.02}] * 2
    assert shown.args("rank 1", "waits") == [{"last_rank": 1, "straggler_wait_s": 0.0}]
    assert shown.arrows() == [(("rank 1", "stages", "backward"), ("rank 0", "waits", "straggler wait: gradients"))]
    order = {e["pid"]: e["args"]["sort_index"] for e in shown.events if e["name"] == "process_sort_index"}
    names = {e["pid"]: e["args"]["name"] for e in shown.events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(order, key=order.get)] == ["all ranks", "rank 0", "rank 1"]
    # the counter is the bubble of each step
    (share,) = (e["args"]["share"] for e in shown.events if e["ph"] == "C")
    assert share == pytest.approx(1 - (60 + 80) / (112 + 110))


def test_a_stage_has_a_hole_where_the_rank_waits_inside_it_and_a_pause_is_shown(written):
    spans = [("backward", "backward", 0, 50), ("pause", "validation", 50, 55)]
    step = _step(0, 60, spans=spans, collectives=[_exchange("world/1", 20, 30)])
    stages = written([[step, step]]).slices("rank 0", "stages")
    assert stages == [("backward", 0, 20), ("backward", 30, 50), ("validation", 50, 55)]


def test_each_rank_that_waited_gets_an_arrow_of_its_own(written):
    quick, late = _two_ranks()
    arrows = written([[quick, late, quick]]).arrows()
    assert [target[0] for _, target in arrows] == ["rank 0", "rank 2"]
    assert {source for source, _ in arrows} == {("rank 1", "stages", "backward")}
    # a wait that is too short to notice has none
    for late_by, number in ((0.04, 0), (0.06, 1)):
        row = _busy(*((arrive, arrive, 30) for arrive in (20, 20 + late_by)))
        assert len(written([row]).arrows()) == number


def test_an_arrow_begins_in_the_step_if_the_last_stage_is_long_over(written):
    for since, thread in ((0.03, "stages"), (0.3, "step")):
        row = _busy(*((arrive - since, arrive, 30) for arrive in (10, 20)))
        assert [source[:2] for source, _ in written([row]).arrows()] == [("rank 1", thread)]


def test_an_arrow_may_begin_in_an_earlier_step_or_nowhere(written):
    """Let the late rank arrive at the end of a step and wait in the next one."""
    first = [_step(0, 10), _step(0, 20, index=1, spans=[("backward", "backward", 0, 20)])]
    second = [
        _step(11, 40, collectives=[_exchange("world/1", 11, 30)]),
        _step(21, 40, collectives=[_exchange("world/1", 19, 30)]),
    ]
    arrow = (("rank 1", "stages", "backward"), ("rank 0", "waits", "straggler wait: gradients"))
    assert written([first, second]).arrows() == [arrow]
    row = [_step(0, 40, collectives=[_exchange("world/1", 10, 30)]), _step(25, 40, collectives=[_exchange("world/1", 20, 30)])]
    shown = written([row])
    assert shown.arrows() == [] and shown.other == {"arrows_left_out": 1}


def test_an_exchange_that_is_over_before_the_last_arrival_keeps_its_arrow(written):
    """Clocks are a little uncertain."""
    shown = written([_busy((10, 10, 19.8), (20, 20, 30))])
    assert shown.slices("rank 0", "waits") == [("straggler wait: gradients", 10, 19.8)]
    assert shown.args("rank 0", "waits")[0]["straggler_wait_s"] == 0.0098
    assert len(shown.arrows()) == 1 and shown.other == {}


def test_exchanges_are_matched_by_their_key(written):
    """Let the ranks wait for two results in different orders, and for one inside the other."""
    a, b = partial(_exchange, "a/1", name="a"), partial(_exchange, "b/1", name="b")
    row = [_step(0, 40, collectives=[a(10, 20), b(20, 30)]), _step(0, 40, collectives=[b(5, 30), a(15, 20)])]
    shown = written([row])
    waits = [("straggler wait: a", 10, 15), ("transfer: a", 15, 20), ("transfer: b", 20, 30)]
    assert shown.slices("rank 0", "waits") == waits
    assert [a["last_rank"] for a in shown.args("rank 0", "waits")] == [1, 1, 0]
    # when rank 1 arrives at the outer exchange, rank 0 has begun to wait for the inner one, at which it was last itself
    row = [
        _step(0, 40, collectives=[a(10, 30), b(15, 25, moved=3)]),
        _step(0, 40, collectives=[b(1, 2, start=1), a(20, 30)]),
    ]
    shown = written([row])
    assert shown.slices("rank 0", "waits") == [("straggler wait: a", 10, 15), ("transfer: b", 15, 25), ("transfer: a", 25, 30)]
    assert [args.get("moved_bytes") for args in shown.args("rank 0", "waits")] == [None, 3, None]
    assert [place[0] for _, place in shown.arrows()] == ["rank 1"] and shown.other == {"arrows_left_out": 1}


def test_exchanges_of_one_name_are_told_apart(written):
    times = ((5, 10), (12, 20), (14, 16))
    exchanges = [_exchange(f"world/{n}", *time, moved=n) for n, time in enumerate(times, 1)]
    shown = written([[_step(0, 40, collectives=exchanges)] * 2])
    assert [args["moved_bytes"] for args in shown.args("rank 1", "waits")] == [1, 2, 3, 2]
    assert [begin for _, begin, _ in shown.slices("rank 1", "waits")] == [5, 12, 14, 16]


BACKGROUND = "exchanges in the background"


def test_exchanges_in_the_background_get_a_lane_each_where_they_overlap(written):
    hidden = [_exchange("", 1, 5, name="ids"), _exchange("", 3, 8, name="rows"), _exchange("", 6, 9, name="ids", moved=7)]
    shown = written([[_step(0, 10, hidden=hidden)]])
    assert shown.slices("rank 0", BACKGROUND) == [("ids", 1, 5), ("ids", 6, 9)]
    assert shown.slices("rank 0", f"{BACKGROUND}, 2") == [("rows", 3, 8)]
    assert shown.args("rank 0", BACKGROUND) == [None, {"moved_bytes": 7}]
    # so is one that was under way before it is waited for, and what arrived before the first step is shown
    ahead, at_once = _exchange("world/1", -4, 9, start=7, done=8), _exchange("world/2", 9.5, 9.9, start=9.51)
    shown = written([[_step(0, 10, collectives=[ahead, at_once])]])
    assert shown.slices("rank 0", BACKGROUND) == [("gradients", 0, 12)] and shown.slices("rank 0", "step") == [
        ("step 0", 4, 14)
    ]


def test_waits_are_not_divided_on_one_rank_nor_where_clocks_are_not_aligned(written):
    for row, aligned in ((_two_ranks()[:1], True), (_two_ranks(), False)):
        shown = written([row], aligned=aligned)
        assert shown.slices("rank 0", "waits") == [("wait: gradients", 70, 100)]
        assert shown.args("rank 0", "waits") == [{"moved_bytes": 4096}]
        assert shown.arrows() == []
    assert shown.slices("rank 1", "step") == [("step 12", 0, 110)]


def _seen(name, start, seconds, thread="kineto: stream 7", cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, "ts": ORIGIN + start, "dur": seconds}


def test_kineto_becomes_threads_of_its_rank(written):
    note = {"ph": "i", "s": "t", "cat": "note", "name": "3 are left out", "tid": "kineto: left out", "ts": ORIGIN + 0.02}
    operators = [_seen("inner", 0.010, 0.002, "thread 9", "cpu_op"), _seen("outer", 0.010, 0.005, "thread 9", "cpu_op")]
    crossing = [_seen("a", 0.010, 0.010_001, "b"), _seen("b", 0.020, 0.005, "b")]
    shown = written([_two_ranks()], kineto=[[], [_seen("gemm", 0.040, 0.010), note, *operators, *crossing]])
    assert shown.slices("rank 1", "kineto: stream 7") == [("gemm", 40, 50)]
    assert [(shown.place(e), e["name"], e["ts"]) for e in shown.events if e["ph"] == "i"] == [
        (("rank 1", "kineto: left out"), "3 are left out", pytest.approx(20000, abs=0.2))
    ]
    assert not any(thread.startswith("kineto") for thread in shown.threads("rank 0"))
    assert shown.slices("rank 1", "thread 9") == [("outer", 10, 15), ("inner", 10, 12)]
    assert shown.slices("rank 1", "b") == [("a", 10, 20), ("b", 20, 25)], "they are cut, not lost"


def test_a_window_before_the_first_step_or_without_one_moves_the_beginning(written):
    shown = written([_two_ranks()], kineto=[[_seen("gemm", -0.5, 0.010)], []])
    assert shown.slices("rank 0", "kineto: stream 7") == [("gemm", 0, 10)]
    assert shown.slices("rank 1", "step") == [("step 12", 501, 611)]
    assert written([]).events == []
    assert written([], kineto=[[_seen("gemm", 0.0, 0.010)]]).slices("rank 0", "kineto: stream 7") == [("gemm", 0, 10)]


def test_names_are_kept_as_they_are(written, tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_trace(str(tmp_path / "new" / "trace.json"), [[ResolvedStep(ORIGIN, ORIGIN + 1, 0, float("nan"))] * 2])
    shown = written([[_step(0, 10, spans=[("forward", 'Vorwärts "\n', 0, 9)])]])
    assert shown.slices("rank 0", "stages") == [('Vorwärts "\n', 0, 9)]
    assert "\\u" not in (tmp_path / "trace.json").read_text(encoding="utf-8")  # which some readers refuse


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_whatever_the_ranks_recorded_the_trace_is_right(tmp_path_factory, seed, ranks):
    read_trace(write_trace(tmp_path_factory.mktemp("trace") / "trace.json", random_run(seed, ranks, 4)))


_SLICES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12)


def _slices(*edges):
    return [Slice(start, end, f"{start}-{end}", "x") for start, end in edges]


def _edges(slices):
    return [(s.start, s.end) for s in slices]


def test_of_two_that_cross_the_earlier_is_cut_and_says_what_it_lasted():
    given_ = _slices((0, 80), (40, 120))
    first, second = nested(given_)
    assert (first.end, first.args) == (40, {"uncut_s": 10e-6})
    assert (second.start, second.end, second.args) == (40, 120, None)
    assert _edges(given_) == [(0, 80), (40, 120)], "the slices that were given stay"
    assert _edges(nested(_slices((0, 20), (1, 18), (2, 4), (10, 30)))) == [(0, 10), (1, 10), (2, 4), (10, 30)]
    edges = [(0, 10), (0, 5), (2, 5), (5, 10), (10, 20), (12, 12)]
    settled = nested(_slices(*reversed(edges)))
    assert _edges(settled) == edges and all(s.args is None for s in settled), "they nest or touch"


@given(_SLICES)
def test_settled_slices_nest_and_none_is_lost(edges):
    settled = nested(_slices(*((start, start + length) for start, length in edges)))
    assert sorted(s.start for s in settled) == sorted(start for start, _ in edges)
    for k, inner in enumerate(settled):
        for outer in settled[:k]:
            assert inner.start >= outer.start and (inner.start >= outer.end or inner.end <= outer.end)


@given(_SLICES)
def test_lanes_do_not_overlap_and_are_as_few_as_can_be(edges):
    slices = _slices(*((start, start + length + 1) for start, length in edges))
    rows = rows_without_overlap(slices)
    assert sorted(_edges(s for row in rows for s in row)) == sorted(_edges(slices))
    assert all(a.end <= b.start for row in rows for a, b in zip(row, row[1:]))
    busiest = max((sum(s.start <= t < s.end for s in slices) for t in range(45)), default=0)
    assert len(rows) == busiest
