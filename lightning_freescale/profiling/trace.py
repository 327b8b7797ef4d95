"""Write the steps of all ranks as one Chrome trace; https://ui.perfetto.dev opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_freescale.profiling.attribution import ResolvedStep


def write_trace(path: Path, steps: list[list[ResolvedStep]]) -> Path:
    """One process per rank, all on rank 0's clock. ``steps`` holds for every step the records of all ranks."""
    events: list[dict[str, Any]] = []
    ranks = len(steps[0]) if steps else 0
    for rank in range(ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
    origin = min((step.start for row in steps for step in row), default=0.0)
    for number, row in enumerate(steps):
        for rank, step in enumerate(row):
            events.append(_event(rank, "step", f"step {number}", step.start - origin, step.end - origin))
            events += [_event(rank, kind, name, a - origin, b - origin) for kind, name, a, b in step.spans]
            events += [_event(rank, "wait", f"wait: {n}", a - origin, b - origin) for n, _, a, b in step.collectives]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _event(rank: int, kind: str, name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "pid": rank, "tid": 0, "cat": kind, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}
