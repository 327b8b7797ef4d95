"""The state of a rank that hangs, and the report on all ranks as a document and as text."""

from __future__ import annotations

import os
import re
import socket
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_freescale._runtime.code_place import place_in_code, users_line
from lightning_freescale._runtime.worker import has_job
from lightning_freescale.profiling.recording.records import Collective, Span, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline

_LAST_STEPS = 5
_OWN_THREADS = ("freescale-hang", "freescale-profiler")
"""Threads that training does not wait for."""
_WIDTH = 120
_CODE = 60
"""The number of characters shown of a line of code."""
State = Mapping[str, Any]
"""The state of one rank, see :meth:`RankObserver.state`."""


class RankObserver:
    """Observes the state of this rank on another thread, without making the thread that trains wait.

    With stamps of a device, seconds are counted from the first observation of a state, because an event that the device has not
    reached has no time yet.
    """

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self._timeline, self._rank = timeline, rank
        self._in: tuple[Any, float] = (None, time.perf_counter())

    def look(self) -> None:
        """Note the exchange or stage of the rank, without its line of code."""
        record, _ = self._timeline.position()
        now_in = _innermost(record)
        if now_in is not self._in[0]:
            self._in = now_in, time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Return the state of the rank, an entry of ``ranks`` in ``hang.json``."""
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
            "exchange": None if exchange is None else _as_document(exchange),
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
        return now - max(self._in[1], ended[-1][1] if ended else 0.0)

    def _other_threads(self, frames: dict[int, Any], now: float) -> list[dict[str, Any]]:
        """Return the other Python threads that run an exchange or a job of this package."""
        found = []
        for thread in threading.enumerate():
            exchange, frame = self._timeline.under_way.get(thread.ident or 0), frames.get(thread.ident or 0)
            if frame is None or thread.name.startswith(_OWN_THREADS) or not (exchange is not None or has_job(frame)):
                continue
            work: dict[str, Any] = {"exchange": None, "moved_bytes": None, "since_s": None}
            if exchange is not None:
                since = round(now - float(exchange.arrive), 3) if self._timeline.on_host else None
                work = {"exchange": exchange.name, "moved_bytes": exchange.moved, "since_s": since}
            found.append({"thread": thread.name, **work, "place": place_in_code(traceback.extract_stack(frame))})
        return found


def _innermost(record: StepRecord | None) -> Collective | Span | None:
    """Return the exchange that the step waits for, otherwise the last stage that has not ended."""
    if record is None:
        return None
    if record.collectives and record.collectives[-1].end is None:
        return record.collectives[-1]
    return next((span for span in reversed(list(record.spans)) if span.end is None), None)


def _as_document(exchange: Collective) -> dict[str, Any]:
    group, _, at = exchange.key.rpartition(":")
    step, number = map(int, at.split("."))
    place = {"name": exchange.name, "group": group, "step": step, "number": number}
    return {**place, "ranks": _ranks_of(group), "moved_bytes": exchange.moved}


def _ranks_of(group: str) -> list[int] | None:
    """Return the ranks of a group or of a message; None for all ranks."""
    message = re.search(r" (any|\d+)>(\d+) ", group)
    if message is not None:
        return [int(rank) for rank in message.groups() if rank != "any"]
    groups = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
    found = [one for one, name in list(groups.items()) if name == group]
    return dist.get_process_group_ranks(found[0]) if found else None


def _named(span: Span) -> str:
    kind = "data wait" if span.kind == "data" else span.kind
    return kind if kind == span.name else f"{kind}: {span.name}"


def why_silent(host: str, process: int) -> str:
    """Return the reason why the process of a rank does not answer, as far as this process can see it."""
    named = f"process {process} on {host}"
    if host != socket.gethostname() or not sys.platform.startswith("linux"):
        return f"{named} has ended or is stopped, or the network is down"
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "X"
    if state in "ZX":
        return f"{named} has ended"
    if state in "Tt":
        return f"{named} is stopped; kill -CONT {process} continues it"
    return f"{named} runs no Python: other code holds the interpreter lock, or it gets no processor time"


# -- all ranks together


def hang_document(why: str, ranks: Sequence[State], next_s: float) -> dict[str, Any]:
    """Return a report of ``hang.json``: the state of every rank, and the ranks that are missing in each exchange.

    ``why`` is the reason of the report, ``next_s`` the seconds without a step until the next one.
    """
    exchanges = [one["exchange"] for one in ranks if one.get("exchange")]
    awaited = {(exchange["group"], exchange["step"], exchange["number"]) for exchange in exchanges}
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "why": why,
        "next_s": next_s,
        "ranks": list(ranks),
        "exchanges": [_exchange(place, ranks) for place in sorted(awaited)],
    }


def _exchange(place: tuple[str, int, int], ranks: Sequence[State]) -> dict[str, Any]:
    """Return the ranks that wait in an exchange and those that have begun fewer exchanges of its group in the step."""
    group, step, number = place
    inside = [one for one in ranks if (at := one.get("exchange")) and (at["group"], at["step"], at["number"]) == place]
    members = inside[0]["exchange"]["ranks"] or [one["rank"] for one in ranks]
    return {
        "names": dict(_by({one["rank"]: one["exchange"]["name"] for one in inside})),
        "group": group,
        "step": step,
        "number": number,
        "waiting": [one["rank"] for one in inside],
        "missing": [one["rank"] for one in ranks if one["rank"] in members and _is_missing(one, group, (step, number))],
        "unknown": [one["rank"] for one in ranks if one["rank"] in members and "silent" in one],
    }


def _is_missing(rank: State, group: str, place: tuple[int, int]) -> bool:
    if "step" not in rank:
        return "ended" in rank
    return rank["step"] is None or (rank["step"], rank["exchanges_begun"].get(group, 0)) <= place


def hang_text(document: Mapping[str, Any]) -> str:
    """Return a report as text; sentences are wrapped at 120 characters, rows of the table are not."""
    again = f"if no step ends, the next report follows after {document['next_s']:.0f} s"
    lines = [f"BubbleProfiler: {document['why']}. Training continues; {again}."]
    lines += [line for exchange in document["exchanges"] for line in _about(exchange, document["ranks"])]
    wrapped = [line for each in lines for line in textwrap.wrap(each, _WIDTH, subsequent_indent="  ")]
    return "\n".join([*wrapped, *_table(document["ranks"]), *_threads(document["ranks"])])


def _about(exchange: Mapping[str, Any], ranks: Sequence[State]) -> Iterator[str]:
    names, waiting, missing, unknown = (exchange[name] for name in ("names", "waiting", "missing", "unknown"))
    group = "" if exchange["group"] in names else f" in group {exchange['group']}"
    at = f"exchange {exchange['number']} of step {exchange['step']}{group}"
    name, wait = " or ".join(names), f"{in_words(waiting)} wait{'s'[: len(waiting) == 1]}"
    differ = len({"message" if name in ("send", "recv") else name for name in names}) > 1
    if differ:
        each = ", ".join(f"{in_words(those)} call{'s'[: len(those) == 1]} {name}" for name, those in names.items())
        yield f"the ranks call different exchanges ({at}), so none of these can end: {each}"
    if missing:
        ended, others = "past the end of its training", [rank for rank in ranks if rank["rank"] in missing]
        stages = {rank["rank"]: ended if "ended" in rank else f"in {_state_of(rank)}" for rank in others}
        where = "; ".join(f"{in_words(those)} {'is' if len(those) == 1 else 'are'} {stage}" for stage, those in _by(stages))
        has = "has" if len(missing) == 1 else "have"
        yield f"{in_words(missing)} {has} not reached {name} ({at}), where {wait}: {where}"
    if unknown:
        yield f"{in_words(unknown)} {'does' if len(unknown) == 1 else 'do'} not answer, and {wait} in {name} ({at})"
    if not missing and not unknown and not differ:
        yield f"all ranks have reached {name} ({at}), where {wait}: its messages are pending or lost"


def _table(ranks: Sequence[State]) -> list[str]:
    """Return the lines of the table. Ranks in the same state share a row."""
    by_rank = {rank["rank"]: rank for rank in ranks}
    lines = [("ranks", "step", "last steps", "for", "state")]
    for (step, text), those in _by({number: _row(rank) for number, rank in by_rank.items()}):
        alike = [by_rank[number] for number in those]
        steps = [seconds for rank in alike for seconds in rank.get("last_steps_s", ())]
        since = [rank["since_s"] for rank in alike if "since_s" in rank]
        lasted = "-" if not steps else f"{_s(min(steps))} to {_s(max(steps))} s"
        lines.append((ranks_in_words(those), step, lasted, f"{_s(max(since))} s" if since else "-", text))
    wide = [max(len(line[column]) for line in lines) for column in range(4)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(line, wide)), line[4]]) for line in lines]


def _row(rank: State) -> tuple[str, str]:
    if "silent" in rank:
        return "-", f"does not answer: {rank['silent']}"
    if "ended" in rank:
        return "-", _state_of(rank)
    code = "" if rank["code"] is None else f": {textwrap.shorten(rank['code'], _CODE, placeholder=' ...')}"
    step = "-" if rank["step"] is None else str(rank["step"])
    return step, f"{_state_of(rank)}, at {rank['place']}{code}"


def _state_of(rank: State) -> str:
    if "ended" in rank:
        return "training has ended"
    exchange = rank["exchange"]
    return str(rank["stage"]) if exchange is None else f"{exchange['name']}{_of_bytes(exchange)} ({rank['stage']})"


def _threads(ranks: Sequence[State]) -> Iterator[str]:
    for rank in ranks:
        for thread in rank.get("threads", ()):
            since = "" if thread["since_s"] is None else f" for {_s(thread['since_s'])} s"
            work = "" if thread["exchange"] is None else f" in {thread['exchange']}{_of_bytes(thread)}{since},"
            yield f"rank {rank['rank']}, thread {thread['thread']}{work} at {thread['place']}"


def _of_bytes(exchange: Mapping[str, Any]) -> str:
    moved = exchange["moved_bytes"]
    return "" if not moved else f" of {moved / 1e6:.3g} MB" if moved >= 1e6 else f" of {moved / 1e3:.3g} kB"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the numbers of the ranks, consecutive ones as a range, such as ``"0-2, 5"``."""
    # consecutive ranks have the same difference from their places
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def in_words(ranks: Sequence[int]) -> str:
    """Return text such as ``"rank 3"`` or ``"ranks 0-2, 5"``."""
    return f"rank{'s'[: len(ranks) > 1]} {ranks_in_words(ranks)}"


def _by(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Group ranks by their values, in the order of the lowest rank."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return list(found.items())


def _s(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"
