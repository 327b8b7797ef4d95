"""Reports of made-up runs: every cause of bubbles beside every group of settings; ``verdicts.py`` judges their advice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lightning_freescale.callbacks.advice import advise
from lightning_freescale.command_line.main import COMMANDS
from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.reporting.document import ExchangeFigures, Overhead, RunInfo, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport

Document = dict[str, Any]
OVERLAPPED: dict[str, Any] = {"strategy": "freescale", "overlap": "on", "sharded_tables": True, "assignment": "fixed"}
SLACK_LOST = {"assignment_mode": ["slack"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "num_workers": 0},
    "ddp, profiled": {"strategy": "ddp", "options": {"lengths": True, "torch_profiler_steps": 3}, "accumulate_grad_batches": 4},
    "ddp, balanced": {"strategy": "ddp", "assignment": "fixed", "options": {"lengths": True}, "num_workers": 2},
    "as drawn": {**OVERLAPPED, "assignment": "as drawn", "options": {"lengths": True}},
    "token budget": {**OVERLAPPED, "assignment": "free", "options": {"lengths": True, "cost": "auto", "batch_tokens": 4096.0}},
    "TorchRec's exchange": {**OVERLAPPED, "overlap": "off", "options": {"lengths": True, "cost": "auto"}},
    "overlapped": {**OVERLAPPED, "options": {"lengths": True, "cost": "auto"}, "rejected": SLACK_LOST},
    "overlapped, slack": {**OVERLAPPED, "assignment": "slack", "options": {"lengths": True}},
    "split backward": {**OVERLAPPED, "options": {"lengths": True, "split_backward": True}},
    "micro-batches": {**OVERLAPPED, "options": {"lengths": True, "cost": "auto", "micro_batches": 2}},
    "both": {**OVERLAPPED, "options": {"lengths": True, "split_backward": True, "micro_batches": "auto", "wire": "bfloat16"}},
    "autopilot, both lost": {
        **OVERLAPPED,
        "options": {"lengths": True, "cost": "auto", "micro_batches": "auto", "target_bubble_reduction": 0.9},
        "rejected": {"split_backward": [True], "micro_batches": [2, 4], **SLACK_LOST},
    },
    "autopilot, split backward won": {
        **OVERLAPPED,
        "options": {"lengths": True, "split_backward": True, "target_bubble_reduction": 0.9},
        "rejected": {"split_backward": [False]},
    },
}
"""Fields of :class:`RunInfo`."""


def _uneven(data: float, hardware: float, jitter: float, method: Any = "cost model") -> Document:
    slow = {1: 1.4} if hardware > 10 else {}
    seconds = (data / 1e3, hardware / 1e3, jitter / 1e3)
    return {"imbalance": Imbalance(method, *seconds, (1.0, 1.4 if slow else 1.0), slow, None)}


def _exchange(name: str) -> Document:
    return {"exchanges": (ExchangeFigures(name, 1.0, 0.001, 0.02, 0.0, 4_000_000, (1, 1)),)}


PLANNED = {"as_drawn": 1.4, "balanced": None, "lower_bound": 1.05, "gap": None}
UNPLANNED = {"compute": PLANNED, "tokens": None, "fitted_steps": 0}
CAUSES: list[tuple[str, str, Document]] = [
    ("data loading", "no data wait", {}),
    ("imbalance of data", "perfect balance", _uneven(20, 1, 2)),
    ("imbalance of data", "perfect balance", {**_uneven(20, 1, 2), "predicted": np.ones((3, 2))}),
    ("slow hardware", "perfect balance", _uneven(1, 20, 2)),
    ("slow hardware", "perfect balance", _uneven(0, 20, 2, "ranks")),
    ("uneven compute", "perfect balance", _uneven(1, 1, 20)),
    ("uneven compute", "perfect balance", _uneven(0, 1, 20, "ranks")),
    ("uneven compute", "perfect balance", {**_uneven(1, 1, 20), "padded": {"kind": "batch", "tokens": 0.1}}),
    ("embedding exchange", "full overlap", _exchange("embedding rows")),
    ("dense communication", "full overlap", _exchange("dense gradients")),
    ("other communication", "full overlap", _exchange("all_reduce")),
    ("host overhead", "no host overhead", {"host": {"hooks after the step": 0.01}}),
    *(("padding", "no padding", {"padded": {"kind": kind, "tokens": 0.6}}) for kind in ("fixed", "batch", "batch, planned")),
    ("nothing", "nothing", {}),
]
"""The cause, the name of the replayed case that gains most, and fields of :class:`BubbleReport`."""


def documents() -> Iterator[tuple[str, str, Document]]:
    """Yield the name of the settings, the planted cause, and the report's document with its verdict."""
    parts = {"wall": 0.1, "data_wait": 0.01, "forward": 0.03, "backward": 0.02, "straggler_wait": 0.02, "transfer": 0.02}
    uneven = {**parts, "forward": 0.05, "straggler_wait": 0.0}
    breakdown = np.array([[[rank.get(name, 0.0) for name in PART_NAMES] for rank in (parts, uneven)]] * 3)
    for settings, fields in SETTINGS.items():
        run = RunInfo("run", "Model", 1, 2, **{"device": "a GPU", **fields})
        for cause, case, more in CAUSES:
            names = ("perfect balance", "full overlap", "no data wait", "no host overhead", "no padding")
            cases = [WhatIf(name, 1.3 if name == case else 1.01, 1.6) for name in names]
            given: Document = {"balance": UNPLANNED, "what_if": cases, **more}
            waits, overhead = WaitAttribution(True, 5e-5), Overhead(8e-5, 4e-5)
            samples = np.zeros(breakdown.shape[:2], dtype=np.int64)
            report = BubbleReport(breakdown, samples, [5, 6, 7], run, waits, overhead, advise=advise, **given)
            yield settings, cause, report.document(series=False)


