"""The causes of bubbles: what each costs by the figures of a document, and the way out that fits the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Document = Mapping[str, Any]
PARTED = 0.03
"""Predicted and measured imbalance agree unless they differ by more than this."""
_EXCEEDS = 1.03
"""A gain so much above what the share alone would bring comes of waits that go with the cause."""
_WORTH_NAMING = 0.2
"""What is less than this share of the largest section or cause is not named beside it."""
_FALLS_SHORT = 0.95
"""A gain so much below what the share would bring is all that compute can hide."""
_BESIDE = 0.05
"""An exchange hidden for less than this share of the wait for it moves its bytes while everybody waits."""
_HOW = {
    "data loading": "#the-loader-is-late",
    "imbalance of data": "#histories-differ",
    "slow hardware": "#a-rank-is-slow",
    "uneven compute": "#compute-is-uneven",
    "embedding exchange": "#rows-are-waited-for",
    "dense communication": "#other-exchanges-are-waited-for",
    "other communication": "#other-exchanges-are-waited-for",
    "host overhead": "#the-host-is-busy",
    "padding": "#batches-are-padded",
    "idle device": "#the-gpu-waits-for-the-host",
}
"""Where in docs/how_to/read_the_report.md the way out stands."""

_SENT_LESS = {
    "dense gradients": (
        "accumulate_grad_batches= sends gradients less often; a larger batch hides more; item tables belong into TorchRec"
    ),
    "buffers": "DDPStrategy(broadcast_buffers=False), if no rank changes them differently",
    "dense communication": (
        "Sharded weights are gathered in each step: prefetch them, shard over fewer ranks, or train under 'ddp' if they fit"
    ),
    "other communication": (
        "BubbleProfiler(torch_profiler_steps=3) shows who calls it; self.log(sync_dist=True) and metrics are all_reduces, "
        "fewer with on_step=False"
    ),
}
"""By exchange, or else by cause."""
_RUNS_THERE = {
    "loop, before the batch": "callbacks behind the profiler, loggers and progress bars",
    "hooks before forward": "on_train_batch_start and on_before_batch_transfer, of the model and of callbacks",
    "between forward and backward": "what follows the loss: on_before_zero_grad, on_before_backward",
    "between backward and optimizer": "on_after_backward, gradient clipping, on_before_optimizer_step",
    "between optimizers": "the hooks between the optimizers' steps",
    "hooks after the step": "on_train_batch_end, of the model and of callbacks, learning rate schedulers, and logging",
}
"""By section of host overhead."""

_LESS_PADDING = {
    "fixed": "A collate_fn that pads to the longest sample of the batch computes less padding",
    "batch": (
        "BalanceOptions(padding='auto') plans for batches that are padded to their longest sample; leave out balance=False, "
        "batch_tokens=, keep_together= and assignment_mode='zigzag'"
    ),
    "batch, planned": "pads each micro-batch by itself; jagged attention computes no padding",
}
"""By how batches are padded."""


class BubbleVerdict(NamedTuple):
    """The largest cause of bubbles.

    Attributes:
        cause: ``"data loading"``, ``"imbalance of data"``, ``"slow hardware"``, ``"uneven compute"`` (of unknown cause),
            ``"embedding exchange"``, ``"dense communication"``, ``"other communication"``, ``"host overhead"``,
            ``"padding"``, ``"idle device"`` (in compute), ``"waiting for peers"`` (not divided), or ``"nothing"`` that would
            be worth doing.
        speed_up: what the run would gain without it, by the replay; None if it was not replayed.
        verdict: the cause, and what it costs, in a sentence.
        why: the figures that say so.
        next: what to set, or read.
        also: the second largest cause and its way out, if that is worth doing, too.
    """

    cause: str
    speed_up: float | None
    verdict: str
    why: str
    next: str
    also: str | None = None


def shares_of(document: Document) -> Mapping[str, float]:
    """Return the shares of the steps that were replayed, so that they and what-ifs are of the same; of all where none were."""
    return (document.get("replay") or document["summary"])["shares"]


def steps_of(document: Document) -> str | None:
    """Return which steps were replayed, if these are not all of the report."""
    replay, status = document.get("replay"), document["status"]
    if replay is None or replay["steps"] == status["steps"]:
        return None
    first, last = replay["first_step"], replay["last_step"]
    some = "" if last - first + 1 == replay["steps"] else f"{replay['steps']} of "
    return f"{some}steps {first} to {last}"


def _data(document: Document, gain: float) -> BubbleVerdict:
    share, step = shares_of(document)["data_wait"], _step_seconds(document)
    most = max(document["ranks"], key=lambda rank: rank["shares"]["data_wait"])
    uneven = most["shares"]["data_wait"] > 2 * document["summary"]["shares"]["data_wait"]
    where = f", most of it on rank {most['rank']}" if uneven else ""
    why = f"A rank waits {_ms(share * step)} ms of a step of {_ms(step)} ms for its batch{where}."
    workers = document["run"].get("num_workers")
    advice = "num_workers=2 or more (of FreeScaleDataModule or DataLoader) makes batches beside compute"
    if workers:
        advice = f"More workers than num_workers={workers}, where there are cores for them"
    return _verdict(
        document, "data loading", gain, "Data wait", share, why, f"{advice}; or less work in __getitem__ and collate_fn"
    )


def _balance(document: Document, gain: float) -> BubbleVerdict:
    split, share = document["imbalance"] or {}, shares_of(document)["straggler_wait"]
    what = "Straggler wait"
    parts = {cause: split.get(f"{cause}_s") or 0.0 for cause in ("data", "hardware", "jitter")}
    differ = f"Of {_ms(sum(parts.values()))} ms by which the slowest rank computes longer than the mean one"
    by_costs = split.get("method") == "cost model"
    largest = max(parts, key=parts.__getitem__)
    slow = {int(rank): times for rank, times in (split.get("slow_ranks") or {}).items()}
    if largest == "hardware" and parts["hardware"] > 0 and not slow:  # none clearly, but always the same ones
        slow = dict([max(((rank["rank"], rank["score"]) for rank in document["ranks"]), key=lambda one: one[1])])
    explained = "what its samples explain" if by_costs else "as long as the others"
    named = ", ".join(f"rank {rank} takes {times:.2f} times" for rank, times in slow.items()) + f" {explained}"
    relief = f"See what else runs on that device; {_to_relieve(document['run'])} gives it less work"
    if by_costs and largest == "data":
        why = f"{differ}, {_ms(parts['data'])} come from the samples: the histories that ranks draw differ."
        if not slow:
            return _verdict(
                document, "imbalance of data", gain, what, share, why, _to_balance(document), "caused by unequal histories"
            )
        alone = next((case["speed_up"] for case in document["what_if"] if case["name"] == "equal histories"), None)
        why += f" And {named}."
        why += f" Equal histories alone would make the run {alone:.2f}x as fast." if alone is not None else ""
        advice, detail = f"{_to_balance(document)}. {relief}", "caused by unequal histories and slow ranks"
        return _verdict(document, "imbalance of data", gain, what, share, why, advice, detail)
    if largest == "hardware" and slow:
        advice = relief
        if not by_costs:
            advice = f"BubbleProfiler(lengths_fn=...) tells whether it draws longer histories. If not: {advice}"
        why = f"{named[:1].upper()}{named[1:]}."
        if by_costs and parts["data"] > _WORTH_NAMING * parts["hardware"]:
            why += f" {differ}, {_ms(parts['data'])} come from unequal histories."
        return _verdict(document, "slow hardware", gain, what, share, why, advice, "caused by slow ranks")
    why = "The ranks' compute differs from step to step; nobody told the profiler what they work on."
    advice = "BubbleProfiler(lengths_fn=...), or FreeScaleDataModule(train_set, lengths=...), tells whether histories do it"
    if by_costs:
        why = f"{differ}, {_ms(parts['jitter'])} are explained neither by samples nor by ranks."
        advice = "Look for other work on the machine, or for compute that does not depend on the history's length"
        if (document["summary"].get("padding") or {}).get("kind") == "batch":
            advice = _LESS_PADDING["batch"]
    return _verdict(document, "uneven compute", gain, what, share, why, advice, "caused by uneven compute")


def _to_balance(document: Document) -> str:
    plan = document["run"].get("assignment")
    if plan is None:
        return (
            "FreeScaleDataModule(train_set, lengths=..., collate_fn=...) in the place of your DataLoader assigns samples so "
            "that ranks finish together"
        )
    if plan == "as drawn":
        return "Take out balance=False: FreeScaleDataModule then assigns samples so that ranks finish together"
    predicted = document["summary"].get("predicted_imbalance")
    if predicted is not None and predicted < document["summary"]["compute_imbalance"] - PARTED:
        return "freescale balance fit makes a cost model of this run's report.json: the plan predicted less imbalance"
    if plan == "fixed":
        return (
            "BalanceOptions(assignment_mode='slack') lets ranks hold unequal numbers; the advice printed after epoch 0 has more"
        )
    return "The advice printed after the first epoch says what would help: larger batches, or truncated histories"


def _to_relieve(run: Document) -> str:
    """What takes work off a slow rank, as this run would have to write it; only our strategy calibrates."""
    there = "" if run.get("assignment") else "train_set, lengths=..., "
    module = f"FreeScaleDataModule({there}balance=BalanceOptions(calibrate=True, slow_ranks='rebalance'))"
    return module if run["strategy"] == "freescale" else f"Trainer(strategy='freescale') with {module}"


def _overlap(document: Document, gain: float) -> BubbleVerdict:
    run, exchanges = document["run"], document["exchanges"]
    share = shares_of(document)["transfer"]
    exposed = max(exchanges, key=lambda exchange: exchange["transfer_s"])
    name, moved = exposed["name"], exposed["moved_bytes"] or 0
    behind = sum(exchange["moved_bytes"] or 0 for exchange in exchanges if exchange["name"].endswith("(background)"))
    detail = f"most of it of {name}"
    why = f"A rank waits {_ms(exposed['transfer_s'])} ms of a step for {name} that nothing hides"
    if moved:
        alone = exposed["hidden_s"] < _BESIDE * exposed["transfer_s"]
        fast = f", at {_short(moved / 1e6 / exposed['transfer_s'])} MB/s" if alone else ""
        why += f": {_short(moved / 1e6)} MB{fast}"
    if gain < _FALLS_SHORT / (1 - share):
        why += "; there is too little compute to hide all of it"
    carries = _carried_by(name, run)
    if carries == "dense communication" and behind > moved and run.get("overlap") == "on":
        # they share a link, and the last ones wait there for all the others
        why += f", behind {_short(behind / 1e6)} MB of the embedding exchange on the same link"
    elif carries != "embedding exchange":
        return _verdict(
            document, carries, gain, "Transfer", share, f"{why}.", _SENT_LESS.get(name, _SENT_LESS[carries]), detail
        )
    return _verdict(document, "embedding exchange", gain, "Transfer", share, f"{why}.", _to_overlap(run), detail)


def _to_overlap(run: Document) -> str:
    if run["strategy"] != "freescale":
        return "Trainer(strategy='freescale') exchanges rows while the model computes"
    if run.get("overlap") == "off":
        return "Take out overlap=False, or exchange='torchrec': FreeScaleStrategy then exchanges rows while the model computes"
    if run.get("overlap") == "on":
        return (
            "Overlap is on, and compute too short for it: FreeScaleStrategy(target_bubble_reduction=0.9) finds out whether "
            "micro-batches or a split backward hide more"
        )
    return "The notice at the beginning of the fit says why this exchange is not overlapped, and the way out"


def _carried_by(name: str, run: Document) -> str:
    """Return the cause of an exchange, by its name."""
    of_shards = name.startswith(("all_gather", "reduce_scatter")) and not name.endswith("object")
    if name.startswith(("embedding rows", "embedding exchange")):
        return "embedding exchange"
    # TorchRec's own exchanges have torch's names; where ours take their place, such a name is of the user's code
    sharded = run.get("overlap") in ("off", "impossible")
    unknown = run.get("overlap") is None and run.get("sharded_tables") is not False
    if (name.startswith("all_to_all") and (sharded or unknown)) or (of_shards and sharded):
        return "embedding exchange"
    weights = of_shards and any(kind in run["strategy"].lower() for kind in ("fsdp", "deepspeed", "modelparallel"))
    return "dense communication" if weights or name in ("dense gradients", "buffers") else "other communication"


def _host(document: Document, gain: float) -> BubbleVerdict:
    shares = shares_of(document)
    share = shares["host_overhead"] + shares["unexplained"]
    sections = sorted(document["host_s"].items(), key=lambda item: -item[1])[:2]
    named = [f"{_ms(seconds)} ms in {name}" for name, seconds in sections if seconds >= _WORTH_NAMING * sections[0][1]]
    why = f"A rank spends {_ms(share * _step_seconds(document))} ms of a step outside forward, backward and optimizer"
    largest = sections[0][0] if sections else ""
    advice = f"Less work in {_RUNS_THERE.get(largest, 'hooks and callbacks')}"
    if largest in ("hooks after the step", "loop, before the batch"):
        advice += "; a larger log_every_n_steps"
    if document["run"]["strategy"] == "a plain loop":
        advice = "Less work between the spans, or further spans that show what it is"
    else:
        advice += "; BubbleProfiler(torch_profiler_steps=3) shows the calls"
    why = ": ".join([why, *[", ".join(named)][: bool(named)]]) + "."
    if shares["unexplained"] > _EXCEEDS - 1 and not document["summary"]["shares"]["data_wait"]:
        why += " No wait for data was stamped: it may be part of that."
        advice = f"Iterate over batches_on(timeline, loader), which stamps waits for data. {advice}"
    return _verdict(
        document,
        "host overhead",
        gain,
        "Host overhead",
        share,
        why,
        advice,
    )


def _padding(document: Document, gain: float) -> BubbleVerdict:
    padding, advice = document["summary"]["padding"], _LESS_PADDING[document["summary"]["padding"]["kind"]]
    if padding["kind"] == "batch, planned":
        # 'auto' is settled to 1 where an exchange is not overlapped
        parts = "'auto'" if document["run"].get("overlap") in ("on", None) else "2"
        advice = f"FreeScaleDataModule(micro_batches={parts}) {advice}"
    share = padding["tokens"] * shares_of(document)["compute"]
    what = f"Padding: {padding['tokens']:.0%} of the computed tokens"
    why = "The gain is predicted: compute is taken to be proportional to the computed tokens."
    return _verdict(document, "padding", gain, what, share, why, advice)


def idle_in_compute(document: Document) -> float:
    """Return the share of the time in which the devices ran nothing beyond what bubbles explain; 0 if that is unknown.

    The host that launches kernels is slower under torch.profiler, so this is an upper bound.
    """
    seen = [share for share in (document["device_idle"] or {"idle": []})["idle"] if share is not None]
    return max(0.0, sum(seen) / len(seen) - (1 - shares_of(document)["compute"])) if seen else 0.0


def _idle_device(document: Document, gain: float) -> BubbleVerdict:
    seen, share = document["device_idle"], idle_in_compute(document)
    return BubbleVerdict(
        "idle device",
        gain,
        f"Idle device, {share:.1%} of the time: the host launches kernels more slowly than the device runs them. Without it "
        f"the run would be at most {gain:.2f}x as fast.",
        f"In {seen['steps']} steps under torch.profiler, which slows the host down, the device ran nothing for {share:.1%} of "
        "the time beyond the bubbles.",
        "Fewer and larger kernels: a larger batch, operations on the whole batch instead of a loop over samples, or "
        f"torch.compile (docs/how_to/read_the_report.md{_HOW['idle device']}).",
    )


VERDICTS: Mapping[str, Callable[[Document, float], BubbleVerdict]] = {
    "no data wait": _data,
    "perfect balance": _balance,
    "full overlap": _overlap,
    "no host overhead": _host,
    "no padding": _padding,
    "no idle device": _idle_device,
}
"""By what was replayed, or seen by torch.profiler."""


def _verdict(
    document: Document, cause: str, gain: float, what: str, share: float, why: str, advice: str, detail: str = ""
) -> BubbleVerdict:
    if gain > _EXCEEDS / (1 - share) and document["run"]["world_size"] > 1:
        why += " It also makes other ranks wait, and those waits would go with it."
    steps = steps_of(document)
    named = f"{what}, {share:.1%} of the time{f' in {steps}' if steps else ''}{', ' if detail else ''}{detail}"
    faster = f"without it {'they' if steps else 'the run'} would be {gain:.2f}x as fast."
    return BubbleVerdict(cause, gain, f"{named}: {faster}", why, f"{advice} (docs/how_to/read_the_report.md{_HOW[cause]}).")


def _step_seconds(document: Document) -> float:
    return (document.get("replay") or document["summary"])["step_s"]


def _ms(seconds: float) -> str:
    return _short(seconds * 1e3)


def _short(figure: float) -> str:
    return f"{figure:.3g}" if abs(figure) < 100 else f"{figure:.0f}"
