"""What rank 0 keeps of all ranks' steps, and the report that comes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.analysis.contention import contention
from lightning_freescale.profiling.analysis.imbalance import split_imbalance
from lightning_freescale.profiling.analysis.intervals import intervals_of, told, wall_of
from lightning_freescale.profiling.analysis.rank_window import RankWindow
from lightning_freescale.profiling.analysis.segments import RankSegments
from lightning_freescale.profiling.analysis.what_if import WhatIf, what_if
from lightning_freescale.profiling.collection.gather import arrivals_of, last_arrivals
from lightning_freescale.profiling.collection.totals import Totals
from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.facts import Overhead, RunInfo, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport, window_scalars

Floats = NDArray[np.float64]
Explain = Callable[[Floats, Floats], "tuple[Floats, Floats] | None"]
"""From what every rank worked on in every step, ``[steps, ranks, features]``, and how long it computed, ``[steps, ranks]``, to
the seconds that this should take on a rank that is not slow, ``[steps, ranks]``, and how slow each rank is, ``[ranks]``."""
_REPLAYED = 500
"""Steps of a replay: enough for a mean, and done in a second."""
_ON_THE_WAY = 10_000
"""Steps times ranks of a report on the way, which is written in the time of a step or two."""


class History:
    """Rank 0's memory of a run; the last ``keep_steps`` steps of it."""

    def __init__(self, about: RunInfo, keep_steps: int, explain: Explain | None) -> None:
        self.about, self._explain = about, explain
        self.steps: deque[int] = deque(maxlen=keep_steps)
        self._parts: deque[Floats] = deque(maxlen=keep_steps)
        self._samples: deque[list[int]] = deque(maxlen=keep_steps)
        self._features: deque[list[Any]] = deque(maxlen=keep_steps)
        self._laps: deque[list[RankSegments]] = deque(maxlen=min(keep_steps, _REPLAYED))
        self._totals = Totals(keep_steps)
        self.added = 0
        self._newest = 0

    def add(self, windows: Sequence[RankWindow]) -> None:
        """The same steps of every rank."""
        parts = np.stack([window.parts for window in windows], axis=1)
        self.steps.extend(windows[0].steps)
        self._parts.extend(parts)
        self._samples.extend(list(row) for row in zip(*(window.samples for window in windows)))
        self._features.extend(list(row) for row in zip(*(window.features for window in windows)))
        self._laps.extend(list(row) for row in zip(*(window.laps for window in windows)))
        self._totals.add(windows)
        self._newest = len(parts)
        self.added += len(parts)

    def newest_scalars(self) -> dict[str, float]:
        """Of the steps that were added last, for loggers."""
        newest = range(len(self._parts) - min(self._newest, len(self._parts)), len(self._parts))
        return window_scalars(np.stack([self._parts[i] for i in newest]), np.array([self._samples[i] for i in newest]))

    def report(
        self,
        status: Status,
        waiting: WaitAttribution,
        overhead: Overhead,
        traced: Sequence[Sequence[ResolvedStep]] | None = None,
        device_idle: dict[str, Any] | None = None,
    ) -> BubbleReport:
        """Of all that was added; ``traced`` holds the last steps of every rank with all their stamps.

        Without them it is a report on the way, which leaves out what takes time: replays, and all but the newest steps.
        """
        newest = slice(None) if traced is not None else slice(-max(1, _ON_THE_WAY // len(self._samples[-1])), None)
        parts = np.stack(self._parts)[newest]
        compute, hidden = column(parts, "compute"), column(parts, "hidden")
        explained = self._explained(compute, list(self._features)[newest])
        expected, slowness = explained if explained is not None else (None, None)
        return BubbleReport(
            breakdown=parts,
            samples=np.array(self._samples)[newest],
            steps=np.array(self.steps)[newest],
            run=self.about,
            wait_attribution=waiting,
            overhead=overhead,
            status=status,
            imbalance=split_imbalance(compute, expected, slowness) if parts.shape[1] > 1 else None,
            what_if=self._replayed(compute, hidden, expected) if traced is not None else (),
            exchanges=self._totals.exchanges(),
            host=self._totals.host(),
            device_idle=device_idle,
            median_step=_median_step(traced) if traced and len(traced[0]) == parts.shape[1] else None,
            last=self._totals.last(),
        )

    def _replayed(self, compute: Floats, hidden: Floats, expected: Floats | None) -> tuple[WhatIf, ...]:
        inflation = contention(compute, hidden, expected)
        return what_if(list(self._laps), inflation, hidden[-len(self._laps) :])

    def _explained(self, compute: Floats, features: list[list[Any]]) -> tuple[Floats, Floats] | None:
        if self._explain is None or any(one is None for row in features for one in row):
            return None
        return self._explain(np.array(features, dtype=np.float64), compute)


def _median_step(traced: Sequence[Sequence[ResolvedStep]]) -> dict[str, Any]:
    """The traced step of median length, every rank's pieces in seconds from its start."""
    chosen = sorted(traced, key=lambda row: max(wall_of(step) for step in row))[(len(traced) - 1) // 2]
    arrivals = [arrivals_of(step) for step in chosen]
    origin = min(step.start for step in chosen)
    ranks = [
        [
            [*told(piece), round(piece.start - origin, 6), round(piece.end - origin, 6)]
            for piece in intervals_of(step, last_arrivals(step, arrivals))
        ]
        for step in chosen
    ]
    return {"step": chosen[0].index, "ranks": ranks}