def repeated_advice(document: Document) -> list[str]:
    """Return what the next steps recommend although it is on in the run, lost there, or is no command."""
    verdict = document["verdict"]
    steps = f"{verdict['next']} {verdict['also'] or ''}"
    commands = re.findall(r"\bfreescale ([a-z]+ [a-z]+)", steps)
    unknown = [words for words in commands if words != "balance fit" and words.split()[0] not in COMMANDS.keys() - {"balance"}]
    return unknown + [option for option, wording in _settled(document["run"]).items() if re.search(wording, steps)]


def _settled(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the wordings that recommend each option that is on or was rejected."""
    planned, options = run["assignment"], {*run["options"], *run["rejected"]}
    wordings = {
        "strategy": (run["strategy"] == "freescale", r"strategy='freescale'"),
        "overlap": (run["overlap"] == "on", r"overlap=True"),
        "sharded_tables": (run["sharded_tables"] is True, r"be sharded"),
        "num_workers": ((run["num_workers"] or 0) > 0, r"num_workers=2 or more"),
        "accumulate_grad_batches": (run["accumulate_grad_batches"] > 1, r"accumulate"),
        "data module": (planned is not None, r"FreeScaleDataModule\(train_set"),
        "balance": (planned != "as drawn", r"balance=False"),
        "assignment_mode": (planned in ("slack", "free") or "assignment_mode" in options, r"'slack'"),
        "no batch_tokens": ("batch_tokens" not in options, r"batch_tokens"),
        "split_backward": ("split_backward" in options, r"split.backward"),
        "micro_batches": ("micro_batches" in options or run["strategy"] != "freescale", r"micro.batch"),
        "target_bubble_reduction": ("target_bubble_reduction" in options, r"target_bubble_reduction|autopilot"),
        "wire": ("wire" in options, r"wire="),
        "cost": ("cost" in options, r"balance fit|cost='auto'"),
        "lengths": ("lengths" in options, r"lengths_fn"),
        "torch_profiler_steps": ("torch_profiler_steps" in options, r"torch_profiler_steps"),
    }
    return {option: wording for option, (is_settled, wording) in wordings.items() if is_settled}
