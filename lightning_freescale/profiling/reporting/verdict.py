"""The verdict on a bubble report: the most expensive cause, its figures, and the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_freescale._version import SITE

Document = Mapping[str, Any]
Advise = Callable[[str, str, Document], "str | None"]
"""Function from a cause, its exchange or section of host overhead, and the document to advice, or None."""
PARTED = 0.03
"""Largest difference between predicted and measured imbalance that counts as agreement."""
WORTH_DOING = 1.03
"""Smallest speed-up without a cause for which the verdict names the cause."""
_PADDED = 0.2
"""Share of the computed tokens above which padding is a cause."""
_EXCEEDS = 1.03
"""Ratio of the gain to the gain by the share above which the cause also makes other ranks wait."""
_WORTH_NAMING = 0.2
"""Share of the largest section or cause below which another one is not named."""
_FALLS_SHORT = 0.95
"""Ratio of the gain to the gain by the share below which compute is too short to hide the exchange."""
_BESIDE = 0.05
"""Share of the wait below which the hidden time of an exchange is ignored, so that its rate can be stated."""
_PAGE = f"{SITE}how_to/read_the_report.html"
_NOTHING = "Use a faster device, a smaller model, or more samples per rank"
_PARTS = {"data_wait": "data loading", "host_overhead": "host overhead", "unexplained": "host overhead"}
"""Causes of the parts that have a single cause."""
_ADVICE = {
    "data loading": ("the-loader-is-late", "Prepare batches in more worker processes, or reduce the work for each sample"),
    "imbalance of data": ("histories-differ", "lightning_freescale.balance assigns samples so that ranks finish together"),
    "slow hardware": ("a-rank-is-slow", "See what else runs on that device, or give it less work"),
    "uneven compute": ("compute-is-uneven", "Check for other work on the machine, or for compute that lengths do not explain"),
    "embedding exchange": ("rows-are-waited-for", "Exchange rows while the model computes"),
    "dense communication": ("other-exchanges-are-waited-for", "Send gradients less often, or use a larger batch"),
    "other communication": ("other-exchanges-are-waited-for", "The trace of torch.profiler shows the caller"),
    "host overhead": ("the-host-is-busy", "Reduce the work between the spans, or add spans that show what it is"),
    "padding": ("batches-are-padded", "Pad to the longest sample of the batch, or use jagged attention"),
    "idle device": (
        "the-gpu-waits-for-the-host",
        "Use fewer and larger kernels: a larger batch, operations on the whole batch and not on samples, or torch.compile",
    ),
}
"""The section of ``_PAGE`` and the advice for any training loop, by cause."""
LINKS = {cause: f"{_PAGE}#{anchor}" for cause, (anchor, _) in _ADVICE.items()}
LINKS["waiting for peers"] = f"{SITE}report.html#waits-that-are-not-divided"


class BubbleVerdict(NamedTuple):
    """Fields of ``verdict`` in the document, which ``schema.json`` describes. ``speed_up`` is None without a replay."""

    cause: str
    speed_up: float | None
    verdict: str
    why: str
    next: str
    also: str | None = None


class _Finding(NamedTuple):
    """A cause with its figures but without advice. ``about`` is an exchange or a section of host overhead."""

    cause: str
    what: str
    share: float
    why: str
    detail: str = ""
    about: str = ""


def verdict_on(document: Document, advise: Advise | None = None) -> BubbleVerdict:
    """Return the verdict on a document, with or without its series.

    ``advise`` returns advice based on the settings of the run. If it returns None, the advice for any loop is used.
    """
    found, summary = _largest_cause(document, advise or (lambda *_: None)), document["summary"]
    predicted, measured = summary.get("predicted_imbalance"), summary["compute_imbalance"]
    if predicted is None or measured - predicted <= PARTED:
        return found
    why = f"{found.why} The plan predicted a compute imbalance of {predicted:.2f}; the measured one is {measured:.2f}."
    return BubbleVerdict(*found[:3], why, *found[4:])


def verdict_line(document: Document) -> str:
    """Return the verdict as one line of a log, after the reason of an early end."""
    status, verdict = document["status"], document["verdict"]
    ended = "" if status["complete"] else f"INCOMPLETE: {status['reason']} "
    return f"{ended}Verdict: {verdict['verdict']} Why: {verdict['why']} Next: {verdict['next']}"


def steps_of(document: Document) -> str | None:
    """Return the replayed steps as text; None if these are all steps of the report."""
    replay, status = document.get("replay"), document["status"]
    if replay is None or replay["steps"] == status["steps"]:
        return None
    first, last = replay["first_step"], replay["last_step"]
    some = "" if last - first + 1 == replay["steps"] else f"{replay['steps']} of "
    return f"{some}steps {first} to {last}"


def _largest_cause(document: Document, advise: Advise) -> BubbleVerdict:
    gains = {case["name"]: case["speed_up"] for case in document["what_if"] if case["name"] in _FINDINGS}
    shares, padding = _shares_of(document), document["summary"].get("padding") or {"tokens": 0.0}
    if padding["tokens"] <= _PADDED:
        gains.pop("no padding", None)
    known = {name: gain for name, gain in gains.items() if gain is not None}
    if starved := min(_idle_in_compute(document), 0.99):
        known["no idle device"] = 1 / (1 - starved)
    padded = padding["tokens"] * shares["compute"] if "no padding" in known else 0.0
    # a replay cannot judge undivided waits, so their share decides
    unknown = shares["wait"] if shares["wait"] > 1 - 1 / WORTH_DOING else 0.0
    if unknown > max(shares["data_wait"], shares["host_overhead"] + shares["unexplained"], padded):
        return _undivided(document)
    if not known and shares["compute"] < 1 / WORTH_DOING:
        return _not_replayed(document)
    causes = sorted((name for name, gain in known.items() if gain >= WORTH_DOING), key=known.__getitem__, reverse=True)
    found = [_verdict(document, name, known[name], advise) for name in causes] + ([_undivided(document)] if unknown else [])
    if not found:
        return _nothing(document, known, advise)
    first, *others = found
    return BubbleVerdict(*first[:-1], f"{others[0].verdict} {others[0].next}") if others else first


def _verdict(document: Document, case: str, gain: float, advise: Advise) -> BubbleVerdict:
    """Return the verdict on the cause of a replayed case."""
    if case == "no idle device":
        return _idle_device(document, gain)
    cause, what, share, why, detail, about = _FINDINGS[case](document, gain)
    if gain > _EXCEEDS / (1 - share) and document["run"]["world_size"] > 1:
        why += " It also makes other ranks wait, and these waits would disappear with it."
    steps = steps_of(document)
    named = f"{what}, {share:.1%} of the time{f' in {steps}' if steps else ''}{', ' if detail else ''}{detail}"
    verdict = f"{named}: without it {'they' if steps else 'the run'} would be {gain:.2f}x as fast."
    advice = advise(cause, about, document) or _ADVICE[cause][1]
    if cause == "host overhead" and _has_no_data_spans(document):
        advice = f"Iterate over batches_on(timeline, loader), which records waits for data. {advice}"
    return BubbleVerdict(cause, gain, verdict, why, f"{advice}. See {LINKS[cause]}")


def _idle_device(document: Document, gain: float) -> BubbleVerdict:
    share = _idle_in_compute(document)
    return BubbleVerdict(
        "idle device",
        gain,
        f"Idle device, {share:.1%} of the time: the host launches kernels more slowly than the device runs them. Without it "
        f"the run would be at most {gain:.2f}x as fast.",
        f"In {document['device_idle']['steps']} steps under torch.profiler, which slows the host down, the device ran nothing "
        f"for {share:.1%} of the time beyond the bubbles.",
        f"{_ADVICE['idle device'][1]}. See {LINKS['idle device']}",
    )


def _nothing(document: Document, gains: Mapping[str, float], advise: Advise) -> BubbleVerdict:
    padding = document["summary"].get("padding")
    beside = "" if padding is None else f" Padding is {padding['tokens']:.0%} of the computed tokens."
    best, compute, steps = max(gains.values(), default=1.0), _shares_of(document)["compute"], steps_of(document)
    return BubbleVerdict(
        "nothing",
        best if gains else None,
        f"No relevant cause{f' in {steps}' if steps else ''}: the largest gain from one cause is {best:.2f}x.",
        f"{compute:.1%} of the ranks' time is compute, and without its largest cause of waiting the run would be {best:.2f}x "
        f"as fast.{beside}",
        f"{advise('nothing', '', document) or _NOTHING}.",
    )


def _not_replayed(document: Document) -> BubbleVerdict:
    shares = _shares_of(document)
    part = max(("data_wait", "straggler_wait", "transfer", "host_overhead", "unexplained"), key=shares.__getitem__)
    why = "the ranks waited for each other in contradicting orders"
    if not document["status"]["complete"]:
        why = f"the run ended early, or {why}"
    if not shares["compute"]:
        why = "no compute was recorded (forward, backward or optimizer)"
    return BubbleVerdict(
        part.replace("_", " "),
        None,
        f"{part.replace('_', ' ').capitalize()}, {shares[part]:.1%} of the time, is the largest part that is not compute.",
        f"The steps were not replayed, so the gain without it is unknown: {why}.",
        f"See {LINKS[_PARTS[part]] if part in _PARTS else _PAGE}",
    )


def _undivided(document: Document) -> BubbleVerdict:
    share, reason = _shares_of(document)["wait"], document["wait_attribution"]["reason"]
    return BubbleVerdict(
        "waiting for peers",
        None,
        f"Waiting for peers, {share:.1%} of the time: for stragglers or for transfers, which could not be distinguished.",
        f"{reason[:1].upper()}{reason[1:]}.",
        f"See {LINKS['waiting for peers']}",
    )


# -- each cause by its figures


def _data(document: Document, gain: float) -> _Finding:
    share, step = _shares_of(document)["data_wait"], _step_seconds(document)
    most = max(document["ranks"], key=lambda rank: rank["shares"]["data_wait"])
    uneven = most["shares"]["data_wait"] > 2 * document["summary"]["shares"]["data_wait"]
    where = f", most of it on rank {most['rank']}" if uneven else ""
    why = f"A rank waits {in_ms(share * step)} ms of a step of {in_ms(step)} ms for its batch{where}."
    return _Finding("data loading", "Data wait", share, why)


def _imbalance(document: Document, gain: float) -> _Finding:
    split, share = document["imbalance"] or {}, _shares_of(document)["straggler_wait"]
    parts = {cause: split.get(f"{cause}_s") or 0.0 for cause in ("data", "hardware", "jitter")}
    total = sum(parts.values())
    differ = f"Of {in_ms(total)} ms by which the slowest rank computes longer than the mean one"
    by_costs = split.get("method") == "cost model"
    largest = max(parts, key=parts.__getitem__)
    slow = {int(rank): times for rank, times in (split.get("slow_ranks") or {}).items()}
    if largest == "hardware" and parts["hardware"] > 0 and not slow:  # no rank is clearly slow
        slow = dict([max(((rank["rank"], rank["score"]) for rank in document["ranks"]), key=lambda one: one[1])])
    explained = "what its samples explain" if by_costs else "as long as the others"
    named = ", ".join(f"rank {rank} takes {times:.2f} times" for rank, times in slow.items()) + f" {explained}"
    if by_costs and largest == "data":
        why = f"{differ}, {in_ms(min(parts['data'], total))} come from the samples: the histories that ranks draw differ."
        if not slow:
            return _Finding("imbalance of data", "Straggler wait", share, why, "caused by unequal histories")
        alone = next((case["speed_up"] for case in document["what_if"] if case["name"] == "equal histories"), None)
        why += f" And {named}."
        why += f" Equal histories alone would make the run {alone:.2f}x as fast." if alone is not None else ""
        detail = "caused by unequal histories and slow ranks"
        return _Finding("imbalance of data", "Straggler wait", share, why, detail, "slow ranks")
    if largest == "hardware" and slow:
        why = f"{named[:1].upper()}{named[1:]}."
        if by_costs and parts["data"] > _WORTH_NAMING * parts["hardware"]:
            why += f" {differ}, {in_ms(parts['data'])} come from unequal histories."
        return _Finding("slow hardware", "Straggler wait", share, why, "caused by slow ranks")
    why = "The ranks' compute differs from step to step, and the profiler does not know their samples."
    if by_costs:
        why = f"{differ}, up to {in_ms(parts['jitter'])} come from neither the samples nor slow ranks."
    return _Finding("uneven compute", "Straggler wait", share, why, "caused by uneven compute")


def _transfer(document: Document, gain: float) -> _Finding:
    run, exchanges = document["run"], document["exchanges"]
    share = _shares_of(document)["transfer"]
    exposed = max(exchanges, key=lambda exchange: exchange["transfer_s"])
    name, moved = exposed["name"], exposed["moved_bytes"] or 0
    behind = sum(exchange["moved_bytes"] or 0 for exchange in exchanges if exchange["name"].endswith("(background)"))
    buckets = f"{name} (behind backward, at most)"
    earlier = sum(exchange["moved_bytes"] or 0 for exchange in exchanges if exchange["name"] == buckets)
    why = f"A rank waits {in_ms(exposed['transfer_s'])} ms of a step for {name} that nothing hides"
    if moved:
        # DDP sends buckets during backward, which are not always recorded apart
        alone = exposed["hidden_s"] < _BESIDE * exposed["transfer_s"] and name != "dense gradients"
        fast = f", at {_short(moved / 1e6 / exposed['transfer_s'])} MB/s" if alone else ""
        fast += f", after {_short(earlier / 1e6)} MB that leave during backward" if earlier else ""
        why += f": {_short(moved / 1e6)} MB{fast}"
    if gain < _FALLS_SHORT / (1 - share):
        why += "; there is too little compute to hide all of it"
    cause = _cause_of_exchange(name, run)
    if cause == "dense communication" and behind > moved + earlier and run.get("overlap") == "on":
        # both share a link, on which the last gradients wait for all earlier bytes
        cause = "embedding exchange"
        why += f", behind {_short(behind / 1e6)} MB of the embedding exchange on the same link"
    return _Finding(cause, "Transfer", share, f"{why}.", f"most of it of {name}", name)


def _cause_of_exchange(name: str, run: Document) -> str:
    of_shards = name.startswith(("all_gather", "reduce_scatter")) and not name.endswith("object")
    if name.startswith(("embedding rows", "embedding exchange")):
        return "embedding exchange"
    # TorchRec's own exchanges have torch's names. If this package replaces them, such a name belongs to the user's code
    sharded = run.get("overlap") in ("off", "impossible")
    unknown = run.get("overlap") is None and run.get("sharded_tables") is not False
    if (name.startswith("all_to_all") and (sharded or unknown)) or (of_shards and sharded):
        return "embedding exchange"
    weights = of_shards and any(kind in run["strategy"].lower() for kind in ("fsdp", "deepspeed", "modelparallel"))
    return "dense communication" if weights or name in ("dense gradients", "buffers") else "other communication"


def _host(document: Document, gain: float) -> _Finding:
    shares = _shares_of(document)
    share = shares["host_overhead"] + shares["unexplained"]
    sections = sorted(document["host_s"].items(), key=lambda item: -item[1])[:2]
    named = [f"{in_ms(seconds)} ms in {name}" for name, seconds in sections if seconds >= _WORTH_NAMING * sections[0][1]]
    why = f"A rank spends {in_ms(share * _step_seconds(document))} ms of a step outside forward, backward and optimizer"
    why = ": ".join([why, *[", ".join(named)][: bool(named)]]) + "."
    if _has_no_data_spans(document):
        why += " No wait for data was recorded, so it may be part of that."
    return _Finding("host overhead", "Host overhead", share, why, about=sections[0][0] if sections else "")


def _has_no_data_spans(document: Document) -> bool:
    unexplained = _shares_of(document)["unexplained"] > _EXCEEDS - 1
    return unexplained and not document["summary"]["shares"]["data_wait"]


def _padding(document: Document, gain: float) -> _Finding:
    tokens = document["summary"]["padding"]["tokens"]
    why = "The gain is predicted for compute proportional to the computed tokens."
    share = tokens * _shares_of(document)["compute"]
    return _Finding("padding", f"Padding: {tokens:.0%} of the computed tokens", share, why)


def _idle_in_compute(document: Document) -> float:
    """Return the share of the time in which the devices were idle outside of bubbles; 0 if unknown.

    It is an upper bound, because torch.profiler slows down the host that launches kernels.
    """
    seen = [share for share in (document["device_idle"] or {"idle": []})["idle"] if share is not None]
    return max(0.0, sum(seen) / len(seen) - (1 - _shares_of(document)["compute"])) if seen else 0.0


_FINDINGS: Mapping[str, Callable[[Document, float], _Finding]] = {
    "no data wait": _data,
    "perfect balance": _imbalance,
    "full overlap": _transfer,
    "no host overhead": _host,
    "no padding": _padding,
}
"""Findings by the name of the replayed case."""


def _shares_of(document: Document) -> Mapping[str, float]:
    """Return the shares of the replayed steps, like the what-ifs; of all steps without a replay."""
    return (document.get("replay") or document["summary"])["shares"]


def _step_seconds(document: Document) -> float:
    return (document.get("replay") or document["summary"])["step_s"]


def in_ms(seconds: float) -> str:
    """Return a time in milliseconds with three digits."""
    return _short(round(seconds * 1e3, 3))


def _short(figure: float) -> str:
    return f"{figure:.3g}" if abs(figure) < 100 else f"{figure:.0f}"
