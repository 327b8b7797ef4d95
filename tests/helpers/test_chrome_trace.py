"""A checker that passes wrong traces would make every test that uses it worthless."""

import json
from copy import deepcopy

import pytest

from tests.helpers.chrome_trace import problems, read_trace

_T = {"pid": 0, "tid": 1}


def _named(kind, place, **args):
    return {"ph": "M", **place, "name": kind, "args": args}


def _right():
    return [
        _named("process_name", _T, name="rank 0"),
        _named("process_sort_index", _T, sort_index=0),
        _named("thread_name", _T, name="step"),
        {"ph": "X", **_T, "cat": "step", "name": "outer", "ts": 0, "dur": 10.0, "args": {"a": 1}},
        {"ph": "C", **_T, "name": "bubble", "ts": 0.0, "args": {"share": 0.5}},
        {"ph": "X", **_T, "cat": "step", "name": "inner", "ts": 2.5, "dur": 7.5},
        {"ph": "s", **_T, "id": 1, "cat": "late", "name": "late", "ts": 3},
        {"ph": "f", **_T, "id": 1, "cat": "late", "name": "late", "ts": 4, "bp": "e"},
        {"ph": "b", **_T, "id": 7, "cat": "x", "name": "x", "ts": 5},
        {"ph": "e", **_T, "id": 7, "cat": "x", "name": "x", "ts": 6},
        {"ph": "i", **_T, "name": "note", "ts": 6, "s": "t"},
        {"ph": "B", **_T, "name": "long", "ts": 11},
        {"ph": "E", **_T, "ts": 12},
    ]


def _without(number, field):
    def change(events):
        del events[number][field]

    return change


def _with(number, **fields):
    return lambda events: events[number].update(fields)


def _also(at, **event):
    return lambda events: events.insert(at, event)


def _drop(number):
    return lambda events: events.pop(number)


WRONG = {
    "no phase": (_without(3, "ph"), "known phase"),
    "unknown phase": (_with(3, ph="Q"), "known phase"),
    "no duration": (_without(3, "dur"), "without dur"),
    "no thread": (_without(3, "tid"), "without tid"),
    "no name": (_without(3, "name"), "without name"),
    "no time": (_without(4, "ts"), "without ts"),
    "negative duration": (_with(5, dur=-1.0), "dur is no time"),
    "negative time": (_with(3, ts=-0.5), "ts is no time"),
    "not a number": (_with(5, dur=float("nan")), "dur is no time"),
    "time as text": (_with(3, ts="0"), "ts is no time"),
    "time as truth": (_with(3, ts=False), "ts is no time"),
    "process as text": (_with(3, pid="rank 0"), "pid is no number"),
    "negative thread": (_with(3, tid=-1), "tid is no number"),
    "name as number": (_with(3, name=3), "name is no text"),
    "empty name": (_with(3, name=""), "name is no text"),
    "args as list": (_with(3, args=[1]), "args is no object"),
    "counter of text": (_with(4, args={"share": "0.5"}), "counter without numbers"),
    "counter of nothing": (_with(4, args={}), "counter without numbers"),
    "scope": (_with(10, s="everywhere"), "no scope"),
    "unread metadata": (_with(1, name="process_sort"), "nobody reads"),
    "process without its name": (_with(0, args={}), "metadata without name"),
    "sort index as text": (_with(1, args={"sort_index": "0"}), "metadata without sort_index"),
    "unnamed process": (_drop(0), "process 0 has no name"),
    "unnamed thread": (_drop(2), "thread 1 of 0 has no name"),
    "named twice": (_also(2, ph="M", **_T, name="thread_name", args={"name": "again"}), "2 times"),
    "metadata late": (lambda events: events.append(events.pop(1)), "metadata after"),
    "thread of two processes": (_with(10, pid=1), "thread 1 is in 2 processes"),
    "unsorted": (lambda events: events.append(events.pop(5)), "before the one ahead"),
    "crossing": (_with(5, dur=7.6), "crosses"),
    "crossing by a nanosecond": (_with(5, dur=7.501), "crosses"),
    "arrow without slice": (_with(7, ts=11), "no slice around"),
    "arrow at the end of a slice": (_with(7, ts=10), "no slice around"),
    "arrow to the next slice": (_with(7, bp="b"), "next slice"),
    "arrow without direction": (_without(7, "bp"), "without bp"),
    "arrow to nowhere": (_drop(7), "goes s"),
    "arrow from nowhere": (_drop(6), "goes f"),
    "arrow backwards": (lambda events: (events[6].update(ph="f", bp="e"), events[7].update(ph="s")), "goes fs"),
    "arrow with two ids": (_with(7, id=2), "goes s"),
    "arrow with two names": (_with(7, name="other"), "goes s"),
    "arrow with two categories": (_with(7, cat="other"), "goes s"),
    "arrow id as text": (_with(6, id="one"), "id is no number"),
    "b without e": (_drop(9), "b without e"),
    "e without b": (_drop(8), "do not alternate"),
    "e of another": (_with(9, id=8), "do not alternate"),
    "b without id": (_without(8, "id"), "without id"),
    "E without B": (_drop(11), "ends nothing"),
    "B without E": (_drop(12), "never ended"),
}


def test_a_right_trace_has_no_problem():
    assert problems({"traceEvents": _right()}) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_trace_is_noticed(name):
    change, message = WRONG[name]
    events = deepcopy(_right())
    change(events)
    found = problems({"traceEvents": events})
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize(
    "document", [[], {}, {"traceEvents": {}}, {"traceEvents": [3]}, {"traceEvents": [], "displayTimeUnit": "us"}]
)
def test_what_is_no_trace_is_noticed(document):
    assert problems(document)


def test_slices_may_touch_and_instants_may_lie_on_edges():
    events = _right()
    events += [
        {"ph": "X", **_T, "name": name, "ts": ts, "dur": dur} for name, ts, dur in (("a", 20, 5), ("b", 25, 0), ("c", 25, 5))
    ]
    assert problems({"traceEvents": events}) == []


def test_reading_refuses_a_wrong_trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": _right()}))
    assert len(read_trace(path)) == len(_right())
    path.write_text(json.dumps({"traceEvents": _right()[1:]}))
    with pytest.raises(AssertionError, match="process 0 has no name"):
        read_trace(path)
