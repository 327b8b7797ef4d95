"""Slices on the named threads of a Chrome trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

TICKS_PER_SECOND = 8_000_000
"""An eighth of a microsecond is a whole number of nanoseconds and exact in binary: all readers see the same edges."""
Event = dict[str, Any]


@dataclass
class Slice:
    """What a thread did from tick ``start`` to tick ``end``."""

    start: int
    end: int
    name: str
    cat: str
    args: dict[str, Any] | None = None

    def to_event(self, place: Event) -> Event:
        """Return a Chrome event; ``place`` says which process and thread."""
        event = {
            "ph": "X",
            **place,
            "cat": self.cat,
            "name": self.name,
            "ts": self.start / 8,
            "dur": (self.end - self.start) / 8,
        }
        return event if self.args is None else {**event, "args": self.args}


@dataclass
class Thread:
    """A named thread of a process. Its slices nest after :meth:`nest_slices`."""

    pid: int
    tid: int
    name: str
    slices: list[Slice] = field(default_factory=list)

    @property
    def place(self) -> Event:
        """The fields of an event that say it belongs here."""
        return {"pid": self.pid, "tid": self.tid}

    def nest_slices(self) -> None:
        """Cut slices that others cross: readers drop one that begins inside another and ends after it."""
        self.slices = nested(self.slices)

    def at(self, tick: int) -> Slice | None:
        """Return the slice that began last of those that began by ``tick``. It may have ended."""
        began = bisect_right(self.slices, tick, key=lambda s: s.start)
        return self.slices[began - 1] if began else None

    def events(self) -> Iterator[Event]:
        """Return the slices as Chrome events."""
        return (s.to_event(self.place) for s in self.slices)

    def metadata(self) -> list[Event]:
        """Return name and place of the thread; threads are shown in the order of their ids."""
        return [_named(self.place, "thread_name", name=self.name), _named(self.place, "thread_sort_index", sort_index=self.tid)]


@dataclass
class Process:
    """A named process, whose threads come to be when they are asked for.

    ``tids`` gives numbers unique in the trace: some readers look names of threads up by these alone. ``order`` is that of the
    processes in the view.
    """

    pid: int
    name: str
    tids: Iterator[int]
    order: int
    threads: dict[str, Thread] = field(default_factory=dict)

    def thread(self, name: str) -> Thread:
        """Return the thread of that name; it is new if nobody asked for it before."""
        if name not in self.threads:
            self.threads[name] = Thread(self.pid, next(self.tids), name)
        return self.threads[name]

    def metadata(self) -> list[Event]:
        """Return names of the process and of its threads, of which it has at least one."""
        place = next(iter(self.threads.values())).place
        own = [_named(place, "process_name", name=self.name), _named(place, "process_sort_index", sort_index=self.order)]
        return own + [event for thread in self.threads.values() for event in thread.metadata()]


def nested(slices: Iterable[Slice]) -> list[Slice]:
    """Return slices in the order they began, outer ones first; of two that cross, the earlier is cut where the later begins."""
    ordered: list[Slice] = []
    around: list[Slice] = []
    for s in sorted(slices, key=lambda s: (s.start, -s.end)):
        while around and around[-1].end < max(s.end, s.start + 1):
            outer = around.pop()
            if outer.end > s.start:
                outer.end, outer.args = s.start, {**(outer.args or {}), "uncut_s": (outer.end - outer.start) / TICKS_PER_SECOND}
        around.append(replace(s))
        ordered.append(around[-1])
    return ordered


def rows_without_overlap(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Return as few rows as needed so that no two slices of a row overlap."""
    rows: list[list[Slice]] = []
    for s in sorted(slices, key=lambda s: (s.start, s.end)):
        row = next((row for row in rows if row[-1].end <= s.start), None)
        if row is None:
            rows.append([s])
        else:
            row.append(s)
    return rows


def _named(place: Event, kind: str, **args: Any) -> Event:
    return {"ph": "M", **place, "name": kind, "args": args}
