"""The bubble report: what the profiler knows when the ranks' steps are together."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES, bubble, column
from lightning_freescale.profiling.reporting import document, text

if TYPE_CHECKING:
    from lightning_freescale.profiling.analysis.imbalance import Imbalance
    from lightning_freescale.profiling.analysis.what_if import WhatIf

_SHARES = ("data_wait", "compute", *PART_NAMES[2:])


@dataclass(frozen=True)
class RunInfo:
    """What ran. ``label`` names the run in comparisons; ``started`` is a time in ISO 8601; ``versions`` are of packages."""

    label: str
    model: str
    parameters: int
    world_size: int
    strategy: str = "a plain loop"
    device: str = "cpu"
    accumulate_grad_batches: int = 1
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=lambda: _installed())


@dataclass(frozen=True)
class Status:
    """How much of the run the report covers.

    Attributes:
        complete: the run came to its end.
        reason: why it did not.
        warmup: first steps left out.
        not_exchanged: steps done whose records the ranks could not exchange any more.
    """

    complete: bool = True
    reason: str | None = None
    warmup: int = 0
    not_exchanged: int = 0


@dataclass(frozen=True)
class WaitAttribution:
    """How waits were split into straggler wait and transfer.

    Attributes:
        method: ``"arrival clocks"``, ``"bandwidth"`` or ``"one rank"``.
        uncertainty: how far the turn from one to the other may be off, in seconds.
        reason: why a method that is not the best was taken.
        clock: how well the ranks' clocks were aligned, as in the document.
        bandwidth: bytes per second that the split assumed.
        unsplit: seconds per step of waits that could not be split.
    """

    method: str
    uncertainty: float
    reason: str | None = None
    clock: Mapping[str, float] | None = None
    bandwidth: float | None = None
    unsplit: float = 0.0


@dataclass(frozen=True)
class Overhead:
    """What the profiler itself took, in seconds per step: the ranks' ``exchange`` of records, and ``stamps``."""

    exchange: float
    stamps: float

    @property
    def total(self) -> float:
        """Both."""
        return self.exchange + self.stamps


