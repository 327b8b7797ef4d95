"""What a bubble report comes to: the cause that costs most, why it is that one, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

WORTH_DOING = 1.03
"""What removing a cause must bring for anybody to bother."""
PARTED = 0.03
"""Predicted and measured imbalance agree unless they differ by more than this."""
_REPLAYED = {"no data wait": "data", "perfect balance": "balance", "full overlap": "overlap", "no host overhead": "host"}
_HOW = {
    "data loading": "docs/data.md",
    "imbalance of data": "docs/balance.md",
    "slow hardware": "docs/balance.md",
    "uneven compute": "docs/how_to/read_the_report.md",
    "embedding exchange": "docs/overlap.md",
    "dense communication": "docs/how_to/read_the_report.md",
    "other communication": "docs/how_to/read_the_report.md",
    "host overhead": "docs/how_to/read_the_report.md",
    "waiting for peers": "docs/report.md#waits-that-are-not-divided",
}

_SENT_LESS = {
    "dense gradients": (
        "accumulate_grad_batches= sends gradients less often; a larger batch hides more; item tables belong into TorchRec"
    ),
    "buffers": "DDPStrategy(broadcast_buffers=False), if no rank changes them differently",
    "dense communication": (
        "sharded weights are gathered in each step: prefetch them, shard over fewer ranks, or train under 'ddp' if they fit"
    ),
    "other communication": (
        "BubbleProfiler(torch_profiler_steps=3) shows who calls it; self.log(sync_dist=True) and metrics are all_reduces, "
        "fewer with on_step=False"
    ),
}
"""By exchange, or else by cause."""


class BubbleVerdict(NamedTuple):
    """The largest cause of bubbles.

    Attributes:
        cause: ``"data loading"``, ``"imbalance of data"``, ``"slow hardware"``, ``"uneven compute"`` (of unknown cause),
            ``"embedding exchange"``, ``"dense communication"``, ``"other communication"``, ``"host overhead"``,
            ``"waiting for peers"`` (not divided), or ``"nothing"`` that would be worth doing.
        speed_up: what the run would gain without it, by the replay; None if it was not replayed.
        verdict: the cause, and what it costs, in a sentence.
        why: the figures that say so.
        next: what to set, or read.
    """

    cause: str
    speed_up: float | None
    verdict: str
    why: str
    next: str


def verdict_on(document: Mapping[str, Any]) -> BubbleVerdict:
    """Return the verdict on a document; its series are not needed."""
    gains = {_REPLAYED[case["name"]]: case["speed_up"] for case in document["what_if"] if case["name"] in _REPLAYED}
    known = {name: gain for name, gain in gains.items() if gain is not None}
    shares = document["summary"]["shares"]
    if shares["wait"] > max(1 - 1 / WORTH_DOING, shares["data_wait"], shares["host_overhead"]):
        return _undivided(document)
    name = max(known, key=known.__getitem__, default="nothing")
    if not known and shares["compute"] < 1 / WORTH_DOING and document["run"]["world_size"] > 1:
        return _not_replayed(document)
    if not known or known[name] < WORTH_DOING:
        return _nothing(document, known)
    return {"data": _data, "balance": _balance, "overlap": _overlap, "host": _host}[name](document, known[name])


def verdict_line(document: Mapping[str, Any]) -> str:
    """Return the verdict in one line of a log; what ended a run before its time comes first."""
    status, verdict = document["status"], document["verdict"]
    ended = "" if status["complete"] else f"INCOMPLETE: {status['reason']} "
    return f"{ended}Verdict: {verdict['verdict']} Why: {verdict['why']} Next: {verdict['next']}"


def _nothing(document: Mapping[str, Any], gains: Mapping[str, float]) -> BubbleVerdict:
    bubble = document["summary"]["bubble"]
    best = max(gains.values(), default=1.0)
    why = (
        f"{1 - bubble:.1%} of the ranks' time is compute, and without its largest cause of waiting the run would be {best:.2f}x"
    )
    return BubbleVerdict(
        "nothing",
        best if gains else None,
        f"Nothing worth doing: at most {best:.2f}x to gain from any one cause.",
        f"{why} as fast.",
        "A faster device, a smaller model, or more samples per rank.",
    )


def _not_replayed(document: Mapping[str, Any]) -> BubbleVerdict:
    shares = document["summary"]["shares"]
    part = max(("data_wait", "straggler_wait", "transfer", "host_overhead", "unexplained"), key=shares.__getitem__)
    return BubbleVerdict(
        part.replace("_", " "),
        None,
        f"{part.replace('_', ' ').capitalize()}, {shares[part]:.1%} of the time, is the largest part that is not compute.",
        "The steps were not replayed, so what removing it would bring is not known: the run had not come to its end, or its "
        "ranks waited for each other in different orders.",
        "See docs/how_to/read_the_report.md.",
    )


def _data(document: Mapping[str, Any], gain: float) -> BubbleVerdict:
    ranks, step = document["ranks"], document["summary"]["step_s"]
    share = document["summary"]["shares"]["data_wait"]
    most = max(ranks, key=lambda rank: rank["shares"]["data_wait"])
    alone = most["shares"]["data_wait"] > 2 * share
    where = f", most of it on rank {most['rank']}" if alone else ""
    return _verdict(
        "data loading",
        gain,
        f"Data wait, {share:.1%} of the time",
        f"A rank waits {_ms(share * step)} ms of a step of {_ms(step)} ms for its batch{where}.",
        "num_workers=2 or more (of FreeScaleDataModule or DataLoader) makes batches beside compute; or less work in "
        "__getitem__ and collate_fn",
    )


def _balance(document: Mapping[str, Any], gain: float) -> BubbleVerdict:
    summary, split = document["summary"], document["imbalance"] or {}
    what = f"Straggler wait, {summary['shares']['straggler_wait']:.1%} of the time"
    parts = {cause: split.get(f"{cause}_s") or 0.0 for cause in ("data", "hardware", "jitter")}
    differ = f"Of {_ms(sum(parts.values()))} ms by which the slowest rank computes longer than the mean one"
    slow = split.get("slow_ranks") or {}
    largest = max(parts, key=parts.__getitem__)
    if split.get("method") == "cost model" and largest == "data":
        why = f"{differ}, {_ms(parts['data'])} come from the samples: the histories that ranks draw differ."
        return _verdict("imbalance of data", gain, f"{what}, caused by unequal histories", why, _to_balance(document))
    if slow and largest == "hardware":
        named = ", ".join(f"rank {rank} takes {times:.2f} times" for rank, times in slow.items())
        than = "what its samples explain" if split["method"] == "cost model" else "as long as the others"
        advice = "see what else runs on that device; BalanceOptions(calibrate=True, slow_ranks='rebalance') gives it less work"
        if split["method"] != "cost model":
            advice = f"BubbleProfiler(lengths_fn=...) tells whether it draws longer histories; if not, {advice}"
        return _verdict("slow hardware", gain, f"{what}, caused by slow ranks", f"{named} {than}.", advice)
    if split.get("method") == "cost model":
        why = f"{differ}, {_ms(parts['jitter'])} are explained neither by samples nor by ranks."
        advice = "look for other work on the machine, or for compute that does not depend on the history's length"
    else:
        why = "The ranks' compute differs from step to step; nobody told the profiler what they work on."
        advice = "BubbleProfiler(lengths_fn=...), or FreeScaleDataModule(train_set, lengths=...), tells whether histories do it"
    return _verdict("uneven compute", gain, f"{what}, caused by uneven compute", why, advice)


def _to_balance(document: Mapping[str, Any]) -> str:
    plan = document["run"].get("assignment")
    if plan is None:
        return "FreeScaleDataModule(train_set, lengths=...) assigns samples so that ranks finish together"
    if plan == "as drawn":
        return "FreeScaleDataModule(balance=True)"
    predicted = document["summary"].get("predicted_imbalance")
    if predicted is not None and predicted < document["summary"]["compute_imbalance"] - PARTED:
        return "freescale balance fit makes a cost model of this run's report.json: the plan predicted less imbalance"
    if plan == "fixed":
        return (
            "BalanceOptions(assignment_mode='slack') lets ranks hold unequal numbers; the advice printed after epoch 0 has more"
        )
    return "the advice printed after the first epoch says what would help: larger batches, or truncated histories"


def _overlap(document: Mapping[str, Any], gain: float) -> BubbleVerdict:
    summary, exchanges = document["summary"], document["exchanges"]
    exposed = max(exchanges, key=lambda exchange: exchange["transfer_s"])
    name, moved = exposed["name"], exposed["moved_bytes"] or 0
    behind = sum(exchange["moved_bytes"] or 0 for exchange in exchanges if exchange["name"].endswith("(background)"))
    what = f"Transfer, {summary['shares']['transfer']:.1%} of the time, most of it of {name}"
    size = f" for {moved / 1e6:.3g} MB" if moved else ""
    why = f"A rank waits {_ms(exposed['transfer_s'])} ms of a step for {name} that nothing hides{size}"
    carries = _carried_by(name, document["run"])
    if carries == "dense communication" and behind > moved and document["run"].get("overlap") == "on":
        # they share a link, and the last ones wait there for all the others
        why += f", behind {behind / 1e6:.3g} MB of the embedding exchange on the same link"
    elif carries != "embedding exchange":
        return _verdict(carries, gain, what, f"{why}.", _SENT_LESS.get(name, _SENT_LESS[carries]))
    if document["run"]["strategy"] != "freescale":
        advice = "Trainer(strategy='freescale') exchanges rows while the model computes"
    elif document["run"].get("overlap") == "off":
        advice = "FreeScaleStrategy(overlap=True), the default, exchanges rows while the model computes"
    elif document["run"].get("overlap") == "on":
        advice = "FreeScaleStrategy(target_bubble_reduction=0.9) finds out whether micro-batches or a split backward hide more"
    else:
        advice = "the notice at the beginning of the fit says why this exchange is not overlapped, and the way out"
    return _verdict("embedding exchange", gain, what, f"{why}.", advice)


def _carried_by(name: str, run: Mapping[str, Any]) -> str:
    """Return the cause of an exchange, by its name."""
    of_shards = name.startswith(("all_gather", "reduce_scatter")) and not name.endswith("object")
    sharded = run.get("overlap") is not None  # TorchRec's tables, those for bags by reduce_scatter
    if name == "embedding rows" or name.startswith("all_to_all") or (sharded and of_shards):
        return "embedding exchange"
    weights = of_shards and any(kind in run["strategy"].lower() for kind in ("fsdp", "deepspeed", "modelparallel"))
    return "dense communication" if weights or name in ("dense gradients", "buffers") else "other communication"


def _host(document: Mapping[str, Any], gain: float) -> BubbleVerdict:
    summary = document["summary"]
    share = summary["shares"]["host_overhead"] + summary["shares"]["unexplained"]
    sections: Sequence[tuple[str, float]] = sorted(document["host_s"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{_ms(seconds)} ms in {name}" for name, seconds in sections[:2])
    return _verdict(
        "host overhead",
        gain,
        f"Host overhead, {share:.1%} of the time",
        f"A rank spends {_ms(share * summary['step_s'])} ms of a step between the model's work{': ' if named else ''}{named}.",
        "less in hooks and callbacks, a larger log_every_n_steps; BubbleProfiler(torch_profiler_steps=3) shows the calls",
    )


def _undivided(document: Mapping[str, Any]) -> BubbleVerdict:
    share = document["summary"]["shares"]["wait"]
    return BubbleVerdict(
        "waiting for peers",
        None,
        f"Waiting for peers, {share:.1%} of the time: for stragglers or for bytes, which could not be told apart.",
        f"{document['wait_attribution']['reason'][:1].upper()}{document['wait_attribution']['reason'][1:]}.",
        f"See {_HOW['waiting for peers']}.",
    )


def _verdict(cause: str, gain: float, what: str, why: str, advice: str) -> BubbleVerdict:
    return BubbleVerdict(
        cause, gain, f"{what}: without it the run would be {gain:.2f}x as fast.", why, f"{advice} ({_HOW[cause]})."
    )


def _ms(seconds: float) -> str:
    figure = seconds * 1e3
    return f"{figure:.3g}" if abs(figure) < 100 else f"{figure:.0f}"
