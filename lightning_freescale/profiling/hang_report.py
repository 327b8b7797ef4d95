"""Observe where a rank stands when a run hangs, and show all ranks as a document and as a printed table."""

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
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_freescale._runtime.code_place import place_in_code, users_line
from lightning_freescale._runtime.worker import has_job
from lightning_freescale.profiling.recording.records import Collective, Span, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline

_LAST_STEPS = 5
_OWN_THREADS = ("freescale-hang", "freescale-profiler")
"""Threads whose waiting for other ranks does not hold up training."""
_WIDTH = 120
_CODE = 60
"""Characters of a line of code that are shown."""
Standing = Mapping[str, Any]
"""The standing of one rank, see :meth:`RankObserver.standing`."""


class RankObserver:
    """Observes where this rank stands, from another thread than the one that trains, which never waits for it.

    Where stamps are of a device, seconds count from when the rank was first seen there: an event that the device has not
    reached has no time yet.

    Args:
        timeline: the rank records its steps on it.
        rank: of this process.
    """

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self._timeline, self._rank = timeline, rank
        self._in: tuple[Any, float] = (None, time.perf_counter())

    def look(self) -> None:
        """Note what the rank is in, without asking where in the code that is."""
        record, _ = self._timeline.position()
        now_in = _innermost(record)
        if now_in is not self._in[0]:
            self._in = now_in, time.perf_counter()

    def standing(self) -> dict[str, Any]:
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
        """Return what other Python threads are at that exchange something, or run a job of this package."""
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
    """Return the exchange that a step's thread waits for, or else its last stage that has not ended."""
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
    """Return the ranks that take part in the exchanges of a group or in a message; None if all do."""
    message = re.search(r" (any|\d+)>(\d+) ", group)  # from one rank to another
    if message is not None:
        return [int(rank) for rank in message.groups() if rank != "any"]
    groups = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
    found = [one for one, name in list(groups.items()) if name == group]
    return dist.get_process_group_ranks(found[0]) if found else None


def _named(span: Span) -> str:
    kind = "data wait" if span.kind == "data" else span.kind
    return kind if kind == span.name else f"{kind}: {span.name}"


def why_silent(host: str, process: int) -> str:
    """Return why a rank's process does not say where it stands, as far as that can be seen from here."""
    named = f"process {process} on {host}"
    if host != socket.gethostname() or not sys.platform.startswith("linux"):
        return f"{named} has ended or is frozen, or the network is gone"
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "X"
    if state in "ZX":
        return f"{named} has ended"
    if state in "Tt":
        return f"{named} is stopped; kill -CONT {process} lets it go on"
    return f"{named} runs no Python: code that is not Python's holds its lock, or it has no turn on a core"


# -- all ranks together


def hang_document(why: str, ranks: Sequence[Standing], next_s: float | None) -> dict[str, Any]:
    """Return a hang as it is kept in ``hang.json``: where every rank stands, and who is missing in which exchange.

    Args:
        why: the ranks were asked.
        ranks: what each answered.
        next_s: seconds without a step after which they are asked again; None if they are not.
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


def _exchange(place: tuple[str, int, int], ranks: Sequence[Standing]) -> dict[str, Any]:
    """Return who waits in an exchange and who is missing. A rank has come to it if it has begun more of the group's."""
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


def _is_missing(rank: Standing, group: str, place: tuple[int, int]) -> bool:
    if "step" not in rank:
        return "ended" in rank
    return rank["step"] is None or (rank["step"], rank["exchanges_begun"].get(group, 0)) <= place


def hang_text(document: Mapping[str, Any]) -> str:
    """Return the document of a hang as text for the terminal, no line wider than 120 characters but where names are."""
    again = "" if document["next_s"] is None else f"; if no step ends, this comes again after {document['next_s']:.0f} s"
    lines = [f"BubbleProfiler: {document['why']}. Training is left alone{again}."]
    lines += [line for exchange in document["exchanges"] for line in _about(exchange, document["ranks"])]
    wrapped = [line for each in lines for line in textwrap.wrap(each, _WIDTH, subsequent_indent="  ")]
    return "\n".join([*wrapped, *_table(document["ranks"]), *_threads(document["ranks"])])


