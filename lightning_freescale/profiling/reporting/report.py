"""The bubble report on the steps of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES, bubble, column
from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.recording.memory import MemoryWindows
from lightning_freescale.profiling.reporting.document import (
    FORMAT,
    VERSION,
    Document,
    ExchangeFigures,
    Overhead,
    RunInfo,
    Status,
    WaitAttribution,
    write,
)
from lightning_freescale.profiling.reporting.text import summary
from lightning_freescale.profiling.reporting.verdict import Advise, verdict_on

Floats = NDArray[np.float64]
_SHARES = ("data_wait", "compute", *PART_NAMES[2:])
_FIGURES = (
    "bubble",
    "limit",
    "step_s",
    "samples_per_s",
    "compute_imbalance",
    "predicted_imbalance",
    "overlap_efficiency",
    "padding",
    "shares",
)


@dataclass(frozen=True, eq=False)
class BubbleReport:
    """The breakdown of every step on every rank, and its explanation.

    Attributes:
        breakdown: seconds, shape ``[steps, ranks, len(PART_NAMES)]``.
        samples: number of samples, shape ``[steps, ranks]``; zeros if unknown.
        steps: numbers of the steps in the fit, shape ``[steps]``.
        run: description of the run.
        wait_attribution: division of waits.
        overhead: cost of the profiler.
        status: part of the run that the report covers.
        imbalance: causes of the imbalance of compute; None if unknown.
        what_if: speed-ups without each kind of bubble.
        exchanges: figures by name of exchange.
        host: host overhead in seconds per step by section, mean over ranks.
        device_idle: shares of device time under torch.profiler, as in the document.
        median_step: intervals of a typical step, as in the document.
        features: features of every step and rank, shape ``[steps, ranks, features]``; None if unknown.
        predicted: predicted compute in a unit that the ranks of a step share, shape ``[steps, ranks]``; None if unknown.
        balance: planned imbalance of the steps, as in the document; None without plans. ``compute`` has ``as_drawn``,
            ``balanced``, ``lower_bound`` and ``gap``. ``tokens`` has ``as_drawn``, ``balanced`` and ``fullest``, or is None.
            ``fitted_steps`` is the number of steps with fitted costs.
        padded: ``kind`` and ``tokens`` of ``padding``; None if unknown or not padded.
        memory: memory of every rank at the end of every window; None if unknown.
        heat: hot rows of the embedding tables, as in the document; None if no row can be hot.
        workload: lengths, tables and collisions, as in the document; None if unknown.
        replayed: indices of the replayed steps; None for all.
        advise: function that returns advice based on the settings of the run; None for general advice.
    """

    breakdown: Floats
    samples: NDArray[np.int64]
    steps: NDArray[np.int64] | Sequence[int]
    run: RunInfo
    wait_attribution: WaitAttribution
    overhead: Overhead
    status: Status = field(default_factory=Status)
    imbalance: Imbalance | None = None
    what_if: Sequence[WhatIf] = ()
    exchanges: Sequence[ExchangeFigures] = ()
    host: Mapping[str, float] = field(default_factory=dict)
    device_idle: Mapping[str, Any] | None = None
    median_step: Mapping[str, Any] | None = None
    features: Floats | None = None
    predicted: Floats | None = None
    balance: Mapping[str, Any] | None = None
    padded: Mapping[str, Any] | None = None
    memory: MemoryWindows | None = None
    heat: Mapping[str, Any] | None = None
    workload: Mapping[str, Any] | None = None
    replayed: NDArray[np.intp] | None = None
    advise: Advise | None = None

    @property
    def bubble(self) -> float:
        """The bubble, 1 - compute / wall time, over all ranks and steps."""
        return bubble(self.breakdown)

    @property
    def limit(self) -> float | None:
        """The speed-up without any bubble; None if no compute was recorded."""
        return 1 / (1 - self.bubble) if self.bubble < 1 else None

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the wall time, over all ranks and steps, ``hidden`` included."""
        return shares_of(self.breakdown)

    @property
    def compute_imbalance(self) -> float:
        """The imbalance of compute, maximum over ranks / mean, with steps weighted by their compute."""
        return compute_imbalance_of(self.breakdown)

    @property
    def predicted_imbalance(self) -> float | None:
        """The predicted imbalance, weighted by compute like ``compute_imbalance``; None if nothing was predicted."""
        if self.predicted is None:
            return None
        mean, compute = self.predicted.mean(axis=1), column(self.breakdown, "compute").mean(axis=1)
        of_step = np.where(mean > 0, self.predicted.max(axis=1) / np.where(mean > 0, mean, 1.0), 1.0)
        return float(of_step @ compute / compute.sum()) if compute.any() else 1.0

    @property
    def step_s(self) -> float:
        """The mean wall time of a step in seconds."""
        return float(self.breakdown[:, :, 0].mean())

    @property
    def samples_per_s(self) -> float | None:
        """The samples of all ranks per second of wall time; None if unknown."""
        return samples_per_s_of(self.breakdown, self.samples)

    @property
    def overlap_efficiency(self) -> float | None:
        """The share of the exchange time that compute hid, without straggler wait.

        None without exchanges, and None if waits are not divided, because then transfer is unknown.
        """
        wait, transfer, hidden = (float(column(self.breakdown, name).sum()) for name in ("wait", "transfer", "hidden"))
        return hidden / (hidden + transfer) if hidden + transfer and not wait else None

    @property
    def padding(self) -> dict[str, Any] | None:
        """The kind of padding and its shares of the computed tokens and of the wall time; None if unknown or not padded.

        The share of the wall time assumes compute proportional to the tokens.
        """
        return None if self.padded is None else {**self.padded, "time": self.padded["tokens"] * self.shares["compute"]}

    def document(self, series: bool = True) -> Document:
        """Return the JSON document that ``schema.json`` describes, with or without the ``series`` of single steps.

        Raises:
            ValueError: a number is not finite.
        """
        waits, overhead = self.wait_attribution, self.overhead
        clocks = {"aligned": waits.aligned, **_seconds(waits, "uncertainty"), "reason": waits.reason, "clock": waits.clock}
        share = overhead.total / self.step_s if self.step_s else 0.0
        values: Document = {
            "format": FORMAT,
            "version": VERSION,
            "run": vars(self.run),
            "status": {**vars(self.status), "steps": len(self.steps), "first_step": self.steps[0]},
            "summary": {**{name: getattr(self, name) for name in _FIGURES}, "samples": self.samples.sum()},
            "verdict": None,
            "ranks": [_rank(self, rank) for rank in range(self.breakdown.shape[1])],
            "imbalance": None if self.imbalance is None else _imbalance(self.imbalance),
            "balance": self.balance,
            "memory": None if self.memory is None else _memory(self.memory),
            "heat": self.heat,
            "workload": self.workload,
            "what_if": [vars(case) for case in self.what_if],
            "replay": _replay(self) if self.what_if else None,
            "exchanges": [vars(figures) for figures in self.exchanges],
            "host_s": self.host,
            "wait_attribution": clocks,
            "overhead": {**_seconds(overhead, "total", "exchange", "stamps"), "share": share},
            "device_idle": self.device_idle,
            "median_step": self.median_step,
        }
        document = {name: _plain(value, name) for name, value in values.items()}
        document["verdict"] = verdict_on(document, self.advise)._asdict()  # on the rounded values
        if series:
            document["series"] = {
                "columns": list(PART_NAMES),
                "step": np.asarray(self.steps).tolist(),
                "samples": self.samples.tolist(),
                "breakdown_s": self.breakdown.round(6).tolist(),  # microseconds, for the size of the file
                "features": None if self.features is None else _short(self.features),
            }
        return document

    def write(self, path: str | Path) -> Path:
        """Write the document atomically."""
        return write(self.document(), path)

    def __str__(self) -> str:
        return summary(self.document(series=False))


