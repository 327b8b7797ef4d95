"""Tell waiting from transferring without a clock that the ranks share: a transfer takes what its bytes need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.profiling.recording.records import ResolvedCollective, ResolvedStep

Floats = NDArray[np.float64]
_LEAST = 8
_OUTLIERS, _QUICKEST = 2, 0.02
"""This many exchanges, or this share of them, may be quicker than the link allows."""
_FAR_QUICKER = 2.0
_NEXT_QUICKEST = 0.1
_SECTIONS = 60
_ALIKE = 0.1
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Bandwidth:
    """Of a rank's link: an exchange takes ``latency + moved / bytes_per_second`` once its last rank has arrived.

    Attributes:
        bytes_per_second: None if it is not known; nothing can be split then.
        latency: seconds.
        uncertainty: seconds by which the split of one exchange may be off: how far the quickest exchanges, among which this
            rank came last, are apart. 0 if nothing is split.
    """

    bytes_per_second: float | None
    latency: float = 0.0
    uncertainty: float = 0.0

    @classmethod
    def of(cls, durations: ArrayLike, moved: ArrayLike, given: float | None = None) -> Bandwidth:
        """Estimated from one rank's exchanges: those where it came last did not wait, so they are the quickest for their bytes.

        The line that 2 % lie below, by quantile regression (Koenker and Bassett 1978). A few (2, or 2 %: cached or wrongly
        stamped) that are far quicker than the rest do not count. A rank that hardly ever comes last gets a bandwidth that is
        too low. If all exchanges are of about one size, latency is 0: it cannot be told from the bandwidth.

        Args:
            durations: seconds from the rank's arrival to the end of the exchange.
            moved: bytes over its link.
            given: bytes per second, instead of an estimate.

        Raises:
            ValueError: ``given`` is not > 0.
        """
        if given is not None and not (given > 0 and np.isfinite(given)):
            raise ValueError(f"Bandwidth.of(given={given!r}): pass bytes per second, more than 0")
        seconds, sizes = np.asarray(durations, dtype=np.float64), np.asarray(moved, dtype=np.float64)
        usable = (seconds > 0) & (sizes > 0)
        if usable.sum() < _LEAST:
            return cls(given)
        seconds, sizes = _without_outliers(seconds[usable], sizes[usable])
        slope = _slope(seconds, sizes) if given is None else 1 / given
        latency = 0.0 if given is None and _alike(sizes) else _latency(seconds, sizes, slope)
        below, above = np.quantile(seconds - latency - slope * sizes, [_QUICKEST, _NEXT_QUICKEST])
        return cls(1 / slope, latency, float(max(above - below, -below)))

    @classmethod
    def of_steps(cls, steps: Iterable[ResolvedStep], given: float | None = None) -> Bandwidth:
        """Estimated from all exchanges of one rank's steps; see :meth:`of`."""
        seen = [c for step in steps for c in (*step.collectives, *step.hidden) if c.moved]
        return cls.of([c.done - c.arrive for c in seen], [c.moved or 0 for c in seen], given)

    def last_arrivals(self, step: ResolvedStep) -> list[float]:
        """When the last rank must have arrived at each of the step's collectives.

        Where the bytes or the bandwidth are unknown, that is when this rank did: all of its waiting is transfer, see
        :meth:`unsplit`.
        """
        return [c.arrive if (t := self._transfer(c)) is None else max(c.arrive, c.done - t) for c in step.collectives]

    def unsplit(self, step: ResolvedStep) -> float:
        """Seconds that the rank waited for collectives whose waits cannot be split."""
        return sum(c.end - c.start for c in step.collectives if self._transfer(c) is None)

    def _transfer(self, collective: ResolvedCollective) -> float | None:
        if collective.moved is None or self.bytes_per_second is None:
            return None
        return self.latency + collective.moved / self.bytes_per_second


def _alike(sizes: Floats) -> bool:
    return float(np.ptp(sizes)) < _ALIKE * float(np.median(sizes))


def _without_outliers(seconds: Floats, sizes: Floats) -> tuple[Floats, Floats]:
    rates = sizes / seconds
    few = max(_OUTLIERS, int(_QUICKEST * len(rates)))
    kept = rates <= _FAR_QUICKER * np.sort(rates)[-few - 1]
    return seconds[kept], sizes[kept]


def _latency(seconds: Floats, sizes: Floats, slope: float) -> float:
    return max(0.0, float(np.quantile(seconds - slope * sizes, _QUICKEST)))


def _slope(seconds: Floats, sizes: Floats) -> float:
    """Seconds per byte of the line below which the quickest lie. Its loss is convex, so a section search finds it."""
    if _alike(sizes):
        return float(np.quantile(seconds / sizes, _QUICKEST))

    def loss(slope: float) -> float:
        rest = seconds - slope * sizes - _latency(seconds, sizes, slope)
        return float((np.maximum(rest, 0) * _QUICKEST - np.minimum(rest, 0) * (1 - _QUICKEST)).sum())

    left, right = 0.0, float((seconds / sizes).max())
    for _ in range(_SECTIONS):
        a, b = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        left, right = (left, b) if loss(a) <= loss(b) else (a, right)
    return right
