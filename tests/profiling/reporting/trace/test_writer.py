import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.profiling.analysis.breakdown import as_array, attribute, bubble
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep
from lightning_freescale.profiling.reporting.trace.writer import write_trace
from tests.helpers.chrome_trace import read_trace

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
    return [
        _step(
            0,
            112,
            index=12,
            spans=[("data", "data", 0, 10), ("forward", "forward", 10, 30), ("backward", "backward", 30, 70)],
            collectives=[_exchange("world/1", 70, 100, moved=4096)],
        ),
        _step(
            1,
            111,
            index=12,
            spans=[("data", "data", 1, 10), ("forward", "forward", 10, 30), ("backward", "backward", 30, 90)],
            collectives=[_exchange("world/1", 90, 100)],
        ),
    ]


def _written(tmp_path, *args, **kwargs):
    return Shown(write_trace(tmp_path / "trace.json", *args, **kwargs))


class Shown:
    """What a reader shows, in milliseconds."""

    def __init__(self, path):
        self.events = read_trace(path)
        self.other = json.loads(path.read_text())["otherData"]
        names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in self.events if e["ph"] == "M"}
        self._places = {
            place: (
                names["process_name", place[0], next(t for n, p, t in names if n == "process_name" and p == place[0])],
                name,
            )
            for (kind, *place), name in ((key, value) for key, value in names.items())
            if kind == "thread_name"
            for place in [tuple(place)]
        }

    def slices(self, process, thread):
        found = [e for e in self.events if e["ph"] == "X" and self.place(e) == (process, thread)]
        return [
            (e["name"], pytest.approx(e["ts"] / 1e3, abs=2e-4), pytest.approx((e["ts"] + e["dur"]) / 1e3, abs=2e-4))
            for e in found
        ]

    def args(self, process, thread):
        return [e.get("args") for e in self.events if e["ph"] == "X" and self.place(e) == (process, thread)]

    def place(self, event):
        return self._places[event["pid"], event["tid"]]

    def threads(self, process):
        return [thread for owner, thread in self._places.values() if owner == process]

    def arrows(self):
        """From slice to slice; a place is process, thread and the innermost slice there."""
        ends = {(e["id"], e["ph"]): self._around(e) for e in self.events if e["ph"] in "sf"}
        return [(place, ends[number, "f"]) for (number, phase), place in ends.items() if phase == "s"]

    def _around(self, flow):
        around = [
            e for e in self.events if e["ph"] == "X" and e["tid"] == flow["tid"] and e["ts"] <= flow["ts"] < e["ts"] + e["dur"]
        ]
        return (*self.place(flow), around[-1]["name"])


def test_every_rank_shows_its_steps_and_stages_on_one_clock(tmp_path):
    shown = _written(tmp_path, [_two_ranks()])
    assert shown.slices("rank 0", "step") == [("step 12", 0, 112)]
    assert shown.slices("rank 1", "step") == [("step 12", 1, 111)]
    assert shown.slices("rank 0", "stages") == [("data", 0, 10), ("forward", 10, 30), ("backward", 30, 70)]
    assert shown.slices("rank 1", "stages") == [("data", 1, 10), ("forward", 10, 30), ("backward", 30, 90)]


def test_processes_are_in_the_order_of_ranks_below_the_whole(tmp_path):
    events = _written(tmp_path, [_two_ranks()]).events
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(order, key=order.get)] == ["all ranks", "rank 0", "rank 1"]
    assert len(set(order.values())) == 3


def test_waits_are_split_at_the_last_arrival_and_say_who_it_was(tmp_path):
    shown = _written(tmp_path, [_two_ranks()])
    assert shown.slices("rank 0", "waits") == [("straggler wait: gradients", 70, 90), ("transfer: gradients", 90, 100)]
    assert shown.slices("rank 1", "waits") == [("transfer: gradients", 90, 100)]
    assert shown.args("rank 0", "waits") == [{"moved_bytes": 4096, "last_rank": 1, "straggler_wait_s": 0.02}] * 2
    assert shown.args("rank 1", "waits") == [{"last_rank": 1, "straggler_wait_s": 0.0}]


def test_a_stage_has_a_hole_where_the_rank_waits_inside_it(tmp_path):
    step = _step(0, 50, spans=[("backward", "backward", 0, 50)], collectives=[_exchange("world/1", 20, 30)])
    shown = _written(tmp_path, [[step, step]])
    assert shown.slices("rank 0", "stages") == [("backward", 0, 20), ("backward", 30, 50)]