def shares_of(breakdown: Floats) -> dict[str, float]:
    """Return the share of each part in the wall time, over all ranks and steps."""
    total = breakdown.reshape(-1, len(PART_NAMES)).sum(axis=0)
    return {name: float(column(total, name) / total[0]) if total[0] else 0.0 for name in _SHARES}


def compute_imbalance_of(breakdown: Floats) -> float:
    """Return the maximum over ranks of compute / mean, with steps weighted by their compute."""
    compute = column(breakdown, "compute")
    mean = float(compute.mean(axis=1).sum())
    return float(compute.max(axis=1).sum()) / mean if mean else 1.0


def samples_per_s_of(breakdown: Floats, samples: NDArray[np.int64]) -> float | None:
    """Return the samples of all ranks per second of wall time; None if the samples are unknown."""
    seconds = float(breakdown[:, :, 0].mean(axis=1).sum())
    return float(samples.sum()) / seconds if seconds and samples.any() else None


def _short(features: Floats) -> list[Any]:
    if (features == np.rint(features)).all() and np.abs(features).max(initial=0.0) < 2**53:
        return features.astype(np.int64).tolist()
    # significant digits and not decimals, because costs may have any unit
    return np.array([float(f"{value:.7g}") for value in features.ravel()]).reshape(features.shape).tolist()


