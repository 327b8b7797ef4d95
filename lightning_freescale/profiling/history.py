"""What rank 0 keeps of all ranks' steps, and the report that comes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.explaining.contention import contention
from lightning_freescale.profiling.explaining.imbalance import split_imbalance
from lightning_freescale.profiling.explaining.laps import RankLaps
from lightning_freescale.profiling.explaining.parts import column
from lightning_freescale.profiling.explaining.pieces import pieces_of, told
from lightning_freescale.profiling.explaining.replay import WhatIf, what_if
from lightning_freescale.profiling.explaining.window import ExchangeSums, Window
from lightning_freescale.profiling.gathering.gather import arrivals_of, last_arrivals
from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.report import (
    About,
    BubbleReport,
    ExchangeFigures,
    Overhead,
    Status,
    Waiting,
    window_scalars,
)

Floats = NDArray[np.float64]
Explain = Callable[[Floats, Floats], "tuple[Floats, Floats] | None"]
"""From what every rank worked on in every step, ``[steps, ranks, features]``, and how long it computed, ``[steps, ranks]``, to
the seconds that this should take on a rank that is not slow, ``[steps, ranks]``, and how slow each rank is, ``[ranks]``."""
_REPLAYED = 500
"""Steps of a replay: enough for a mean, and done in a second."""


class History:
    """Rank 0's memory of a run; the last ``keep_steps`` steps of it."""

    def __init__(self, about: About, keep_steps: int, explain: Explain | None) -> None:
        self.about, self._explain = about, explain
        self.steps: deque[int] = deque(maxlen=keep_steps)
        self._parts: deque[Floats] = deque(maxlen=keep_steps)
        self._samples: deque[list[int]] = deque(maxlen=keep_steps)
        self._features: deque[list[Any]] = deque(maxlen=keep_steps)
        self._laps: deque[list[RankLaps]] = deque(maxlen=min(keep_steps, _REPLAYED))
        self._exchanges: list[dict[str, ExchangeSums]] = []
        self._host: dict[str, float] = {}
        self.added = 0
        self._newest = 0

    def add(self, windows: Sequence[Window]) -> None:
        """The same steps of every rank."""
        parts = np.stack([window.parts for window in windows], axis=1)
        self.steps.extend(windows[0].steps)
        self._parts.extend(parts)
        self._samples.extend(list(row) for row in zip(*(window.samples for window in windows)))
        self._features.extend(list(row) for row in zip(*(window.features for window in windows)))
        self._laps.extend(list(row) for row in zip(*(window.laps for window in windows)))
        self._exchanges = self._exchanges or [{} for _ in windows]
        for mine, window in zip(self._exchanges, windows):
            for name, sums in window.exchanges.items():
                mine.setdefault(name, ExchangeSums())
                mine[name] += sums
            for section, seconds in window.host.items():
                self._host[section] = self._host.get(section, 0.0) + seconds / len(windows)
        self._newest = len(parts)
        self.added += len(parts)

    def newest_scalars(self) -> dict[str, float]:
        """Of the steps that were added last, for loggers."""
        newest = range(len(self._parts) - min(self._newest, len(self._parts)), len(self._parts))
        return window_scalars(np.stack([self._parts[i] for i in newest]), np.array([self._samples[i] for i in newest]))

    def report(
        self,
        status: Status,
        waiting: Waiting,
        overhead: Overhead,
        traced: Sequence[Sequence[ResolvedStep]] | None = None,
        device_idle: dict[str, Any] | None = None,
    ) -> BubbleReport:
        """Of all that was added; ``traced`` holds the last steps of every rank with all their stamps.

        Without them it is a report on the way, which leaves out what takes time.
        """
        parts = np.stack(self._parts)
        compute, hidden = column(parts, "compute"), column(parts, "hidden")
        explained = self._explained(compute)
        expected, slowness = explained if explained is not None else (None, None)
        return BubbleReport(
            parts=parts,
            samples=np.array(self._samples),
            steps=np.array(self.steps),
            about=self.about,
            waiting=waiting,
            overhead=overhead,
            status=status,
            imbalance=split_imbalance(compute, expected, slowness) if parts.shape[1] > 1 else None,
            what_if=self._replayed(compute, hidden, expected) if traced is not None else (),
            exchanges=self._exchange_figures(),
            host={section: seconds / self.added for section, seconds in self._host.items()},
            device_idle=device_idle,
            median_step=_median_step(traced) if traced else None,
            last=tuple(sum(sums.last for sums in mine.values()) for mine in self._exchanges),
        )

    def _replayed(self, compute: Floats, hidden: Floats, expected: Floats | None) -> tuple[WhatIf, ...]:
        inflation = contention(compute, hidden, expected)
        return what_if(list(self._laps), inflation, hidden[-len(self._laps) :])

    def _explained(self, compute: Floats) -> tuple[Floats, Floats] | None:
        if self._explain is None or any(one is None for row in self._features for one in row):
            return None
        return self._explain(np.array(self._features, dtype=np.float64), compute)

    def _exchange_figures(self) -> tuple[ExchangeFigures, ...]:
        names = dict.fromkeys(name for mine in self._exchanges for name in mine)
        return tuple(self._figures(name) for name in names)

    def _figures(self, name: str) -> ExchangeFigures:
        mine = [sums.get(name, ExchangeSums()) for sums in self._exchanges]
        each = self.added * len(mine)

        def mean(field: str) -> float:
            return sum(getattr(one, field) for one in mine) / each

        moved = None if any(one.unknown for one in mine) else int(mean("moved"))
        last = tuple(one.last for one in mine)
        return ExchangeFigures(name, mean("count"), mean("straggler_wait"), mean("transfer"), mean("hidden"), moved, last)


def _median_step(traced: Sequence[Sequence[ResolvedStep]]) -> dict[str, Any]:
    """The traced step of median length, every rank's pieces in microseconds from its start."""
    chosen = sorted(traced, key=lambda row: max(_wall(step) for step in row))[(len(traced) - 1) // 2]
    arrivals = [arrivals_of(step) for step in chosen]
    origin = min(step.start for step in chosen)
    ranks = [
        [
            [*told(piece), round((piece.start - origin) * 1e6), round((piece.end - origin) * 1e6)]
            for piece in pieces_of(step, last_arrivals(step, arrivals))
        ]
        for step in chosen
    ]
    return {"step": chosen[0].index, "ranks": ranks}


def _wall(step: ResolvedStep) -> float:
    return step.end - step.start - sum(span.end - span.start for span in step.spans if span.kind == "pause")
