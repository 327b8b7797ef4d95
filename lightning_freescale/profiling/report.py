"""The bubble report as text and as scalars."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.attribution import PART_NAMES, bubble

_HEADINGS = ("data wait", "compute", "straggler wait", "transfer", "host overhead", "unexplained")


@dataclass(frozen=True)
class BubbleReport:
    """Parts of every step on every rank.

    Attributes:
        parts: seconds, shape ``[steps, ranks, len(PART_NAMES)]``.
        samples: samples of every step on every rank, shape ``[steps, ranks]``; zeros if unknown.
        warmup: steps left out before the first one here.
        overhead: seconds per step that the profiler itself took, not in the wall time.
    """

    parts: NDArray[np.float64]
    samples: NDArray[np.int64]
    warmup: int = 0
    overhead: float = 0.0

    @property
    def bubble(self) -> float:
        """1 - compute / wall over all ranks and steps."""
        return bubble(self.parts)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the wall time, over all ranks and steps."""
        total = self.parts.sum(axis=(0, 1))
        return {name: float(value / total[0]) for name, value in zip(PART_NAMES[1:], total[1:])}

    @property
    def compute_imbalance(self) -> float:
        """Measured imbalance: max over ranks of compute / mean, over all steps, each weighted by its compute."""
        compute = self.parts[:, :, PART_NAMES.index("compute")]
        return float(compute.max(axis=1).sum() / compute.mean(axis=1).sum())

    @property
    def compute_seconds(self) -> float:
        """Mean compute of a step and rank."""
        return float(self.parts[:, :, PART_NAMES.index("compute")].mean())

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second of wall time; 0 if the samples are unknown."""
        return float(self.samples.sum() / self.parts[:, :, 0].mean(axis=1).sum())

    def scalars(self) -> dict[str, float]:
        """For loggers, prefixed with ``freescale/``."""
        values = {"bubble": self.bubble, **self.shares, "compute_imbalance": self.compute_imbalance}
        values["step_seconds"] = float(self.parts[:, :, 0].mean())
        if self.samples.any():
            values["samples_per_second"] = self.samples_per_second
        return {f"freescale/{name}": value for name, value in values.items()}

    def __str__(self) -> str:
        steps, ranks, _ = self.parts.shape
        left_out = f", first {self.warmup} left out" if self.warmup else ""
        lines = [
            f"Where the time went: {ranks} rank{'s'[: ranks > 1]}, {steps} steps{left_out}",
            f"{'':<9}{'ms/step':>9}" + "".join(f"{heading:>16}" for heading in _HEADINGS),
        ]
        for rank in range(ranks):
            lines.append(_row(f"rank {rank}", self.parts[:, rank]))
        lines.append(_row("all", self.parts.reshape(-1, len(PART_NAMES))))
        lines.append(
            f"bubble {self.bubble:.1%} = 1 - compute / wall; without it a step would take "
            f"{self.parts[:, :, 0].mean() * (1 - self.bubble) * 1e3:.1f} ms, {1 / max(1 - self.bubble, 1e-9):.2f}x faster"
        )
        lines.append(
            f"measured compute imbalance {self.compute_imbalance:.3f}; profiler overhead "
            f"{self.overhead * 1e3:.2f} ms/step (not in the table)"
        )
        return "\n".join(lines)


def _row(label: str, parts: NDArray[np.float64]) -> str:
    mean = parts.mean(axis=0)
    return f"{label:<9}{mean[0] * 1e3:>9.1f}" + "".join(f"{value / mean[0]:>16.1%}" for value in mean[1:])
