"""Report documents that look like those of real runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES, column
from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.reporting.document import ExchangeFigures, Overhead, Status, WaitAttribution
from lightning_freescale.profiling.reporting.verdict import verdict_on
from tests.helpers.reports import report_of, run_info

CLOCK = {"round_trip_s": 137e-6, "syncs": 3, "rejected": 12, "drift": 1e-7}
HOST = {"hooks after the step": 0.0012, "hooks before forward": 0.0004, "between backward and optimizer": 0.0009}
REASON = "the ranks' clocks agreed only within 3.00 ms"
HOSTILE = (
    "</script><script>window.hacked = 1</script><!--<script>"
    '<img src="http://127.0.0.1:9/x" onerror="window.hacked = 1">$style\u2028\'"&amp;\\'
)


def document(
    ranks: int = 2, steps: int = 40, pace: float = 1.0, spread: float = 0.35, divided: bool = True, **changes: Any
) -> dict[str, Any]:
    """A report of a run whose ranks draw lognormal work; rank 3, where there is one, is slow.

    ``pace`` stretches all times but compute, ``spread`` is that of the work; not ``divided``, waits are of one kind. A change
    that is a dict is merged into the entry of that name, any other takes its place.
    """
    parts = _parts(ranks, steps, pace, spread)
    median = {"step": 5 + steps // 2, "ranks": _intervals(parts[steps // 2], divided)}
    if not divided:
        straggler_wait, transfer, wait = (PART_NAMES.index(name) for name in ("straggler_wait", "transfer", "wait"))
        parts[..., wait] = parts[..., straggler_wait] + parts[..., transfer]
        parts[..., [straggler_wait, transfer]] = 0
    seconds = parts / 1e6
    compute = column(seconds, "compute")
    excess = float((compute.max(axis=1) - compute.mean(axis=1)).mean())
    late = tuple(int(n) for n in np.bincount(compute.argmax(axis=1), minlength=ranks)) if ranks > 1 else (0,)
    waited = float((column(seconds, "transfer") + column(seconds, "wait")).mean())
    limit = float(seconds[..., 0].sum() / compute.sum())
    gains = {"perfect balance": 0.6, "full overlap": 0.25, "balance + overlap": 0.9, "no data wait": 0.05}
    exchanges = (
        ("ids of user_history", 1.0, 0.1 * waited, 65_536),
        ("rows of user_history", 1.0, 0.5 * waited, 3_400_000),
        ("dense gradients", 2.5, 0.4 * waited, None),
    )
    scores = tuple(1.3 if rank == 3 else 1.0 + 0.01 * (rank % 3) for rank in range(ranks))
    report = report_of(
        seconds,
        np.full((steps, ranks), 32),
        run=run_info(model="HSTURecommender", parameters=1_234_567, world_size=ranks),
        status=Status(warmup=5),
        wait_attribution=WaitAttribution(divided, 12e-6, None if divided else REASON, CLOCK),
        overhead=Overhead(8e-5, 3e-5),
        imbalance=Imbalance(
            "cost model", 0.7 * excess, 0.2 * excess, 0.1 * excess, scores, {3: 1.3} if ranks > 3 else {}, 0.031
        ),
        what_if=[WhatIf(name, 1 + (limit - 1) * share, limit) for name, share in gains.items()],
        exchanges=[
            ExchangeFigures(name, count, 1.5 * s, s, 0.8 * s, moved, late)
            if divided
            else ExchangeFigures(name, count, 0.0, 0.0, 0.8 * s, moved, late, 2.5 * s)
            for name, count, s, moved in exchanges
        ],
        host=HOST,
        device_idle={"steps": 3, "idle": [0.3] * ranks, "compute": [0.6] * ranks, "other": [0.1] * ranks},
        median_step=median,
    )
    made = {**report.document(), "replay": None}  # so that changes of the summary are those of the verdict
    for name, change in changes.items():
        merge = isinstance(change, dict) and isinstance(made[name], dict)
        made[name] = {**made[name], **change} if merge else change
    return {**made, "verdict": verdict_on(made)._asdict()}


def bare(ranks: int = 1, steps: int = 1, **changes: Any) -> dict[str, Any]:
    """Null or empty wherever a report may be."""
    made = document(ranks, steps, imbalance=None, device_idle=None, median_step=None, what_if=[], exchanges=[])
    made["host_s"] = {}
    made["summary"].update(samples=0, samples_per_s=None, overlap_efficiency=None)
    made["wait_attribution"].update(reason=None, clock=None)
    for rank in made["ranks"]:
        rank["score"] = None
    made["series"]["samples"] = [[0] * ranks] * steps
    return {**made, **changes}


def hostile() -> dict[str, Any]:
    """Text that is markup, wherever a report has text that it did not write itself."""
    made = document(2, 6, run=dict.fromkeys(("label", "model", "strategy", "device", "started"), HOSTILE))
    made["run"]["versions"] = {HOSTILE: HOSTILE}
    made["status"].update(complete=False, reason=HOSTILE)
    made["what_if"][0].update(name=HOSTILE, note=HOSTILE)
    made["exchanges"][0]["name"] = HOSTILE
    made["host_s"] = {HOSTILE: 0.001}
    made["wait_attribution"].update(aligned=False, reason=HOSTILE)
    made["imbalance"].update(method=HOSTILE, slow_ranks={HOSTILE: 1.2})
    for rank in made["median_step"]["ranks"]:
        for interval in rank:
            interval[1] = HOSTILE
    return made


def _parts(ranks: int, steps: int, pace: float, spread: float) -> np.ndarray:
    """Whole microseconds, shape ``[steps, ranks, len(PART_NAMES)]``."""
    random = np.random.default_rng(ranks * 10_000 + steps)
    shape, several = (steps, ranks), ranks > 1
    compute = 60_000 * random.lognormal(0, spread, shape) * np.where(np.arange(ranks) == 3, 1.3, 1.0)
    values = {name: compute * share for name, share in (("forward", 0.38), ("backward", 0.54), ("optimizer", 0.08))}
    values |= {"data_wait": pace * random.gamma(2, 900, shape), "host_overhead": pace * random.gamma(30, 90, shape)}
    values |= {"transfer": pace * several * random.gamma(20, 550, (steps, 1)) * np.ones((1, ranks)), "wait": np.zeros(shape)}
    values["unexplained"] = pace * random.gamma(2, 150, shape)
    whole = {name: value.astype(np.int64) for name, value in values.items()}
    busy = sum(whole.values())
    whole["straggler_wait"] = busy.max(axis=1, keepdims=True) - busy
    whole["wall"], whole["hidden"] = busy + whole["straggler_wait"], (whole["backward"] * 0.3 * several).astype(np.int64)
    return np.stack([whole[name] for name in PART_NAMES], axis=-1)


def _intervals(step: np.ndarray, divided: bool) -> list[list[list[Any]]]:
    """Each rank's step in order: gradients are exchanged at the end of the backward."""
    of_ranks = [dict(zip(PART_NAMES, rank)) for rank in step.tolist()]
    meets = max(r["data_wait"] + r["host_overhead"] + r["forward"] + r["backward"] for r in of_ranks)
    lists = []
    for r in of_ranks:
        cuts = [
            ("data", "batch", r["data_wait"]),
            ("host", "hooks before forward", r["host_overhead"]),
            ("forward", "", r["forward"]),
        ]
        cuts.append(("backward", "", r["backward"]))
        waited = meets - sum(length for *_, length in cuts)
        cuts += [("straggler_wait", "dense gradients", waited), ("transfer", "dense gradients", r["transfer"])]
        cuts += [("optimizer", "Adam", r["optimizer"])]
        now, intervals = 0, []
        for kind, name, length in cuts:
            if length:
                waits = kind in ("straggler_wait", "transfer") and not divided
                intervals.append(["wait" if waits else kind, name, now / 1e6, (now + length) / 1e6])
            now += length
        lists.append(intervals)
    return lists
