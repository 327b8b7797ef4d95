"""The report as a short text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

_WIDTH = 120
_ALL_RANKS = 8
"""With more ranks the table has the extremes only."""
_COLUMNS = ("data_wait", "compute", "straggler_wait", "transfer", "wait", "host_overhead", "unexplained", "hidden")


def summary(document: Mapping[str, Any]) -> str:
    """Return the text of a document, no line wider than 120 characters; its series are not needed."""
    sentences = (_bubble, _compute, _overlap, _what_if, _imbalance, _slow_ranks, _waits, _overhead)
    below = [sentence(document) for sentence in sentences]
    lines = [*_wrapped([_incomplete(document), _title(document)]), *_table(document), *_wrapped(below)]
    return "\n".join(lines)


def _wrapped(sentences: Iterable[str | None]) -> Iterable[str]:
    for sentence in sentences:
        yield from textwrap.wrap(sentence or "", _WIDTH, subsequent_indent="  ")


def _ms(seconds: float) -> str:
    figure = round(seconds * 1e3, 3)
    return f"{figure:.3g}" if abs(figure) < 100 else f"{figure:.0f}"


def _incomplete(document: Mapping[str, Any]) -> str | None:
    status = document["status"]
    if status["complete"]:
        return None
    lost = f"; its last {status['not_exchanged']} steps are not in here" if status["not_exchanged"] else ""
    return f"INCOMPLETE: {status['reason'] or 'the run did not come to its end'}{lost}"


def _title(document: Mapping[str, Any]) -> str:
    run, status = document["run"], document["status"]
    known = len(document["ranks"])
    ranks = f"{run['world_size']} rank{'s'[: run['world_size'] != 1]} on {run['device']}"
    ranks += f" (only {known} of them in here)" if known != run["world_size"] else ""
    steps = f"{status['steps']} step{'s'[: status['steps'] != 1]}"
    left_out = f", first {status['warmup']} left out" if status["warmup"] else ""
    return f"Where the time went: {run['label']} ({run['model']}), {ranks}, {steps}{left_out}"


def _table(document: Mapping[str, Any]) -> list[str]:
    ranks = document["ranks"]
    many = len(ranks) > _ALL_RANKS
    rows = _extremes(ranks) if many else [(f"rank {rank['rank']}", rank) for rank in ranks]
    rows.append(("all", {**document["summary"], "last": sum(rank["last"] for rank in ranks)}))
    exchanges = max(rows[-1][1]["last"], 1)
    wide = max(len(label) for label, _ in rows)
    # waits are divided on most runs: the column of those that are not would hold zeros
    columns = [name for name in _COLUMNS if name != "wait" or document["summary"]["shares"]["wait"]]
    heading = "".join(f"{_label(name):>{_width(name)}}" for name in columns)
    return [
        f"{'rank' if many else '':{wide}}{'ms/step':>9}{heading}{'last':>8}",
        *(f"{label:{wide}}{_cells(row, columns)}{row['last'] / exchanges:>8.1%}" for label, row in rows),
    ]


def _label(column: str) -> str:
    return "wait for peers" if column == "wait" else column.replace("_", " ")


def _width(column: str) -> int:
    return len(_label(column)) + 2


def _cells(row: Mapping[str, Any], columns: Iterable[str]) -> str:
    shares = (f"{row['shares'][name]:>{_width(name)}.1%}" for name in columns)
    return f"{row['step_s'] * 1e3:>9.1f}{''.join(shares)}"


def _extremes(ranks: list[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    def seconds(rank: Mapping[str, Any], name: str) -> float:
        return float(rank["shares"][name] * rank["step_s"])

    chosen = {
        "most compute": max(ranks, key=lambda rank: seconds(rank, "compute")),
        "least compute": min(ranks, key=lambda rank: seconds(rank, "compute")),
        "most data wait": max(ranks, key=lambda rank: seconds(rank, "data_wait")),
    }
    return [(f"{what}: {rank['rank']}", rank) for what, rank in chosen.items()]


def _bubble(document: Mapping[str, Any]) -> str:
    figures = document["summary"]
    if figures["limit"] is None:
        return "bubble b = 100.0%: no compute was seen"
    rate = figures["samples_per_s"]
    speed = "" if rate is None else f", {rate:.1f} samples/s now"
    return (
        f"bubble b = {figures['bubble']:.1%}: removing it all would be at most {figures['limit']:.2f}x faster "
        f"({_ms(figures['step_s'] / figures['limit'])} ms/step{speed})"
    )


def _compute(document: Mapping[str, Any]) -> str:
    shares = document["summary"]["shares"]
    stages = ", ".join(f"{name} {shares[name]:.1%}" for name in ("forward", "backward", "optimizer"))
    imbalance = document["summary"]["compute_imbalance"]
    return f"compute is {stages}; measured compute imbalance {imbalance:.3f} (max / mean over ranks)"


def _overlap(document: Mapping[str, Any]) -> str | None:
    efficiency = document["summary"]["overlap_efficiency"]
    return None if efficiency is None else f"compute hid {efficiency:.1%} of the time of the exchanges, straggler wait left out"


def _what_if(document: Mapping[str, Any]) -> str | None:
    cases = ", ".join(map(_case, document["what_if"]))
    return f"what if: {cases}" if cases else None


def _case(case: Mapping[str, Any]) -> str:
    gain = "left out" if case["speed_up"] is None else f"{case['speed_up']:.2f}x"
    return f"{case['name']} {gain}" + (f" ({case['note']})" if case["note"] else "")


def _imbalance(document: Mapping[str, Any]) -> str | None:
    split = document["imbalance"]
    if split is None:
        return None
    data, hardware, jitter = (split[f"{cause}_s"] for cause in ("data", "hardware", "jitter"))
    if split["method"] == "ranks":
        return (
            f"of {_ms(data + hardware + jitter)} ms that ranks differ per step, {_ms(hardware)} last from step to step, "
            f"{_ms(data + jitter)} do not"
        )
    off = "" if split["residual"] is None else f", {split['residual']:.1%} off"
    return (
        f"of {_ms(data + hardware + jitter)} ms that ranks differ per step, {_ms(data)} come from the data, "
        f"{_ms(hardware)} from hardware, {_ms(jitter)} from neither (by the cost model{off})"
    )


def _slow_ranks(document: Mapping[str, Any]) -> str | None:
    slow = (document["imbalance"] or {}).get("slow_ranks")
    if not slow:
        return None
    named = ", ".join(f"rank {rank} takes {score:.2f}x" for rank, score in slow.items())
    if document["imbalance"]["method"] == "cost model":
        return f"{named} what its samples explain: a slow or shared device?"
    return f"{named} as long as the median rank, step after step: a slow device, or always longer histories? lengths_fn= tells"


def _waits(document: Mapping[str, Any]) -> str | None:
    waits = document["wait_attribution"]
    if not waits["aligned"]:
        return f"wait for peers is not divided into straggler wait and transfer: {waits['reason']}"
    if document["run"]["world_size"] == 1:
        return None
    uncertain = _ms(waits["uncertainty_s"])
    return f"straggler wait and transfer were told apart by the ranks' arrivals on one clock, uncertain by {uncertain} ms"


def _overhead(document: Mapping[str, Any]) -> str:
    overhead = document["overhead"]
    total, exchange, stamps = (_ms(overhead[name]) for name in ("total_s", "exchange_s", "stamps_s"))
    return (
        f"profiler overhead {total} ms/step, {overhead['share']:.2%} of a step ({exchange} for exchanges, on a thread aside; "
        f"{stamps} for stamps)"
    )
