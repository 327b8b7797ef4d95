"""Slices on the named threads of a Chrome trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

PER_SECOND = 8_000_000
"""Ticks. An eighth of a microsecond is a whole number of nanoseconds and exact in binary: all readers see the same edges."""
Event = dict[str, Any]


@dataclass
class Slice:
    """What a thread did from tick ``start`` to tick ``end``."""

    start: int
    end: int
    name: str
    cat: str
    args: dict[str, Any] | None = None

    def event(self, place: Event) -> Event:
        """As a Chrome event; ``place`` says which process and thread."""
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
    """A named thread of a process. Its slices nest once it is settled."""

    pid: int
    tid: int
    name: str
    slices: list[Slice] = field(default_factory=list)

    @property
    def place(self) -> Event:
        """What says in an event that it belongs here."""
        return {"pid": self.pid, "tid": self.tid}

    def settle(self) -> None:
        """Readers drop a slice that begins inside another and ends after it, so the earlier one is cut and says so."""
        self.slices = nested(self.slices)

    def at(self, tick: int) -> Slice | None:
        """The slice that began last of those that began by ``tick``. It may have ended."""
        began = bisect_right(self.slices, tick, key=lambda s: s.start)
        return self.slices[began - 1] if began else None

    def events(self) -> Iterator[Event]:
        """The slices as Chrome events."""
        return (s.event(self.place) for s in self.slices)

    def metadata(self) -> list[Event]:
        """Name and place of the thread; threads are shown in the order of their ids."""
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

    def __getitem__(self, name: str) -> Thread:
        if name not in self.threads:
            self.threads[name] = Thread(self.pid, next(self.tids), name)
        return self.threads[name]

    def metadata(self) -> list[Event]:
        """Names of the process and of its threads. The first thread is asked for before this."""
        place = next(iter(self.threads.values())).place
        own = [_named(place, "process_name", name=self.name), _named(place, "process_sort_index", sort_index=self.order)]
        return own + [event for thread in self.threads.values() for event in thread.metadata()]


def nested(slices: Iterable[Slice]) -> list[Slice]:
    """In the order they began, outer ones first; of two that cross, the earlier is cut where the later begins."""
    settled: list[Slice] = []
    around: list[Slice] = []
    for s in sorted(slices, key=lambda s: (s.start, -s.end)):
        while around and around[-1].end < max(s.end, s.start + 1):
            outer = around.pop()
            if outer.end > s.start:
                outer.end, outer.args = s.start, {**(outer.args or {}), "lasted_us": (outer.end - outer.start) / 8}
        around.append(replace(s))
        settled.append(around[-1])
    return settled


def lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """As few rows as needed so that no two slices of a row overlap."""
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
