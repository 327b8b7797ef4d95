"""Reports whose every figure is known."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.recording.memory import MemoryWindows
from lightning_freescale.profiling.reporting.document import ExchangeFigures, Overhead, RunInfo, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport

VERSIONS = {"lightning_freescale": "0.1.0", "torch": "2.13.0"}
RUN = RunInfo("freescale", "HSTU", 123456, 2, "freescale", "cpu", 1, "2026-11-21T08:00:00+00:00", VERSIONS)


def run_info(**changes: Any) -> RunInfo:
    return RunInfo(**{**vars(RUN), **changes})


def step(wall: float, **parts: float) -> list[float]:
    """A row of parts; the rest of ``wall`` is unexplained."""
    named = sum(seconds for name, seconds in parts.items() if name != "hidden")
    values = {"wall": wall, "unexplained": wall - named, **parts}
    return [values.get(name, 0.0) for name in PART_NAMES]


def report_of(parts: NDArray[np.float64], samples: NDArray[np.int64] | None = None, **changes: Any) -> BubbleReport:
    """With nothing that may be left out."""
    steps, ranks, _ = parts.shape
    rest: dict[str, Any] = {
        "run": run_info(world_size=ranks),
        "wait_attribution": WaitAttribution(True, 5e-5),
        "overhead": Overhead(8e-5, 4e-5),
        **changes,
    }
    counts = np.zeros((steps, ranks), dtype=np.int64) if samples is None else samples
    return BubbleReport(parts, counts, np.arange(5, 5 + steps), **rest)


def growing_memory(ranks: int, windows: int = 12) -> MemoryWindows:
    """Every rank holds 300 MB, the last one 600, and 6 MB more after every window."""
    current = np.full((windows, ranks), 3e8)
    current[:, -1] = 6e8 + 6e6 * np.arange(windows)
    return MemoryWindows(range(50, 50 * windows + 50, 50), current, current + 1e8, current + 2e8)


HEAT = {"rows": 4675, "rows_of_half": 353, "rows_of_most": 12_345, "largest_load": 1.04, "colliding_share": 0.875}
HEAT |= {"sent_bytes": 11e6, "cross_node_bytes": 5e6, "hot_near_bytes": 1.5e6, "hot_far_bytes": 2e6, "hot_direct_bytes": 3e6}

TABLES = {"rows": 4001, "row_bytes": 256, "reduced_bytes": 0, "gradient_bytes": 0}
WORKLOAD = {"lengths": {"values": [1.5, 40.0, 200.0], "counts": [6, 90, 4]}, "tables": TABLES}
WORKLOAD |= {"collision_rate": 0.3, "lookups": 1000.0}


def run_of(label: str = "freescale", wall: float = 0.1, compute: float = 0.07, count: int = 64, **run: Any) -> BubbleReport:
    """Four steps of two ranks, all alike; ``count`` samples of both ranks."""
    parts = np.array([[step(wall, forward=compute)] * 2] * 4)
    samples = np.array([[count - count // 2, count // 2]] * 4)
    return report_of(parts, samples, run=run_info(label=label, **run))


def plan(fitted_steps: int = 0) -> dict[str, Any]:
    """As ``balance`` of the document."""
    compute = {"as_drawn": 1.4, "balanced": 1.1, "lower_bound": 1.05, "gap": 1.1 / 1.05 - 1}
    tokens = {"as_drawn": 1.3, "balanced": 1.02, "fullest": 0.973}
    return {"compute": compute, "tokens": tokens, "fitted_steps": fitted_steps}


def full_report(**changes: Any) -> BubbleReport:
    row = step(
        0.1, data_wait=0.01, forward=0.03, backward=0.03, optimizer=0.01, straggler_wait=0.005, transfer=0.01, hidden=0.02
    )
    parts = changes.pop("parts", np.array([[row, row]] * 3))
    ranks = parts.shape[1]
    intervals = [
        ["data", "fetch", 0.0, 0.01],
        ["forward", "", 0.01, 0.04],
        ["host", "between forward and backward", 0.04, 0.0405],
    ]
    shares = [0.25] * (ranks - 1) + [None]
    everything: dict[str, Any] = {
        "wait_attribution": WaitAttribution(
            True, 5e-5, None, {"round_trip_s": 1e-4, "syncs": 3, "rejected": 12, "drift": 1e-7}
        ),
        "imbalance": Imbalance("cost model", 0.0112, 0.0006, 0.0002, (1.0,) * (ranks - 1) + (1.31,), {ranks - 1: 1.31}, 0.03),
        "balance": plan(fitted_steps=2),
        "padded": {"kind": "batch, planned", "tokens": 0.25},
        "memory": growing_memory(ranks),
        "heat": HEAT,
        "workload": WORKLOAD,
        "what_if": (
            WhatIf("perfect balance", 1.25, 1.43),
            WhatIf("full overlap", 1.1, 1.43, "exchanges of 2 steps are unknown"),
        ),
        "exchanges": (ExchangeFigures("dense gradients", 1.0, 0.005, 0.01, 0.02, 4096, tuple(range(ranks))),),
        "host": {"hooks after the step": 0.0012},
        "device_idle": {"steps": 3, "idle": shares, "compute": shares, "other": shares},
        "median_step": {"step": 6, "ranks": [intervals] * ranks},
        "features": np.tile([16.0, 640.0, 51200.0, 0.0], (len(parts), ranks, 1)),
        "predicted": np.ones((len(parts), ranks)),
    }
    return report_of(parts, np.full((len(parts), ranks), 16), **{**everything, **changes})
