"""Read a Chrome trace as strictly as Perfetto's importer does: an event that it would drop or bind elsewhere is an error.

From google/perfetto, src/trace_processor/importers: json_trace_tokenizer.cc (times), json_trace_parser_impl.cc (fields of each
phase), common/slice_tracker.cc (nesting) and common/flow_tracker.cc (an arrow binds to the innermost open slice of its thread).
The phases are those that the package writes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_METADATA = {f"{what}_{kind}": kind for what in ("process", "thread") for kind in ("name", "sort_index")}
_FIELDS = {
    "M": ("name", "args"),
    "X": ("name", "ts", "dur"),
    "i": ("name", "ts", "s"),
    "C": ("name", "ts", "args"),
    "s": ("id", "cat", "name", "ts"),
    "f": ("id", "cat", "name", "ts", "bp"),
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
    found = [f"{name} does not fit: {event}" for event in events for name in _wrong_fields(event)]
    return found or [*_of_names(events), *_of_threads(events)]


def _wrong_fields(event: Any) -> list[str]:
    if not isinstance(event, dict) or event.get("ph") not in _FIELDS:
        return ["ph"]
    given = {"pid": None, "tid": None, **dict.fromkeys(_FIELDS[event["ph"]]), **event}
    bits, counts = {"pid": 32, "tid": 32, "id": 64}, event["ph"] == "C"
    fits = {
        **{name: _is_finite(given.get(name)) and given[name] >= 0 for name in ("ts", "dur")},
        **{name: type(given.get(name)) is int and 0 <= given[name] < 2**size for name, size in bits.items()},
        **{name: isinstance(given.get(name), str) and bool(given[name]) for name in ("name", "cat")},
        "args": isinstance(given.get("args"), dict) and (not counts or _are_numbers(given["args"])),
        "s": given.get("s") in ("g", "p", "t") or event["ph"] != "i",
        "bp": given.get("bp") == "e",  # or the arrow binds to the next slice, not to the one around it
    }
    if event["ph"] == "M":
        kind = _METADATA.get(given["name"])
        value = given["args"].get(kind) if fits["args"] and len(given["args"]) == 1 else None
        fits["args"] = (isinstance(value, str) and bool(value)) if kind == "name" else type(value) is int
    return [name for name in given if not fits.get(name, True)]


def _are_numbers(values: dict[str, Any]) -> bool:
    return bool(values) and all(_is_finite(value) for value in values.values())


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _of_names(events: list[Event]) -> list[str]:
    """Metadata come first, name everything once, and no two processes share a thread's number: some readers mix these up."""
    names = [event for event in events if event["ph"] == "M"]
    found = ["metadata after the first event"] if names != events[: len(names)] else []
    given = Counter((e["name"], e["pid"], e["tid"] if e["name"].startswith("thread") else None) for e in names)
    found += [f"{key} is given {times} times" for key, times in given.items() if times > 1]
    used = {(event["pid"], event["tid"]) for event in events}
    found += [f"process {pid} has no name" for pid in {pid for pid, _ in used} if ("process_name", pid, None) not in given]
    found += [f"thread {tid} of {pid} has no name" for pid, tid in used if ("thread_name", pid, tid) not in given]
    return found + [f"thread {tid} is in {n} processes" for tid, n in Counter(tid for _, tid in used).items() if n > 1]


def _of_threads(events: list[Event]) -> list[str]:
    """Events are in order, slices nest, and arrows bind to the slice around them. One pass, as Perfetto makes it."""
    open_: dict[tuple[int, int], list[tuple[int, int]]] = {}
    arrows: dict[tuple[int, str, str], str] = {}
    timed = [event for event in events if event["ph"] != "M"]
    found = [f"before the one ahead of it: {b}" for a, b in zip(timed, timed[1:]) if b["ts"] < a["ts"]]
    for event in sorted(timed, key=lambda e: _ns(e["ts"])):  # stable
        stack, now = open_.setdefault((event["pid"], event["tid"]), []), _ns(event["ts"])
        if event["ph"] == "X":
            end = now + _ns(event["dur"])
            while stack and stack[-1][1] <= now:
                stack.pop()
            if stack and stack[-1][1] < end:
                found.append(f"crosses the end of the slice around it: {event}")
            stack.append((now, end))
        elif event["ph"] in "sf":
            if not stack or not stack[-1][0] <= now < stack[-1][1]:
                found.append(f"an arrow with no slice around it: {event}")
            key = (event["id"], event["cat"], event["name"])
            arrows[key] = arrows.get(key, "") + event["ph"]
    return found + [f"arrow {key} goes {arrow}, not from s to f" for key, arrow in arrows.items() if arrow != "sf"]


def _ns(microseconds: float) -> int:
    """As Perfetto does, which cuts off what is below."""
    return int(microseconds * 1000)