def test_a_pause_is_shown(tmp_path):
    step = _step(0, 50, spans=[("forward", "forward", 0, 20), ("pause", "validation", 20, 45)])
    assert _written(tmp_path, [[step]]).slices("rank 0", "stages") == [("forward", 0, 20), ("validation", 20, 45)]


def test_an_arrow_leads_from_what_the_late_rank_did_to_the_wait(tmp_path):
    arrows = _written(tmp_path, [_two_ranks()]).arrows()
    assert arrows == [(("rank 1", "stages", "backward"), ("rank 0", "waits", "straggler wait: gradients"))]


def test_everybody_who_waited_gets_an_arrow_of_its_own(tmp_path):
    quick, late = _two_ranks()
    shown = _written(tmp_path, [[quick, late, quick]])
    assert [target[0] for _, target in shown.arrows()] == ["rank 0", "rank 2"]
    assert {source for source, _ in shown.arrows()} == {("rank 1", "stages", "backward")}


@pytest.mark.parametrize(("late_by", "arrows"), [(0.04, 0), (0.06, 1)])
def test_a_wait_that_nobody_notices_gets_no_arrow(tmp_path, late_by, arrows):
    row = [
        _step(0, 40, spans=[("backward", "backward", 0, arrive)], collectives=[_exchange("world/1", arrive, 30)])
        for arrive in (20, 20 + late_by)
    ]
    assert len(_written(tmp_path, [row]).arrows()) == arrows


@pytest.mark.parametrize(("since", "thread"), [(0.03, "stages"), (0.3, "step")])
def test_an_arrow_begins_in_the_step_if_the_last_stage_is_long_over(tmp_path, since, thread):
    row = [
        _step(0, 40, spans=[("backward", "backward", 0, arrive - since)], collectives=[_exchange("world/1", arrive, 30)])
        for arrive in (10, 20)
    ]
    assert [source[:2] for source, _ in _written(tmp_path, [row]).arrows()] == [("rank 1", thread)]


def test_an_arrow_may_begin_in_an_earlier_step(tmp_path):
    """The late rank arrived at the end of a step and waits in the next one."""
    first = [_step(0, 10), _step(0, 20, index=1, spans=[("backward", "backward", 0, 20)])]
    second = [
        _step(11, 40, collectives=[_exchange("world/1", 11, 30)]),
        _step(21, 40, collectives=[_exchange("world/1", 19, 30)]),
    ]
    shown = _written(tmp_path, [first, second])
    assert shown.arrows() == [(("rank 1", "stages", "backward"), ("rank 0", "waits", "straggler wait: gradients"))]


def test_an_exchange_that_is_over_before_the_last_arrival_keeps_its_arrow(tmp_path):
    """Clocks are a little uncertain."""
    row = [
        _step(0, 40, spans=[("backward", "backward", 0, arrive)], collectives=[_exchange("world/1", arrive, end)])
        for arrive, end in ((10, 19.8), (20, 30))
    ]
    shown = _written(tmp_path, [row])
    assert shown.slices("rank 0", "waits") == [("straggler wait: gradients", 10, 19.8)]
    assert shown.args("rank 0", "waits")[0]["straggler_wait_s"] == 0.0098
    assert len(shown.arrows()) == 1 and shown.other == {}


def test_an_arrow_that_can_begin_nowhere_is_told(tmp_path):
    row = [_step(0, 40, collectives=[_exchange("world/1", 10, 30)]), _step(25, 40, collectives=[_exchange("world/1", 20, 30)])]
    shown = _written(tmp_path, [row])
    assert shown.arrows() == [] and shown.other == {"arrows_left_out": 1}


def test_exchanges_are_matched_by_their_key(tmp_path):
    """The ranks need two results in different orders."""
    row = [
        _step(0, 40, collectives=[_exchange("a/1", 10, 20, name="a"), _exchange("b/1", 20, 30, name="b")]),
        _step(0, 40, collectives=[_exchange("b/1", 5, 30, name="b"), _exchange("a/1", 15, 20, name="a")]),
    ]
    shown = _written(tmp_path, [row])
    assert shown.slices("rank 0", "waits") == [
        ("straggler wait: a", 10, 15),
        ("transfer: a", 15, 20),
        ("transfer: b", 20, 30),
    ]
    assert [a["last_rank"] for a in shown.args("rank 0", "waits")] == [1, 1, 0]


