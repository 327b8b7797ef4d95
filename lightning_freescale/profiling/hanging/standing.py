"""Where one rank stands at this moment, seen by another of its threads, which makes the one that trains wait for nothing."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_freescale._code_place import place_in_code, users_line
from lightning_freescale._worker import has_job
from lightning_freescale.profiling.recording.records import Collective, Span, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline

_LAST_STEPS = 5
_OWN_THREADS = ("freescale-hang", "freescale-profiler")
"""Whose waiting for other ranks keeps nobody from training."""


class StandingSeen:
    """Says where this rank stands, again and again.

    Where stamps are of a device, seconds count from when the rank was first seen there: an event that the device has not
    reached tells no time.

    Args:
        timeline: that the rank records its steps on.
        rank: of this process.
    """

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self._timeline, self._rank = timeline, rank
        self._in: tuple[Any, float] = (None, time.perf_counter())

    def look(self) -> None:
        """See what the rank is in, without asking where in the code that is."""
        record, _ = self._timeline.position()
        now_in = _innermost(record)
        if now_in is not self._in[0]:
            self._in = now_in, time.perf_counter()

    def as_document(self) -> dict[str, Any]:
        """Return where the rank stands, as the document of a hang has it of every rank."""
        self.look()
        record, counts = self._timeline.position()
        now_in = _innermost(record)
        frames, now = sys._current_frames(), time.perf_counter()
        stack = traceback.extract_stack(frames.get(self._timeline.thread))
        own, ended = users_line(stack), list(self._timeline.ended)
        exchange = now_in if isinstance(now_in, Collective) else None
        stages = [] if record is None else [span for span in list(record.spans) if span.end is None]
        return {
            "rank": self._rank,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "step": None if record is None else record.index,
            "last_steps_s": [round(end - start, 6) for (_, start), (_, end) in zip(ended, ended[1:])][-_LAST_STEPS:],
            "ended_s_ago": round(now - ended[-1][1], 3) if ended else None,
            "stage": _named(stages[-1]) if stages else "outside of a step" if record is None else "between the stages",
            "exchange": None if exchange is None else _told(exchange),
            "since_s": round(self._seconds_in(now_in, now), 3),
            "place": place_in_code(stack),
            "code": None if own is None else own.line or None,
            "threads": self._other_threads(frames, now),
            "exchanges_begun": counts,
        }

    def _seconds_in(self, now_in: Collective | Span | None, now: float) -> float:
        if now_in is not None and now_in.start is not None and self._timeline.on_host:
            return now - float(now_in.start)
        ended = list(self._timeline.ended)
        since = max(self._in[1], ended[-1][1] if ended else 0.0)
        return now - since

    def _other_threads(self, frames: dict[int, Any], now: float) -> list[dict[str, Any]]:
        """What the other threads of Python that exchange something, or work for this package, are at."""
        found = []
        for thread in threading.enumerate():
            exchange, frame = self._timeline.under_way.get(thread.ident or 0), frames.get(thread.ident or 0)
            if frame is None or thread.name.startswith(_OWN_THREADS) or not (exchange is not None or has_job(frame)):
                continue
            timed = exchange is not None and self._timeline.on_host
            found.append(
                {
                    "thread": thread.name,
                    "exchange": None if exchange is None else exchange.name,
                    "moved_bytes": None if exchange is None else exchange.moved,
                    "since_s": round(now - float(exchange.arrive), 3) if exchange is not None and timed else None,
                    "place": place_in_code(traceback.extract_stack(frame)),
                }
            )
        return found


def why_silent(host: str, process: int) -> str:
    """Return why a rank's process does not say where it stands, as far as that can be seen from here."""
    named = f"process {process} on {host}"
    if host != socket.gethostname() or not sys.platform.startswith("linux"):
        return f"{named} has ended or is frozen, or the network is gone"
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"{named} has ended"
    if state in "ZX":
        return f"{named} has ended"
    if state in "Tt":
        return f"{named} is stopped; kill -CONT {process} lets it go on"
    return f"{named} runs no Python: code that is not Python's holds its lock, or it has no turn on a core"


def _innermost(record: StepRecord | None) -> Collective | Span | None:
    """What a step's thread is in: the exchange that it waits for, or the last stage that has not ended."""
    if record is None:
        return None
    if record.collectives and record.collectives[-1].end is None:
        return record.collectives[-1]
    return next((span for span in reversed(list(record.spans)) if span.end is None), None)


def _told(exchange: Collective) -> dict[str, Any]:
    place, _, at = exchange.key.rpartition(":")
    step, number = at.split(".")
    return {
        "name": exchange.name,
        "group": place,
        "step": int(step),
        "number": int(number),
        "ranks": _ranks_of(place),
        "moved_bytes": exchange.moved,
    }


def _ranks_of(place: str) -> list[int] | None:
    """The ranks that an exchange of a place is of; None if all are."""
    message = re.search(r" (any|\d+)>(\d+) ", place)  # from one rank to another
    if message is not None:
        return [int(rank) for rank in message.groups() if rank != "any"]
    groups = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
    found = [group for group, name in list(groups.items()) if name == place]
    return dist.get_process_group_ranks(found[0]) if found else None


def _named(span: Span) -> str:
    kind = "data wait" if span.kind == "data" else span.kind
    return kind if kind == span.name else f"{kind}: {span.name}"