@dataclass(frozen=True)
class ExchangeFigures:
    """The exchanges of one name, per step and as a mean over the ranks.

    Attributes:
        name: of the exchanges.
        per_step: how many a step has.
        straggler_wait: seconds waited for the last rank.
        transfer: seconds waited after that.
        hidden: seconds behind compute.
        moved: bytes that pass a rank's link; None if unknown.
        last: how often each rank was the last to arrive, over all steps.
    """

    name: str
    per_step: float
    straggler_wait: float
    transfer: float
    hidden: float
    moved: float | None
    last: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BubbleReport:
    """Parts of every step on every rank, and what explains them.

    Attributes:
        parts: seconds, shape ``[steps, ranks, len(PART_NAMES)]``.
        samples: samples of every step on every rank, shape ``[steps, ranks]``; zeros if unknown.
        steps: their numbers in the fit, shape ``[steps]``.
        about: what ran.
        waiting: how waits were split.
        overhead: what the profiler took.
        status: whether the run is covered to its end.
        imbalance: why the ranks' compute differs; None if that was not looked into.
        what_if: what the run would gain without each kind of bubble.
        exchanges: figures by name of exchange.
        host: host overhead in seconds per step by section, mean over ranks.
        device_idle: how idle the devices were, from a profiler of the device, as in the document.
        median_step: the pieces of a typical step, as in the document.
        last: how often each rank was the last to arrive at an exchange; empty if there is none.

    Raises:
        ValueError: the shapes do not fit together.
    """

    parts: NDArray[np.float64]
    samples: NDArray[np.int64]
    steps: NDArray[np.int64] | Sequence[int]
    about: RunInfo
    waiting: WaitAttribution
    overhead: Overhead
    status: Status = Status()
    imbalance: Imbalance | None = None
    what_if: Sequence[WhatIf] = ()
    exchanges: Sequence[ExchangeFigures] = ()
    host: Mapping[str, float] = field(default_factory=dict)
    device_idle: Mapping[str, Any] | None = None
    median_step: Mapping[str, Any] | None = None
    last: Sequence[int] = ()

    def __post_init__(self) -> None:
        rows = (len(self.steps), *self.parts.shape[1:2])  # ranks may be fewer than the world: an interrupted run has but rank 0
        if self.parts.shape != (*rows, len(PART_NAMES)) or self.samples.shape != rows or not self.parts.size:
            raise ValueError(
                f"BubbleReport(parts of shape {self.parts.shape}, samples of {self.samples.shape}, {len(self.steps)} steps): "
                f"pass [steps, ranks, {len(PART_NAMES)}] and [steps, ranks], of one step and one rank at least"
            )

    @property
    def bubble(self) -> float:
        """1 - compute / wall over all ranks and steps."""
        return bubble(self.parts)

    @property
    def limit(self) -> float | None:
        """How many times faster the run would be without the bubble; None if no compute was seen."""
        return 1 / (1 - self.bubble) if self.bubble < 1 else None

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the wall time, over all ranks and steps; of what is hidden, too."""
        return _shares(self.parts)

    def rank_shares(self, rank: int) -> dict[str, float]:
        """The shares in one rank's wall time."""
        return _shares(self.parts[:, rank])

    @property
    def compute_imbalance(self) -> float:
        """Max over ranks of compute / mean, over all steps, each weighted by its compute."""
        return _imbalance(self.parts)

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return float(self.parts[:, :, 0].mean())

    @property
    def compute_seconds(self) -> float:
        """Mean compute of a step and rank."""
        return float(column(self.parts, "compute").mean())

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks per second of wall time; None if the samples are unknown."""
        return _samples_per_second(self.parts, self.samples)

    @property
    def overlap_efficiency(self) -> float | None:
        """Share of the exchanges' time that compute hid, straggler wait left out; None without exchanges."""
        hidden, transfer = (float(column(self.parts, name).sum()) for name in ("hidden", "transfer"))
        return hidden / (hidden + transfer) if hidden + transfer else None

    def scalars(self) -> dict[str, float]:
        """For loggers, prefixed with ``freescale/``."""
        return window_scalars(self.parts, self.samples)

    def document(self) -> document.Document:
        """The report as the JSON document that ``schema.json`` describes."""
        return document.of_report(self)

    def write(self, path: str | Path) -> Path:
        """Write the document; a reader finds the old file or the whole new one."""
        return document.write(self.document(), path)

    def __str__(self) -> str:
        return text.summary(document.head(self))


def _installed() -> dict[str, str]:
    names = ("lightning-freescale", "torch", "lightning")
    found = {name.replace("-", "_"): version(name) for name in names if find_spec(name.replace("-", "_")) is not None}
    return {**found, "python": platform.python_version()}


def window_scalars(parts: NDArray[np.float64], samples: NDArray[np.int64]) -> dict[str, float]:
    """What loggers get of some steps: ``parts`` of shape ``[steps, ranks, parts]``, ``samples`` of ``[steps, ranks]``."""
    values = {"bubble": bubble(parts), **_shares(parts), "compute_imbalance": _imbalance(parts)}
    values["step_seconds"] = float(parts[:, :, 0].mean())
    rate = _samples_per_second(parts, samples)
    if rate is not None:
        values["samples_per_second"] = rate
    return {f"freescale/{name}": value for name, value in values.items()}


def _shares(parts: NDArray[np.float64]) -> dict[str, float]:
    total = parts.reshape(-1, len(PART_NAMES)).sum(axis=0)
    return {name: float(column(total, name) / total[0]) if total[0] else 0.0 for name in _SHARES}


def _imbalance(parts: NDArray[np.float64]) -> float:
    compute = column(parts, "compute")
    mean = float(compute.mean(axis=1).sum())
    return float(compute.max(axis=1).sum()) / mean if mean else 1.0


def _samples_per_second(parts: NDArray[np.float64], samples: NDArray[np.int64]) -> float | None:
    seconds = float(parts[:, :, 0].mean(axis=1).sum())
    return float(samples.sum()) / seconds if seconds and samples.any() else None
