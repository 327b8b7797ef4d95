"""Report documents that look like those of real runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_freescale.profiling.reporting.verdict import verdict_on

PART_NAMES = (
    "wall",
    *("data_wait", "forward", "backward", "optimizer", "straggler_wait", "transfer", "wait"),
    *("host_overhead", "unexplained"),
    "hidden",
)
SHARES = (*PART_NAMES[1:], "compute")
COMPUTE = slice(2, 5)
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
    made = _made(parts if divided else _undivided(parts), ranks, steps)
    if not divided:
        made["wait_attribution"].update(aligned=False, reason=REASON)
        made["summary"]["overlap_efficiency"] = None
        for exchange in made["exchanges"]:
            exchange.update(wait_s=exchange["straggler_wait_s"] + exchange["transfer_s"], straggler_wait_s=0.0, transfer_s=0.0)
        for rank in (made["median_step"] or {"ranks": []})["ranks"]:
            for interval in rank:
                interval[0] = "wait" if interval[0] in ("straggler_wait", "transfer") else interval[0]
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


def _undivided(parts: np.ndarray) -> np.ndarray:
    straggler_wait, transfer, wait = (PART_NAMES.index(name) for name in ("straggler_wait", "transfer", "wait"))
    made = parts.copy()
    made[..., wait] = parts[..., straggler_wait] + parts[..., transfer]
    made[..., [straggler_wait, transfer]] = 0
    return made


def _parts(ranks: int, steps: int, pace: float, spread: float) -> np.ndarray:
    """Whole microseconds, shape ``[steps, ranks, len(PART_NAMES)]``."""
    random = np.random.default_rng(ranks * 10_000 + steps)
    compute = 60_000 * random.lognormal(0, spread, (steps, ranks))
    if ranks > 3:
        compute[:, 3] *= 1.3
    stages = np.stack([compute * share for share in (0.38, 0.54, 0.08)], axis=-1).astype(np.int64)
    lost = {
        "data_wait": random.gamma(2, 900, (steps, ranks)),
        "transfer": random.gamma(20, 550, (steps, 1)) * (ranks > 1) * np.ones((1, ranks)),
        "wait": np.zeros((steps, ranks)),
        "host_overhead": random.gamma(30, 90, (steps, ranks)),
        "unexplained": random.gamma(2, 150, (steps, ranks)),
    }
    lost = {name: (pace * values).astype(np.int64) for name, values in lost.items()}
    busy = stages.sum(axis=-1) + sum(lost.values())
    wait = busy.max(axis=1, keepdims=True) - busy
    hidden = (stages[..., 1] * 0.3 * (ranks > 1)).astype(np.int64)
    wall = np.broadcast_to(busy.max(axis=1, keepdims=True), busy.shape)
    columns = [wall, lost["data_wait"], *np.moveaxis(stages, -1, 0), wait, *(lost[n] for n in list(lost)[1:]), hidden]
    return np.stack(columns, axis=-1)


def shares_of(parts: np.ndarray) -> dict[str, float]:
    total = parts.reshape(-1, len(PART_NAMES)).sum(axis=0)
    if not total[0]:
        return dict.fromkeys(SHARES, 0.0)
    values = {name: float(part / total[0]) for name, part in zip(PART_NAMES[1:], total[1:])}
    return {**values, "compute": values["forward"] + values["backward"] + values["optimizer"]}


def _made(parts: np.ndarray, ranks: int, steps: int) -> dict[str, Any]:
    shares = shares_of(parts)
    exchanging = shares["transfer"] + shares["wait"]
    seconds = float(parts[..., 0].mean()) / 1e6 if steps else 0.0
    compute = parts[..., COMPUTE].sum(axis=-1)
    excess = float((compute.max(axis=1) - compute.mean(axis=1)).mean()) / 1e6 if steps else 0.0
    late = [int(n) for n in np.bincount(compute.argmax(axis=1), minlength=ranks)] if ranks > 1 else [0]
    bubble = 1 - shares["compute"] if steps else 0.0
    limit = 1 / (1 - bubble)
    samples = 32 * ranks * steps
    return {
        "format": "lightning_freescale.bubble_report",
        "version": 1,
        "run": {
            "label": "freescale",
            "model": "HSTURecommender",
            "parameters": 1_234_567,
            "strategy": "freescale",
            "world_size": ranks,
            "device": "cpu",
            "accumulate_grad_batches": 1,
            "started": "2026-11-21T08:00:00+00:00",
            "versions": {"lightning_freescale": "0.1.0", "torch": "2.13.0", "lightning": "2.6.6", "python": "3.11.7"},
        },
        "status": {"complete": True, "reason": None, "steps": steps, "first_step": 5, "warmup": 5, "not_exchanged": 0},
        "summary": {
            "bubble": bubble,
            "limit": limit,
            "step_s": seconds,
            "samples": samples,
            "samples_per_s": samples / (seconds * steps) if steps else None,
            "compute_imbalance": float(compute.max(axis=1).sum() / compute.mean(axis=1).sum()) if steps else 1.0,
            "overlap_efficiency": shares["hidden"] / (shares["hidden"] + shares["transfer"]) if ranks > 1 and steps else None,
            "shares": shares,
        },
        "ranks": [
            {
                "rank": rank,
                "step_s": float(parts[:, rank, 0].mean()) / 1e6 if steps else 0.0,
                "shares": shares_of(parts[:, rank]),
                "score": 1.3 if rank == 3 else 1.0 + 0.01 * (rank % 3),
                "last": late[rank],
            }
            for rank in range(ranks)
        ],
        "imbalance": {
            "method": "cost model",
            "data_s": 0.7 * excess,
            "hardware_s": 0.2 * excess,
            "jitter_s": 0.1 * excess,
            "slow_ranks": {"3": 1.3} if ranks > 3 else {},
            "residual": 0.031,
        },
        "what_if": [
            {"name": name, "speed_up": 1 + (limit - 1) * share, "limit": limit, "note": note}
            for name, share, note in (
                ("perfect balance", 0.6, None),
                ("full overlap", 0.25, None),
                ("balance + overlap", 0.9, None),
                ("no data wait", 0.05, None),
                ("no contention", 0.0, "not measured: compute was never seen without an exchange under way"),
            )
        ],
        "exchanges": [
            _exchange("ids of user_history", 1.0, exchanging * 0.1 * seconds, 65_536, late),
            _exchange("rows of user_history", 1.0, exchanging * 0.5 * seconds, 3_400_000, late),
            _exchange("dense gradients", 2.5, exchanging * 0.4 * seconds, None, late),
        ],
        "host_s": {"hooks after the step": 0.0012, "hooks before forward": 0.0004, "between backward and optimizer": 0.0009},
        "wait_attribution": {
            "aligned": True,
            "uncertainty_s": 12e-6,
            "reason": None,
            "clock": {"round_trip_s": 137e-6, "syncs": 3, "rejected": 12, "drift": 1e-7},
        },
        "overhead": {
            "total_s": 0.00011,
            "exchange_s": 0.00008,
            "stamps_s": 0.00003,
            "share": 0.00011 / seconds if seconds else 0.0,
        },
        "device_idle": {"steps": 3, "idle": [0.3] * ranks, "compute": [0.6] * ranks, "other": [0.1] * ranks},
        "median_step": {"step": 5 + steps // 2, "ranks": _intervals(parts[steps // 2])} if steps else None,
        "series": {
            "columns": list(PART_NAMES),
            "step": list(range(5, 5 + steps)),
            "breakdown_s": (parts / 1e6).tolist(),
            "samples": [[32] * ranks] * steps,
        },
    }


def _exchange(name: str, per_step: float, seconds: float, moved: int | None, late: list[int]) -> dict[str, Any]:
    return {
        "name": name,
        "per_step": per_step,
        "straggler_wait_s": 1.5 * seconds,
        "transfer_s": seconds,
        "wait_s": 0.0,
        "hidden_s": 0.8 * seconds,
        "moved_bytes": moved,
        "last": late,
    }


def _intervals(step: np.ndarray) -> list[list[list[Any]]]:
    """Each rank's step in order: rows are exchanged in the forward, gradients at the end of the backward."""
    step = [dict(zip(PART_NAMES, rank)) for rank in step.tolist()]
    before = [r["data_wait"] + r["host_overhead"] // 2 + r["forward"] // 4 for r in step]
    rows_at = max(before)
    rows_end = rows_at + step[0]["transfer"] // 2
    after = [rows_end + r["forward"] - r["forward"] // 4 + r["backward"] for r in step]
    gradients_at = max(after)
    gradients_end = gradients_at + step[0]["transfer"] - step[0]["transfer"] // 2
    lists = []
    for r in step:
        cuts = [
            ("data", "batch", r["data_wait"]),
            ("host", "hooks before forward", r["host_overhead"] // 2),
            ("forward", "", r["forward"] // 4),
            ("straggler_wait", "rows of user_history", rows_at),
            ("transfer", "rows of user_history", rows_end),
            ("forward", "", r["forward"] - r["forward"] // 4),
            ("backward", "", r["backward"]),
            ("straggler_wait", "dense gradients", gradients_at),
            ("transfer", "dense gradients", gradients_end),
            ("optimizer", "Adam", r["optimizer"]),
            ("host", "hooks after the step", r["host_overhead"] - r["host_overhead"] // 2),
        ]
        now, intervals = 0, []
        for kind, name, length in cuts:
            end = length if kind in ("straggler_wait", "transfer") else now + length
            if end > now:
                intervals.append([kind, name, now / 1e6, end / 1e6])
            now = end
        lists.append(intervals)
    return lists