def test_exchanges_of_one_name_are_told_apart(tmp_path):
    exchanges = [
        _exchange("world/1", 5, 10, moved=1),
        _exchange("world/2", 12, 20, moved=2),
        _exchange("world/3", 14, 16, moved=3),
    ]
    row = [_step(0, 40, collectives=exchanges)] * 2
    shown = _written(tmp_path, [row])
    assert [args["moved_bytes"] for args in shown.args("rank 1", "waits")] == [1, 2, 3, 2]
    assert [begin for _, begin, _ in shown.slices("rank 1", "waits")] == [5, 12, 14, 16]


def test_a_wait_inside_another_is_nobodys_arrow_and_told(tmp_path):
    """When rank 1 arrives at the outer exchange, rank 0 has begun to wait for the inner one, at which it was last itself."""
    row = [
        _step(0, 40, collectives=[_exchange("a/1", 10, 30, name="a"), _exchange("b/1", 15, 25, name="b", moved=3)]),
        _step(0, 40, collectives=[_exchange("b/1", 1, 2, start=1, name="b"), _exchange("a/1", 20, 30, name="a")]),
    ]
    shown = _written(tmp_path, [row])
    assert shown.slices("rank 0", "waits") == [("straggler wait: a", 10, 15), ("transfer: b", 15, 25), ("transfer: a", 25, 30)]
    assert [args.get("moved_bytes") for args in shown.args("rank 0", "waits")] == [None, 3, None]
    assert [place[0] for _, place in shown.arrows()] == ["rank 1"] and shown.other == {"arrows_left_out": 1}


def test_exchanges_in_the_background_get_a_lane_each_where_they_overlap(tmp_path):
    hidden = [
        _exchange("", 1, 5, name="ids"),
        _exchange("", 3, 8, name="rows"),
        _exchange("", 6, 9, name="ids", moved=7),
    ]
    shown = _written(tmp_path, [[_step(0, 10, hidden=hidden)]])
    assert shown.slices("rank 0", "exchanges in the background") == [("ids", 1, 5), ("ids", 6, 9)]
    assert shown.slices("rank 0", "exchanges in the background, 2") == [("rows", 3, 8)]
    assert shown.args("rank 0", "exchanges in the background") == [None, {"moved_bytes": 7}]


def test_an_exchange_under_way_before_it_is_waited_for_is_in_the_background(tmp_path):
    ahead, at_once = _exchange("world/1", 2, 9, start=7, done=8), _exchange("world/2", 9.5, 9.9, start=9.51)
    shown = _written(tmp_path, [[_step(0, 10, collectives=[ahead, at_once])]])
    assert shown.slices("rank 0", "exchanges in the background") == [("gradients", 2, 8)]


def test_what_arrived_before_the_first_step_is_shown(tmp_path):
    shown = _written(tmp_path, [[_step(10, 20, collectives=[_exchange("world/1", 4, 12, start=11)])]])
    assert shown.slices("rank 0", "step") == [("step 0", 6, 16)]


def test_one_rank_does_not_know_whom_it_waited_for(tmp_path):
    shown = _written(tmp_path, [[step] for step in _two_ranks()[:1]])
    assert shown.slices("rank 0", "waits") == [("wait: gradients", 70, 100)]
    assert shown.args("rank 0", "waits") == [{"moved_bytes": 4096}]
    assert shown.arrows() == []


def test_ranks_that_are_not_aligned_are_not_compared(tmp_path):
    shown = _written(tmp_path, [_two_ranks()], aligned=False)
    assert shown.slices("rank 0", "waits") == [("wait: gradients", 70, 100)]
    assert shown.slices("rank 1", "step") == [("step 12", 0, 110)]
    assert shown.arrows() == []


def test_the_counter_is_the_bubble_of_each_step(tmp_path):
    row = _two_ranks()
    counters = [e for e in _written(tmp_path, [row]).events if e["ph"] == "C"]
    last = [ORIGIN + 90 * MS]
    assert [e["args"]["share"] for e in counters] == [pytest.approx(bubble(as_array([attribute(s, last) for s in row])))]
    assert counters[0]["args"]["share"] == pytest.approx(1 - (60 + 80) / (112 + 110))


