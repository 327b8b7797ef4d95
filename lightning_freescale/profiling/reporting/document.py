"""The bubble report as a JSON document; ``schema.json`` says what is in it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from lightning_freescale.profiling.reporting.checking import FORMAT, VERSION, check
from lightning_freescale.profiling.reporting.layout import readable

if TYPE_CHECKING:
    from lightning_freescale.profiling.reporting.report import BubbleReport

Document = dict[str, Any]


def read(path: str | Path) -> Document:
    """Read a document.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no whole document of a version that this package reads; says what is wrong.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or was cut short: {error}") from error
    try:
        check(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return document


def write(document: Document, path: str | Path) -> Path:
    """Write a document; a reader finds the old file or the whole new one. Makes the folder if there is none."""
    path = Path(path)
    text = readable(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def of_report(report: BubbleReport) -> Document:
    """The whole document.

    Raises:
        ValueError: a figure is not finite.
    """
    series = {
        "columns": list(PART_NAMES),
        "step": np.asarray(report.steps).tolist(),
        "samples": report.samples.tolist(),
    }
    document = head(report)  # refuses what is not finite, which has no whole number of microseconds
    return {**document, "series": {**series, "microseconds": np.rint(report.parts * 1e6).astype(np.int64).tolist()}}


def head(report: BubbleReport) -> Document:
    """The document without its series of steps."""
    values = {
        "format": FORMAT,
        "version": VERSION,
        "run": vars(report.about),
        "status": _status(report),
        "summary": _summary(report),
        "ranks": [_rank(report, rank) for rank in range(report.parts.shape[1])],
        "imbalance": _imbalance(report),
        "what_if": [{name: getattr(case, name) for name in ("name", "speed_up", "limit", "note")} for case in report.what_if],
        "exchanges": _exchanges(report),
        "host": report.host,
        "waiting": _waiting(report),
        "overhead": _overhead(report),
        "device_idle": report.device_idle,
        "median_step": report.median_step,
    }
    return {name: _plain(value, name) for name, value in values.items()}


def _status(report: BubbleReport) -> Document:
    status = report.status
    covered = {"steps": len(report.steps), "first_step": report.steps[0]}
    left_out = {"warmup": status.warmup, "not_exchanged": status.not_exchanged}
    return {"complete": status.complete, "reason": status.reason, **covered, **left_out}


def _summary(report: BubbleReport) -> Document:
    return {
        "bubble": report.bubble,
        "limit": report.limit,
        "step_seconds": report.step_seconds,
        "samples": report.samples.sum(),
        "samples_per_second": report.samples_per_second,
        "compute_imbalance": report.compute_imbalance,
        "overlap_efficiency": report.overlap_efficiency,
        "shares": report.shares,
    }


def _rank(report: BubbleReport, rank: int) -> Document:
    return {
        "rank": rank,
        "step_seconds": report.parts[:, rank, 0].mean(),
        "shares": report.rank_shares(rank),
        "score": None if report.imbalance is None else report.imbalance.scores[rank],
        "last": report.last[rank] if len(report.last) else 0,
    }


def _imbalance(report: BubbleReport) -> Document | None:
    if (imbalance := report.imbalance) is None:
        return None
    seconds = {f"{cause}_seconds": getattr(imbalance, cause) for cause in ("data", "hardware", "jitter")}
    return {"basis": imbalance.basis, **seconds, "slow_ranks": imbalance.slow, "residual": imbalance.residual}


def _exchanges(report: BubbleReport) -> list[Document]:
    waits = ("straggler_wait", "transfer", "hidden")
    return [
        {
            "name": figures.name,
            "per_step": figures.per_step,
            **{f"{name}_seconds": getattr(figures, name) for name in waits},
            "moved_bytes": figures.moved,
            "last": figures.last,
        }
        for figures in report.exchanges
    ]


def _waiting(report: BubbleReport) -> Document:
    waiting = report.waiting
    how = {"method": waiting.method, "uncertainty_seconds": waiting.uncertainty, "reason": waiting.reason}
    rest = {"bandwidth_bytes_per_second": waiting.bandwidth, "unsplit_seconds": waiting.unsplit}
    return {**how, "clock": waiting.clock, **rest}


def _overhead(report: BubbleReport) -> Document:
    overhead = report.overhead
    return {
        "seconds_per_step": overhead.total,
        "exchange_seconds_per_step": overhead.exchange,
        "stamp_seconds_per_step": overhead.stamps,
        "share": overhead.total / report.step_seconds if report.step_seconds else 0.0,
    }


def _plain(value: Any, at: str) -> Any:
    """As JSON has it, and floats without the noise of their last digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{at}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(inner, f"{at}[{k}]") for k, inner in enumerate(value)]
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            raise ValueError(f"{at} is {value}: a report holds finite figures only, None is for what is unknown")
        return float(f"{value:.9g}")
    return int(value) if isinstance(value, np.integer) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
