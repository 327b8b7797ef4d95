"""Where all ranks stand, as one document and as the table that is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

_WIDTH = 120
_CODE = 60
"""Characters of a line of code that are shown."""
Standing = Mapping[str, Any]
"""Of one rank, see :meth:`~lightning_freescale.profiling.hanging.standing.StandingSeen.as_document`."""


def hang_document(why: str, ranks: Sequence[Standing], next_s: float | None) -> dict[str, Any]:
    """Return a hang as it is kept in ``hang.json``: where every rank stands, and who has not come to which exchange.

    Args:
        why: the ranks were asked.
        ranks: what each answered.
        next_s: seconds without a step after which they are asked again; None if they are not.
    """
    told = [one["exchange"] for one in ranks if one.get("exchange")]
    awaited = {(exchange["group"], exchange["step"], exchange["number"]) for exchange in told}
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "why": why,
        "next_s": next_s,
        "ranks": list(ranks),
        "exchanges": [_exchange(place, ranks) for place in sorted(awaited)],
    }


def _exchange(place: tuple[str, int, int], ranks: Sequence[Standing]) -> dict[str, Any]:
    """Who waits in an exchange and who is missing. A rank has come to it if it has begun more of the group's."""
    group, step, number = place
    inside = [one for one in ranks if (told := one.get("exchange")) and (told["group"], told["step"], told["number"]) == place]
    members = inside[0]["exchange"]["ranks"] or [one["rank"] for one in ranks]
    names: dict[str, list[int]] = {}
    for one in inside:
        names.setdefault(one["exchange"]["name"], []).append(one["rank"])
    return {
        "names": names,
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
    names, at = exchange["names"], _which(exchange)
    differ = len({"message" if name in ("send", "recv") else name for name in names}) > 1
    if differ:
        each = ", ".join(f"{in_words(those)} call{'s'[: len(those) == 1]} {name}" for name, those in names.items())
        yield f"the ranks call different exchanges ({at}): {each}; none of them can end"
    name = " or ".join(names)
    waiting, missing, unknown = exchange["waiting"], exchange["missing"], exchange["unknown"]
    has = "has" if len(missing) == 1 else "have"
    if missing:
        stages = {rank["rank"]: _stands_in(rank) for rank in ranks if rank["rank"] in missing}
        where = "; ".join(f"{in_words(those)} {'is' if len(those) == 1 else 'are'} in {stage}" for stage, those in _by(stages))
        yield f"{in_words(missing)} {has} not come to {name} ({at}), in which {_wait(waiting)}: {where}"
    if unknown:
        yield f"{in_words(unknown)} cannot be asked, and {_wait(waiting)} in {name} ({at})"
    if not missing and not unknown and not differ:
        yield f"all ranks have come to {name} ({at}), in which {_wait(waiting)}: its messages are under way, or lost"


def _which(exchange: Mapping[str, Any]) -> str:
    group = "" if exchange["group"] in exchange["names"] else f" in group {exchange['group']}"
    return f"exchange {exchange['number']} of step {exchange['step']}{group}"


def _wait(ranks: Sequence[int]) -> str:
    return f"{in_words(ranks)} wait{'s'[: len(ranks) == 1]}"


def _table(ranks: Sequence[Standing]) -> list[str]:
    rows = {rank["rank"]: _row(rank) for rank in ranks}
    times = {rank["rank"]: rank for rank in ranks}
    lines = [("ranks", "step", "last steps", "for", "stands in")]
    for (step, text), those in _by(rows):
        told = [times[rank] for rank in those]
        steps = [seconds for rank in told for seconds in rank.get("last_steps_s", ())]
        since = [rank["since_s"] for rank in told if "since_s" in rank]
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
    if exchange is None:
        return str(rank["stage"])
    return f"{exchange['name']}{_of_bytes(exchange)} ({rank['stage']})"


def _of_bytes(exchange: Mapping[str, Any]) -> str:
    moved = exchange["moved_bytes"]
    return "" if not moved else f" of {moved / 1e6:.3g} MB" if moved >= 1e6 else f" of {moved / 1e3:.3g} kB"


def _threads(ranks: Sequence[Standing]) -> Iterator[str]:
    for rank in ranks:
        for thread in rank.get("threads", ()):
            since = "" if thread["since_s"] is None else f" for {_s(thread['since_s'])} s"
            work = "" if thread["exchange"] is None else f" in {thread['exchange']}{_of_bytes(thread)}{since},"
            yield f"rank {rank['rank']}, thread {thread['thread']}{work} at {thread['place']}"


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
    """Ranks by what they have in common, in the order of the lowest."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return list(found.items())


def _s(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"
