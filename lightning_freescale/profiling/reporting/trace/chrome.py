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


@dataclass
class Thread:
    """A thread of a process. Its slices nest after :meth:`nest_slices`."""

    pid: int
    tid: int
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
        """Yield the slices as Chrome events."""
        for s in self.slices:
            event = {"ph": "X", **self.place, "cat": s.cat, "name": s.name, "ts": s.start / 8, "dur": (s.end - s.start) / 8}
            yield event if s.args is None else {**event, "args": s.args}


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
            self.threads[name] = Thread(self.pid, next(self.tids))
        return self.threads[name]

    def metadata(self) -> Iterator[Event]:
        """Yield names and order of the process, if it has threads, and of these, which are shown in the order of their ids."""
        named = [("process", self.name, self.order, thread) for thread in [*self.threads.values()][:1]]
        named += [("thread", name, thread.tid, thread) for name, thread in self.threads.items()]
        for kind, name, order, thread in named:
            yield {"ph": "M", **thread.place, "name": f"{kind}_name", "args": {"name": name}}
            yield {"ph": "M", **thread.place, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


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
        row = next((row for row in rows if row[-1].end <= s.start), [])
        if not row:
            rows.append(row)
        row.append(s)
    return rows
