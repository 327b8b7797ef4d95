"""Reads a Chrome trace as strictly as Perfetto's importer does, and more: what it would drop or bind elsewhere is an error.

From google/perfetto, src/trace_processor/importers: json_trace_tokenizer.cc (times), json_trace_parser_impl.cc (fields of each
phase), common/slice_tracker.cc (nesting) and common/flow_tracker.cc (an arrow binds to the innermost open slice of its thread).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_NAMED = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index", "thread_sort_index": "sort_index"}
_FIELDS = {
    "M": ("pid", "tid", "name", "args"),
    "X": ("pid", "tid", "name", "ts", "dur"),
    "B": ("pid", "tid", "name", "ts"),
    "E": ("pid", "tid", "ts"),
    "b": ("pid", "id", "cat", "name", "ts"),
    "e": ("pid", "id", "cat", "name", "ts"),
    "i": ("pid", "tid", "name", "ts", "s"),
    "C": ("pid", "tid", "name", "ts", "args"),
    "s": ("pid", "tid", "id", "cat", "name", "ts"),
    "f": ("pid", "tid", "id", "cat", "name", "ts", "bp"),
}


def read_trace(path: Path) -> list[Event]:
    """The events of a trace without a problem."""
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda text: float("nan"))
    found = problems(document)
    assert not found, "\n".join(found[:20])
    return document["traceEvents"]


def problems(document: Any) -> list[str]:
    """What is wrong with a trace; nothing if all of it is shown as it is meant."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["no list of traceEvents"]
    if document.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        return [f"displayTimeUnit {document['displayTimeUnit']!r} is neither ms nor ns"]
    events = document["traceEvents"]
    found = [f"{problem}: {event}" for event in events for problem in _of_fields(event)]
    return found or [*_of_names(events), *_of_order(events), *_of_threads(events), *_of_async(events)]


def _of_fields(event: Any) -> list[str]:
    if not isinstance(event, dict) or event.get("ph") not in _FIELDS:
        return ["no event of a known phase"]
    missing = [name for name in _FIELDS[event["ph"]] if name not in event]
    if missing:
        return [f"without {', '.join(missing)}"]
    return [
        *(f"{name} is no time" for name in ("ts", "dur") if name in event and not _is_time(event[name])),
        *(f"{name} is no number of 32 bits" for name in ("pid", "tid") if name in event and not _is_number(event[name], 32)),
        *(f"{name} is no text" for name in ("name", "cat") if name in event and not _is_text(event[name])),
        *(["args is no object"] if not isinstance(event.get("args", {}), dict) else _of_args(event)),
        *(["id is no number"] if "id" in event and not _is_number(event["id"], 64) else []),
        *(["s is no scope"] if event["ph"] == "i" and event["s"] not in ("g", "p", "t") else []),
        *(["binds to the next slice, not to the one around it"] if event["ph"] == "f" and event["bp"] != "e" else []),
    ]


def _of_args(event: Event) -> list[str]:
    args = event.get("args", {})
    if event["ph"] == "C" and not (args and all(_is_finite(value) for value in args.values())):
        return ["a counter without numbers"]
    if event["ph"] != "M":
        return []
    wanted = _NAMED.get(event["name"])
    if wanted is None:
        return ["metadata that nobody reads"]
    good = _is_text(args.get(wanted)) if wanted == "name" else type(args.get(wanted)) is int
    return [] if good and len(args) == 1 else [f"metadata without {wanted}"]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_finite(value) and value >= 0


def _is_number(value: Any, bits: int) -> bool:
    return type(value) is int and 0 <= value < 2**bits


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _of_names(events: list[Event]) -> list[str]:
    """Metadata come first, name everything once, and no two processes share a thread's number: some readers mix these up."""
    first = next((k for k, event in enumerate(events) if event["ph"] != "M"), len(events))
    names = [event for event in events if event["ph"] == "M"]
    found = ["metadata after the first event"] if len(names) != first else []
    given = Counter(
        (event["name"], event["pid"], event["tid"] if event["name"].startswith("thread") else None) for event in names
    )
    found += [f"{key} is given {times} times" for key, times in given.items() if times > 1]
    used = {(event["pid"], event["tid"]) for event in events if "tid" in event}
    found += [f"process {pid} has no name" for pid in {e["pid"] for e in events} if ("process_name", pid, None) not in given]
    found += [f"thread {tid} of {pid} has no name" for pid, tid in used if ("thread_name", pid, tid) not in given]
    return found + [f"thread {tid} is in {n} processes" for tid, n in Counter(tid for _, tid in used).items() if n > 1]


def _of_order(events: list[Event]) -> list[str]:
    timed = [event for event in events if "ts" in event]
    return [f"before the one ahead of it: {b}" for a, b in zip(timed, timed[1:]) if b["ts"] < a["ts"]]


def _of_threads(events: list[Event]) -> list[str]:
    """Slices nest, and arrows bind to the slice they are meant for. One pass, as Perfetto makes it."""
    open_: dict[tuple[int, int], list[tuple[int, int]]] = {}
    arrows: dict[tuple[int, str, str], list[str]] = {}
    found: list[str] = []
    for event in sorted((e for e in events if e["ph"] != "M"), key=lambda e: _ns(e["ts"])):  # stable
        stack = open_.setdefault((event["pid"], event.get("tid", event["pid"])), [])
        if event["ph"] in "XB":
            found += _opened(stack, event)
        elif event["ph"] == "E":
            found += [] if stack and stack[-1][1] < 0 else [f"ends nothing: {event}"]
            del stack[-1:]
        elif event["ph"] in "sf":
            now = _ns(event["ts"])
            if not stack or not (stack[-1][0] <= now and (stack[-1][1] < 0 or now < stack[-1][1])):
                found.append(f"an arrow with no slice around it: {event}")
            arrow = arrows.setdefault((event["id"], event["cat"], event["name"]), [])
            arrow.append(event["ph"])
    found += [f"arrow {key} goes {''.join(arrow)}, not from s to f" for key, arrow in arrows.items() if arrow != ["s", "f"]]
    return found + [f"never ended on {place}" for place, stack in open_.items() if any(end < 0 for _, end in stack)]


def _opened(stack: list[tuple[int, int]], event: Event) -> list[str]:
    start = _ns(event["ts"])
    end = start + _ns(event["dur"]) if event["ph"] == "X" else -1
    while stack and 0 <= stack[-1][1] <= start:
        stack.pop()
    crosses = bool(stack) and 0 <= stack[-1][1] < end
    stack.append((start, end))
    return [f"crosses the end of the slice around it: {event}"] if crosses else []


def _of_async(events: list[Event]) -> list[str]:
    open_: Counter[tuple[Any, ...]] = Counter()
    found = []
    for event in (e for e in events if e["ph"] in "be"):
        key = (event["pid"], event["cat"], event["id"], event["name"])
        open_[key] += 1 if event["ph"] == "b" else -1
        if open_[key] not in (0, 1):
            found.append(f"b and e do not alternate: {event}")
    return found + [f"b without e: {key}" for key, number in open_.items() if number > 0]


def _ns(microseconds: float) -> int:
    """As Perfetto does, which cuts off what is below."""
    return int(microseconds * 1000)