def _about(exchange: Mapping[str, Any], ranks: Sequence[Standing]) -> Iterator[str]:
    names, waiting, missing, unknown = (exchange[name] for name in ("names", "waiting", "missing", "unknown"))
    group = "" if exchange["group"] in names else f" in group {exchange['group']}"
    at = f"exchange {exchange['number']} of step {exchange['step']}{group}"
    name, wait = " or ".join(names), f"{in_words(waiting)} wait{'s'[: len(waiting) == 1]}"
    differ = len({"message" if name in ("send", "recv") else name for name in names}) > 1
    if differ:
        each = ", ".join(f"{in_words(those)} call{'s'[: len(those) == 1]} {name}" for name, those in names.items())
        yield f"the ranks call different exchanges ({at}): {each}; none of them can end"
    if missing:
        stages = {rank["rank"]: _stands_in(rank) for rank in ranks if rank["rank"] in missing}
        where = "; ".join(f"{in_words(those)} {'is' if len(those) == 1 else 'are'} in {stage}" for stage, those in _by(stages))
        has = "has" if len(missing) == 1 else "have"
        yield f"{in_words(missing)} {has} not come to {name} ({at}), in which {wait}: {where}"
    if unknown:
        yield f"{in_words(unknown)} cannot be asked, and {wait} in {name} ({at})"
    if not missing and not unknown and not differ:
        yield f"all ranks have come to {name} ({at}), in which {wait}: its messages are under way, or lost"


def _table(ranks: Sequence[Standing]) -> list[str]:
    """Return the lines of the table; ranks that stand alike share a row."""
    by_rank = {rank["rank"]: rank for rank in ranks}
    lines = [("ranks", "step", "last steps", "for", "stands in")]
    for (step, text), those in _by({number: _row(rank) for number, rank in by_rank.items()}):
        alike = [by_rank[number] for number in those]
        steps = [seconds for rank in alike for seconds in rank.get("last_steps_s", ())]
        since = [rank["since_s"] for rank in alike if "since_s" in rank]
        lasted = "-" if not steps else f"{_s(min(steps))} to {_s(max(steps))} s"
        lines.append((ranks_in_words(those), step, lasted, f"{_s(max(since))} s" if since else "-", text))
    wide = [max(len(line[column]) for line in lines) for column in range(4)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(line, wide)), line[4]]) for line in lines]


def _row(rank: Standing) -> tuple[str, str]:
    if "silent" in rank:
        return "-", f"cannot be asked: {rank['silent']}"
    if "ended" in rank:
        return "-", _stands_in(rank)
    code = "" if rank["code"] is None else f": {textwrap.shorten(rank['code'], _CODE, placeholder=' ...')}"
    step = "-" if rank["step"] is None else str(rank["step"])
    return step, f"{_stands_in(rank)}, at {rank['place']}{code}"


def _stands_in(rank: Standing) -> str:
    if "ended" in rank:
        return "nothing any more: its training has ended"
    exchange = rank["exchange"]
    return str(rank["stage"]) if exchange is None else f"{exchange['name']}{_of_bytes(exchange)} ({rank['stage']})"


def _threads(ranks: Sequence[Standing]) -> Iterator[str]:
    for rank in ranks:
        for thread in rank.get("threads", ()):
            since = "" if thread["since_s"] is None else f" for {_s(thread['since_s'])} s"
            work = "" if thread["exchange"] is None else f" in {thread['exchange']}{_of_bytes(thread)}{since},"
            yield f"rank {rank['rank']}, thread {thread['thread']}{work} at {thread['place']}"


def _of_bytes(exchange: Mapping[str, Any]) -> str:
    moved = exchange["moved_bytes"]
    return "" if not moved else f" of {moved / 1e6:.3g} MB" if moved >= 1e6 else f" of {moved / 1e3:.3g} kB"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the numbers of some ranks, neighbours as one: ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def in_words(ranks: Sequence[int]) -> str:
    """Return ``"rank 3"`` or ``"ranks 0-2, 5"``."""
    return f"rank{'s'[: len(ranks) > 1]} {ranks_in_words(ranks)}"


def _by(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Group ranks by their values, in the order of the lowest."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return list(found.items())


def _s(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"
