"""The checker of traces finds each kind of wrong event."""

from copy import deepcopy

from tests.helpers.chrome_trace import problems

_T = {"pid": 0, "tid": 1}
RIGHT = [
    {"ph": "M", **_T, "name": "process_name", "args": {"name": "rank 0"}},
    {"ph": "M", **_T, "name": "process_sort_index", "args": {"sort_index": 0}},
    {"ph": "M", **_T, "name": "thread_name", "args": {"name": "step"}},
    {"ph": "X", **_T, "cat": "step", "name": "outer", "ts": 0, "dur": 10.0, "args": {"a": 1}},
    {"ph": "C", **_T, "name": "bubble", "ts": 0.0, "args": {"share": 0.5}},
    {"ph": "X", **_T, "cat": "step", "name": "inner", "ts": 2.5, "dur": 7.5},
    {"ph": "s", **_T, "id": 1, "cat": "late", "name": "late", "ts": 3},
    {"ph": "f", **_T, "id": 1, "cat": "late", "name": "late", "ts": 4, "bp": "e"},
    {"ph": "i", **_T, "name": "note", "ts": 6, "s": "t"},
    {"ph": "X", **_T, "cat": "step", "name": "touching", "ts": 10.0, "dur": 0},
]
WRONG = [  # the number of an event and new fields of it, None for one that it lacks, or for the whole event; what is found
    *((3, {name: value}, name) for name, value in {"ph": "B", "ts": -0.5, "tid": -1, "name": "", "dur": None}.items()),
    *((number, {name: None}, name) for number, name in ((4, "ts"), (6, "id"), (7, "bp"), (8, "s"), (6, "cat"))),
    *((number, {"args": {"share": "0.5"}}, "args") for number in (1, 4)),
    (1, {"name": "process_name", "args": {"name": "again"}}, "2 times"),
    (8, {"pid": 1}, "thread 1 is in 2 processes"),
    (5, {"ts": 7}, "before the one ahead"),
    (5, {"dur": 7.501}, "crosses"),
    (7, {"ts": 10}, "no slice around"),
    (7, {"name": "other"}, "goes s,"),
    *((number, None, found) for number, found in ((0, "process 0 has no name"), (2, "thread 1 of 0"))),
]


def test_a_wrong_trace_is_noticed():
    assert problems({"traceEvents": RIGHT}) == []
    missed = []
    for number, fields, found in WRONG:
        events = deepcopy(RIGHT)
        changed = {**events[number], **(fields or {})}
        events[number : number + 1] = [] if fields is None else [{k: v for k, v in changed.items() if v is not None}]
        if not any(found in problem for problem in problems({"traceEvents": events})):
            missed.append((number, fields, found))
    assert missed == []
    assert problems({"traceEvents": [RIGHT[0], *RIGHT[2:], RIGHT[1]]}) == ["metadata after the first event"]
