"""The bubble report as text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lightning_freescale.profiling.reporting.verdict import in_ms, steps_of

_WIDTH = 120
_ALL_RANKS = 8
"""With more ranks, the table shows only the extremes."""
_COLUMNS = ("data_wait", "compute", "straggler_wait", "transfer", "wait", "host_overhead", "unexplained", "hidden")
Document = Mapping[str, Any]


def summary(document: Document, brief: bool = False) -> str:
    """Return a report document, with or without its series, as text with lines of at most 120 characters.

    Args:
        document: content of a ``report.json``.
        brief: return only the verdict and the table of the ranks.
    """
    parts = ("verdict", "why", "next") if brief else ("verdict", "why", "next", "also")
    lines = [*_wrapped(_incomplete(document), *(_verdict(document, part) for part in parts), _title(document))]
    lines += _table(document)
    if not brief:
        lines += _wrapped(_COLUMN_HELP, _bubble(document), _compute(document), _device(document), _padding(document))
        lines += _balance(document)
        below = (_overlap, _what_if, _imbalance, _slow_ranks, _memory, _memory_growth, _heat, _waits, _overhead)
        lines += _wrapped(*(sentence(document) for sentence in below))
    return "\n".join(lines)


def _wrapped(*sentences: str | None) -> Iterator[str]:
    for sentence in sentences:
        # an address, which has hyphens, stays whole, so that terminals open it
        yield from textwrap.wrap(sentence or "", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _incomplete(document: Document) -> str | None:
    status = document["status"]
    if status["complete"]:
        return None
    lost = f"; the last {status['not_exchanged']} steps are missing" if status["not_exchanged"] else ""
    return f"INCOMPLETE: {status['reason'] or 'the run was interrupted'}{lost}"


def _verdict(document: Document, part: str) -> str | None:
    found = document.get("verdict", {}).get(part)  # reports of earlier versions lack some parts
    return f"{part.capitalize() + ':':9}{found}" if found else None


def _title(document: Document) -> str:
    run, status = document["run"], document["status"]
    known = len(document["ranks"])
    ranks = f"{run['world_size']} rank{'s'[: run['world_size'] != 1]} on {run['device']}"
    ranks += f" (the report has only {known} of them)" if known != run["world_size"] else ""
    steps = f"{status['steps']} step{'s'[: status['steps'] != 1]}"
    warm = f" after {status['warmup']} of warm-up" if status["warmup"] else ""
    return f"Where the time went: {run['label']} ({run['model']}), {ranks}, {steps}{warm}"


def _table(document: Document) -> list[str]:
    ranks = document["ranks"]
    many = len(ranks) > _ALL_RANKS
    rows = _extremes(ranks) if many else [(f"rank {rank['rank']}", rank) for rank in ranks]
    rows.append(("all", {**document["summary"], "last": sum(rank["last"] for rank in ranks)}))
    exchanges = max(rows[-1][1]["last"], 1)
    wide = max(len(label) for label, _ in rows)
    # most runs have no undivided waits, so the column would only hold zeros
    columns = [name for name in _COLUMNS if name != "wait" or document["summary"]["shares"]["wait"]]
    heads = {name: "  wait for peers" if name == "wait" else f"  {name.replace('_', ' ')}" for name in columns}
    lines = [f"{'rank' if many else '':{wide}}{'ms/step':>9}{''.join(heads.values())}{'last':>8}"]
    for label, row in rows:
        shares = "".join(f"{row['shares'][name]:>{len(head)}.1%}" for name, head in heads.items())
        lines.append(f"{label:{wide}}{row['step_s'] * 1e3:>9.1f}{shares}{row['last'] / exchanges:>8.1%}")
    return lines


def _extremes(ranks: list[Document]) -> list[tuple[str, Document]]:
    compute, data = ([rank["shares"][name] * rank["step_s"] for rank in ranks] for name in ("compute", "data_wait"))
    chosen = {"most compute": np.argmax(compute), "least compute": np.argmin(compute), "most data wait": np.argmax(data)}
    return [(f"{what}: {ranks[k]['rank']}", ranks[k]) for what, k in chosen.items()]


_COLUMN_HELP = "hidden: the part of compute during which an exchange ran; last: how often the rank was the last at an exchange"


def _bubble(document: Document) -> str:
    figures = document["summary"]
    if figures["limit"] is None:
        return "bubble b = 100.0%: no compute was recorded"
    rate = "" if figures["samples_per_s"] is None else f", {figures['samples_per_s']:.1f} samples/s now"
    faster = f"{figures['limit']:.2f}x faster ({in_ms(figures['step_s'] / figures['limit'])} ms/step{rate})"
    return f"bubble b = {figures['bubble']:.1%}: without any bubble the run would be at most {faster}"


def _compute(document: Document) -> str:
    shares = document["summary"]["shares"]
    stages = ", ".join(f"{name} {shares[name]:.1%}" for name in ("forward", "backward", "optimizer"))
    predicted, measured = (document["summary"].get(f"{which}_imbalance") for which in ("predicted", "compute"))
    # for planned steps, the table of the imbalance shows the prediction
    beside = "" if predicted is None or document.get("balance") else f", predicted by the costs {predicted:.3f}"
    return f"compute is {stages}; measured compute imbalance {measured:.3f}{beside} (max / mean over ranks)"


def _device(document: Document) -> str | None:
    seen = document["device_idle"]
    if seen is None:
        return None
    shares = {name: [share for share in seen[name] if share is not None] for name in ("idle", "compute", "other")}
    parts = ", ".join(f"{name} {np.mean(known):.1%}" for name, known in shares.items() if known)
    return f"devices in {seen['steps']} steps under torch.profiler, which slows the host down: {parts} (mean over ranks)"


def _padding(document: Document) -> str | None:
    padding = document["summary"].get("padding")  # reports of earlier versions lack it
    if padding is None:
        return None
    return (
        f"padding: {padding['tokens']:.1%} of the computed tokens, and {padding['time']:.1%} of the time if compute is "
        "proportional to the tokens (part of compute)"
    )


def _balance(document: Document) -> Iterator[str]:
    planned = document.get("balance")  # reports of earlier versions lack it
    if planned is None:
        return
    compute, tokens = planned["compute"], planned["tokens"]
    padded = (document["summary"].get("padding") or {}).get("kind") == "batch, planned"
    of = "slowest rank, padding included / mean rank without padding; measured: " if padded else ""
    yield f"imbalance ({of}max / mean over ranks):"
    yield f"         {'as drawn':10}{'balanced':10}{'lower bound':13}{'gap':7}measured"
    gap = "-" if compute["gap"] is None else f"{compute['gap']:.2%}"
    drawn, balanced, bound = (_ratio(compute[name]) for name in ("as_drawn", "balanced", "lower_bound"))
    yield f"compute  {drawn:10}{balanced:10}{bound:13}{gap:7}{document['summary']['compute_imbalance']:.3f}"
    if tokens is not None:
        full = tokens["fullest"]
        limit = "" if full is None else f"      fullest rank of any step: {full:.1%} of its limit"
        yield f"tokens   {_ratio(tokens['as_drawn']):10}{_ratio(tokens['balanced']):10}{'-':13}{'-':7}-{limit}"
    of = f"{planned['fitted_steps']} of {document['status']['steps']} steps"
    yield f"  all but measured is predicted by the costs, which are fitted to measured times in {of}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _overlap(document: Document) -> str | None:
    efficiency = document["summary"]["overlap_efficiency"]
    return None if efficiency is None else f"compute hid {efficiency:.1%} of the exchange time (straggler wait excluded)"


def _what_if(document: Document) -> str | None:
    cases = []
    for case in document["what_if"]:
        gain = "left out" if case["speed_up"] is None else f"{case['speed_up']:.2f}x"
        cases.append(f"{case['name']} {gain}" + (f" ({case['note']})" if case["note"] else ""))
    limit = next((case["limit"] for case in document["what_if"] if case["limit"] is not None), None)
    steps = steps_of(document)
    of = f" in {steps}" if steps else ""
    if limit is None:
        return f"what if{of}: {', '.join(cases)}" if cases else None
    why = f"with compute alone {limit:.2f}x; the gains need not add up to it, because ranks then wait for another cause"
    return f"what if{of}: {', '.join(cases)}; {why}"


def _imbalance(document: Document) -> str | None:
    split = document["imbalance"]
    if split is None:
        return None
    data, hardware, jitter = (split[f"{cause}_s"] for cause in ("data", "hardware", "jitter"))
    differ = f"of {in_ms(data + hardware + jitter)} ms that ranks differ per step"
    if split["method"] == "ranks":
        return f"{differ}, {in_ms(hardware)} are the same in every step, {in_ms(data + jitter)} are not"
    off = "" if split["residual"] is None else f", median error {split['residual']:.1%}"
    causes = f"{in_ms(data)} come from the data, {in_ms(hardware)} from hardware, up to {in_ms(jitter)} from neither"
    return f"{differ}, {causes} (by the cost model{off})"


def _slow_ranks(document: Document) -> str | None:
    slow = (document["imbalance"] or {}).get("slow_ranks")
    if not slow:
        return None
    of = "of the median rank: it has longer histories, or its device is slow"
    if document["imbalance"]["method"] == "cost model":
        of = "that its samples explain: the device may be slow or shared"
    return ", ".join(f"rank {rank} takes {score:.2f}x the time" for rank, score in slow.items()) + f" {of}"


def _memory(document: Document) -> str | None:
    memory = document.get("memory")  # reports of earlier versions lack it
    if memory is None:
        return None
    most = max(memory["ranks"], key=lambda rank: rank["peak_bytes"])
    uneven = f", {memory['peak_imbalance']:.2f}x the mean" if len(memory["ranks"]) > 1 else ""
    now = max(memory["ranks"], key=lambda rank: rank["current_bytes"])
    few = "" if now["grows"] is not None else f"; too few readings to detect growth ({len(memory['step'])})"
    return (
        f"memory: peak {_mib(most['peak_bytes'])} on rank {most['rank']}{uneven}; now at most {_mib(now['current_bytes'])}, on "
        f"rank {now['rank']}{few}"
    )


def _memory_growth(document: Document) -> str | None:
    memory = document.get("memory") or {"ranks": []}
    growing = sorted((rank for rank in memory["ranks"] if rank["grows"]), key=lambda rank: -rank["growth_bytes"])
    if not growing:
        return None
    named = ", ".join(f"rank {rank['rank']} by {_mib(rank['growth_bytes'])}" for rank in growing[:_ALL_RANKS])
    more = f" and {len(growing) - _ALL_RANKS} more" if len(growing) > _ALL_RANKS else ""
    windows = memory["step"]
    per_window = round((windows[-1] - windows[0]) / (len(windows) - 1))
    return f"MEMORY GROWS every {per_window} steps: {named}{more}"


def _heat(document: Document) -> str | None:
    heat = document.get("heat")  # reports of earlier versions lack it
    if heat is None:
        return None
    far, spared = heat["cross_node_bytes"], heat["hot_direct_bytes"] - heat["hot_far_bytes"]
    colliding = "" if heat["colliding_share"] is None else f" ({heat['colliding_share']:.0%} of the colliding ones)"
    return (
        f"{heat['rows']:,} hot rows{colliding}: {far / 1e6:.3g} MB per step between nodes, {(far + spared) / 1e6:.3g} without "
        f"their route, which adds {heat['hot_near_bytes'] / 1e6:.3g} within nodes; {heat['rows_of_half']:,} rows make 50% of "
        f"all accesses, {heat['rows_of_most']:,} make 90%; largest load of an owner {heat['largest_load']:.2f}x the mean"
    )


def _mib(size: float) -> str:
    mib = size / 2**20
    return f"{mib:.1f} MiB" if mib < 100 else f"{mib:.0f} MiB" if mib < 10_000 else f"{mib / 1024:.1f} GiB"


def _waits(document: Document) -> str | None:
    waits = document["wait_attribution"]
    if not waits["aligned"]:
        return f"wait for peers is not divided into straggler wait and transfer: {waits['reason']}"
    if document["run"]["world_size"] == 1:
        return None
    uncertain = in_ms(waits["uncertainty_s"])
    return f"straggler wait and transfer are divided by the ranks' arrivals on one clock, with an uncertainty of {uncertain} ms"


def _overhead(document: Document) -> str:
    overhead = document["overhead"]
    parts = f"{in_ms(overhead['exchange_s'])} for exchanges on a separate thread, {in_ms(overhead['stamps_s'])} for stamps"
    return f"profiler overhead {in_ms(overhead['total_s'])} ms/step, {overhead['share']:.2%} of a step ({parts})"
