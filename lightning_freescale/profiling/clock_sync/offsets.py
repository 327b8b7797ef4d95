"""The offset between two clocks at any time, from what it was at some times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.clock_sync.ping_pong import WORST_DRIFT, Measurement

Seconds = NDArray[np.float64]

WANDER = 2e-6
"""How far a rate may be from its mean between measurements: a crystal's in a machine that warms up."""


class Offsets:
    """Rank 0's clock minus this rank's: linear between measurements, beyond them as the drift says.

    The drift is taken from the last measurement and the earlier one that tells it best, but only if that leaves less doubt than
    ``WORST_DRIFT``; otherwise the offset stays what it was.

    Args:
        measurements: at least one, in the order they were made.

    Attributes:
        drift: seconds that rank 0's clock gains per second; 0 as long as it is not known.
        doubt: ``drift`` may be off by this.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        table = np.array([(each.time, each.offset, each.margin) for each in measurements])
        self.times, self._offsets, self._margins = table.T
        self.drift, self.doubt = self._rate()
        self._bend = self._measured_bend()

    def at(self, seconds: float | Seconds) -> Seconds:
        """The offset when this rank's clock shows ``seconds``."""
        beyond = np.minimum(seconds - self.times[0], 0.0) + np.maximum(seconds - self.times[-1], 0.0)
        return np.interp(seconds, self.times, self._offsets) + self.drift * beyond

    def margin(self, seconds: float | Seconds) -> Seconds:
        """The offset at ``seconds`` is wrong by no more than this.

        The margins of the measurements around it, and for every second since the nearest one ``WANDER``, beyond the first and
        last ``doubt``; and by how much the measurements themselves are further from a line than their margins explain.
        """
        away = np.abs(np.asarray(seconds)[..., None] - self.times).min(axis=-1)
        between = (seconds >= self.times[0]) & (seconds <= self.times[-1])
        return np.interp(seconds, self.times, self._margins) + np.where(between, WANDER, self.doubt) * away + self._bend

    def worst_margin(self, until: float) -> float:
        """The largest margin from the first measurement to ``until``."""
        middles = (self.times[1:] + self.times[:-1]) / 2  # the margin is made of straight pieces that meet here
        return float(self.margin(np.concatenate([self.times, middles, [until]])).max())

    def _rate(self) -> tuple[float, float]:
        elapsed = self.times[-1] - self.times[:-1]
        if not len(elapsed):
            return 0.0, WORST_DRIFT
        doubts = (self._margins[-1] + self._margins[:-1]) / elapsed + WANDER
        best = int(doubts.argmin())
        if doubts[best] >= WORST_DRIFT:
            return 0.0, WORST_DRIFT
        return float((self._offsets[-1] - self._offsets[best]) / elapsed[best]), float(doubts[best])

    def _measured_bend(self) -> float:
        """How far a measurement is from the line between its neighbours, less what the margins of the three allow."""
        if len(self.times) < 3:
            return 0.0
        before, here, after = self.times[:-2], self.times[1:-1], self.times[2:]
        share = (here - before) / (after - before)
        line = self._offsets[:-2] * (1 - share) + self._offsets[2:] * share
        allowed = self._margins[:-2] * (1 - share) + self._margins[2:] * share + self._margins[1:-1]
        return max(0.0, float((np.abs(self._offsets[1:-1] - line) - allowed).max()))
