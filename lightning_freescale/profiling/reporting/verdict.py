"""What a bubble report comes to: the cause that costs most, why it is that one, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_freescale.profiling.reporting.causes import (
    PARTED,
    VERDICTS,
    BubbleVerdict,
    Document,
    idle_in_compute,
    shares_of,
    steps_of,
)

WORTH_DOING = 1.03
"""What removing a cause must bring for anybody to bother."""
_PADDED = 0.2
"""Share of the computed tokens above which padding is named as a cause."""
_PAGE = "docs/how_to/read_the_report.md"
_RECIPES = {"data_wait": "#the-loader-is-late", "host_overhead": "#the-host-is-busy", "unexplained": "#the-host-is-busy"}
"""Of parts that have one cause, whatever a replay would say."""


def verdict_on(document: Document) -> BubbleVerdict:
    """Return the verdict on a document; its series are not needed."""
    found, summary = _largest_cause(document), document["summary"]
    predicted, measured = summary.get("predicted_imbalance"), summary["compute_imbalance"]
    if predicted is None or measured - predicted <= PARTED:
        return found
    why = f"{found.why} The plan predicted a compute imbalance of {predicted:.2f}; the measured one is {measured:.2f}."
    return BubbleVerdict(*found[:3], why, *found[4:])


def _largest_cause(document: Document) -> BubbleVerdict:
    gains = {case["name"]: case["speed_up"] for case in document["what_if"] if case["name"] in VERDICTS}
    shares, padding = shares_of(document), document["summary"].get("padding") or {"tokens": 0.0}
    if padding["tokens"] <= _PADDED:
        gains.pop("no padding", None)
    known = {name: gain for name, gain in gains.items() if gain is not None}
    if starved := min(idle_in_compute(document), 0.99):
        known["no idle device"] = 1 / (1 - starved)
    padded = padding["tokens"] * shares["compute"] if "no padding" in known else 0.0
    # what a replay cannot judge is judged by its share
    unknown = shares["wait"] if shares["wait"] > 1 - 1 / WORTH_DOING else 0.0
    if unknown > max(shares["data_wait"], shares["host_overhead"] + shares["unexplained"], padded):
        return _undivided(document)
    if not known and shares["compute"] < 1 / WORTH_DOING:
        return _not_replayed(document)
    causes = sorted((name for name, gain in known.items() if gain >= WORTH_DOING), key=known.__getitem__, reverse=True)
    found = [VERDICTS[name](document, known[name]) for name in causes] + ([_undivided(document)] if unknown else [])
    if not found:
        return _nothing(document, known)
    first, *others = found
    return BubbleVerdict(*first[:-1], f"{others[0].verdict} {others[0].next}") if others else first


def verdict_line(document: Document) -> str:
    """Return the verdict in one line of a log; what ended a run before its time comes first."""
    status, verdict = document["status"], document["verdict"]
    ended = "" if status["complete"] else f"INCOMPLETE: {status['reason']} "
    return f"{ended}Verdict: {verdict['verdict']} Why: {verdict['why']} Next: {verdict['next']}"


def _nothing(document: Document, gains: Mapping[str, float]) -> BubbleVerdict:
    padding = document["summary"].get("padding")
    beside = "" if padding is None else f" Padding is {padding['tokens']:.0%} of the computed tokens."
    best, compute, steps = max(gains.values(), default=1.0), shares_of(document)["compute"], steps_of(document)
    unseen = document["run"]["device"] != "cpu" and document["device_idle"] is None
    idle = "BubbleProfiler(torch_profiler_steps=3) shows whether the device is idle in compute and waits for the host. "
    return BubbleVerdict(
        "nothing",
        best if gains else None,
        f"Nothing worth doing{f' in {steps}' if steps else ''}: at most {best:.2f}x to gain from any one cause.",
        f"{compute:.1%} of the ranks' time is compute, and without its largest cause of waiting the run would be {best:.2f}x "
        f"as fast.{beside}",
        f"{idle if unseen else ''}A faster device, a smaller model, or more samples per rank.",
    )


def _not_replayed(document: Document) -> BubbleVerdict:
    shares = shares_of(document)
    part = max(("data_wait", "straggler_wait", "transfer", "host_overhead", "unexplained"), key=shares.__getitem__)
    why = "the ranks waited for each other in no common order"
    if not document["status"]["complete"]:
        why = f"the run had not come to its end, or {why}"
    if not shares["compute"]:
        why = "no compute was seen, neither forward nor backward nor optimizer"
    return BubbleVerdict(
        part.replace("_", " "),
        None,
        f"{part.replace('_', ' ').capitalize()}, {shares[part]:.1%} of the time, is the largest part that is not compute.",
        f"The steps were not replayed, so what removing it would bring is not known: {why}.",
        f"See {_PAGE}{_RECIPES.get(part, '')}.",
    )


def _undivided(document: Document) -> BubbleVerdict:
    share, reason = shares_of(document)["wait"], document["wait_attribution"]["reason"]
    return BubbleVerdict(
        "waiting for peers",
        None,
        f"Waiting for peers, {share:.1%} of the time: for stragglers or for bytes, which could not be told apart.",
        f"{reason[:1].upper()}{reason[1:]}.",
        "See docs/report.md#waits-that-are-not-divided.",
    )