def _rank(report: BubbleReport, rank: int) -> Document:
    return {
        "rank": rank,
        "step_s": report.breakdown[:, rank, 0].mean(),
        "shares": shares_of(report.breakdown[:, rank]),
        "score": None if report.imbalance is None else report.imbalance.scores[rank],
        "last": sum(figures.last[rank] for figures in report.exchanges),
    }


def _replay(report: BubbleReport) -> Document:
    at = np.arange(len(report.steps)) if report.replayed is None else report.replayed
    steps, breakdown = np.asarray(report.steps)[at], report.breakdown[at]
    ends = {"first_step": steps[0], "last_step": steps[-1]}
    return {"steps": len(steps), **ends, "step_s": breakdown[:, :, 0].mean(), "shares": shares_of(breakdown)}


def _imbalance(imbalance: Imbalance) -> Document:
    seconds = _seconds(imbalance, "data", "hardware", "jitter")
    return {"method": imbalance.method, **seconds, "slow_ranks": imbalance.slow, "residual": imbalance.residual}


def _memory(memory: MemoryWindows) -> Document:
    slopes, growing = memory.slopes, memory.growing

    def of_rank(rank: int) -> Document:
        return {
            "rank": rank,
            "current_bytes": int(memory.current[-1, rank]),
            "peak_bytes": int(memory.peak[-1, rank]),
            "reserved_bytes": None if memory.reserved is None else int(memory.reserved[-1, rank]),
            "growth_bytes": None if slopes is None else slopes[rank],
            "grows": None if slopes is None else rank in growing,
        }

    return {
        "imbalance": memory.imbalance,
        "peak_imbalance": memory.peak_imbalance,
        "step": list(memory.steps),
        "current_bytes": memory.current.astype(np.int64),
        "ranks": [of_rank(rank) for rank in range(memory.current.shape[1])],
    }


def _seconds(figures: Any, *names: str) -> Document:
    return {f"{name}_s": getattr(figures, name) for name in names}


def _plain(value: Any, at: str) -> Any:
    """Return a value as plain JSON types, with floats of nine digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{at}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(inner, f"{at}[{k}]") for k, inner in enumerate(value)]
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            raise ValueError(f"{at} is {value}, but the values of a report must be finite. Pass None for an unknown value")
        return float(f"{value:.9g}")
    return int(value) if isinstance(value, np.integer) else value