def test_kineto_becomes_threads_of_its_rank(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": "kineto: stream 7", "ts": ORIGIN + 0.040, "dur": 0.010}
    note = {"ph": "i", "s": "t", "cat": "note", "name": "3 are left out", "tid": "kineto: left out", "ts": ORIGIN + 0.02}
    shown = _written(tmp_path, [_two_ranks()], kineto=[[], [kernel, note]])
    assert shown.slices("rank 1", "kineto: stream 7") == [("gemm", 40, 50)]
    assert [(shown.place(e), e["name"], e["ts"]) for e in shown.events if e["ph"] == "i"] == [
        (("rank 1", "kineto: left out"), "3 are left out", pytest.approx(20000, abs=0.2))
    ]
    assert not any(thread.startswith("kineto") for thread in shown.threads("rank 0"))


def test_kernels_whose_times_cross_are_cut_not_lost(tmp_path):
    kernels = [
        {"ph": "X", "cat": "kernel", "name": name, "tid": "kineto: stream 7", "ts": ORIGIN + ts, "dur": dur}
        for name, ts, dur in (("a", 0.010, 0.010_001), ("b", 0.020, 0.005))
    ]
    shown = _written(tmp_path, [_two_ranks()[:1]], kineto=[kernels])
    assert shown.slices("rank 0", "kineto: stream 7") == [("a", 10, 20), ("b", 20, 25)]


def test_operators_that_begin_together_lie_inside_each_other(tmp_path):
    operators = [
        {"ph": "X", "cat": "cpu_op", "name": name, "tid": "kineto: thread 9", "ts": ORIGIN + 0.010, "dur": dur}
        for name, dur in (("inner", 0.002), ("outer", 0.005))
    ]
    shown = _written(tmp_path, [_two_ranks()[:1]], kineto=[operators])
    assert shown.slices("rank 0", "kineto: thread 9") == [("outer", 10, 15), ("inner", 10, 12)]


def test_a_window_before_the_first_step_moves_the_beginning(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": "kineto: stream 7", "ts": ORIGIN - 0.5, "dur": 0.010}
    shown = _written(tmp_path, [_two_ranks()], kineto=[[kernel], []])
    assert shown.slices("rank 0", "kineto: stream 7") == [("gemm", 0, 10)]
    assert shown.slices("rank 1", "step") == [("step 12", 501, 611)]


def test_without_steps_there_is_still_a_trace(tmp_path):
    assert _written(tmp_path, []).events == []
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": "kineto: stream 7", "ts": ORIGIN, "dur": 0.010}
    assert _written(tmp_path, [], kineto=[[kernel]]).slices("rank 0", "kineto: stream 7") == [("gemm", 0, 10)]


def test_names_are_kept_as_they_are(tmp_path):
    step = _step(0, 10, spans=[("forward", 'Vorwärts "\n', 0, 9)])
    shown = _written(tmp_path, [[step]])
    assert shown.slices("rank 0", "stages") == [('Vorwärts "\n', 0, 9)]
    assert "\\u" not in (tmp_path / "trace.json").read_text(encoding="utf-8")  # which some readers refuse


@pytest.mark.parametrize(("rows", "kineto"), [((2, 1), 0), ((2, 2), 1)])
def test_every_step_must_be_of_all_ranks(tmp_path, rows, kineto):
    steps = [_two_ranks()[:ranks] for ranks in rows]
    with pytest.raises(ValueError, match=r"of \[1, 2\] ranks"):
        write_trace(tmp_path / "trace.json", steps, [[]] * kineto)
    assert not list(tmp_path.iterdir())


def test_a_trace_that_fails_leaves_the_old_one(tmp_path):
    path = write_trace(tmp_path / "new" / "trace.json", [_two_ranks()])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_trace(path, [[replace(step, samples=float("nan")) for step in _two_ranks()]])
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_path_may_be_text(tmp_path):
    assert write_trace(str(tmp_path / "trace.json"), [_two_ranks()]) == tmp_path / "trace.json"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_whatever_the_ranks_recorded_the_trace_is_right(tmp_path_factory, seed, ranks):
    random = np.random.default_rng(seed)
    names = ("ids", "rows")

    def exchange(key, start):
        arrive, wait, end, done = np.sort(random.uniform(start - 1, start + 20, 4))
        return _exchange(key, arrive, end, start=wait, done=done, name=names[random.integers(2)])

    def step(start):
        kinds = random.choice(["data", "forward", "backward", "optimizer", "pause"], 5)
        spans = [(kind, "", *np.sort(random.uniform(start, start + 20, 2))) for kind in kinds]
        keys = random.permutation(4)[:3]
        return _step(
            start,
            start + 20,
            spans=spans,
            collectives=[exchange(str(key), start) for key in keys],
            hidden=[exchange("", start) for _ in range(3)],
        )

    steps = [[step(20.5 * number) for _ in range(ranks)] for number in range(2)]
    read_trace(write_trace(Path(tmp_path_factory.mktemp("trace")) / "trace.json", steps))
