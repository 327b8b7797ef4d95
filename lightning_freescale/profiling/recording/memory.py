"""The memory of each rank, read without waiting for the device, and its growth during a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_STATUS = Path("/proc/self/status")
_KB = 1024
_LEAST = 10
"""Number of windows after the first that a trend needs to differ from chance."""
_POINTS = 64
"""Largest number of points: neighbouring windows are combined, because the slopes of all pairs are computed."""
_CHANCE = 3.3
"""Standard deviations by which more pairs must rise than fall; one flat series in two thousand exceeds it."""
_STEADY = 0.5
"""Share of the slope that the second half must keep; memory that saturates keeps less."""
_NOTICEABLE, _PER_WINDOW = 0.02, 0.0025
"""Growth that is reported, as shares of the memory: over all windows and in one window."""


class MemoryReading(NamedTuple):
    """Bytes in use now, the largest number so far, and the bytes that the allocator holds (None without an allocator)."""

    current: int
    peak: int
    reserved: int | None = None


def memory_reader(device: torch.device) -> Callable[[], MemoryReading] | None:
    """Return a function that reads the memory of this rank in tens of microseconds, without a reset of the peak.

    None on a CPU without Linux's ``/proc``, and on CUDA with an allocator that does not count, such as pluggable ones.
    """
    if device.type == "cuda":
        try:
            _allocated(device)
        except RuntimeError:
            return None
        return lambda: _allocated(device)
    if device.type == "cpu" and _STATUS.exists() and {"RssAnon", "RssFile", "RssShmem", "VmHWM"} <= _status().keys():
        return _resident
    return None


def _allocated(device: torch.device) -> MemoryReading:
    """Read the counters of torch's allocator, which are on the host and need no synchronization."""
    current, peak, reserved = (
        of(device) for of in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved)
    )
    return MemoryReading(current, peak, reserved)


def _resident() -> MemoryReading:
    """Read this process's anonymous memory; mapped files and shared memory are not its own.

    The kernel only has the peak of the total. The files and shared memory mapped now, which seldom shrink, are subtracted.
    """
    held = _status()
    current = held["RssAnon"]
    return MemoryReading(current, max(current, held["VmHWM"] - held["RssFile"] - held["RssShmem"]))


def _status() -> dict[str, int]:
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * _KB for name, size, _ in lines}


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MemoryWindows:
    """Memory of every rank at the end of every window. A window is the steps between two exchanges of records.

    Attributes:
        steps: number of the last step of each window.
        current: bytes in use, shape ``[windows, ranks]``.
        peak: largest number of bytes in use so far, same shape.
        reserved: bytes that the allocator holds, same shape; None without an allocator.
    """

    steps: Sequence[int]
    current: Floats
    peak: Floats
    reserved: Floats | None = None

    @property
    def imbalance(self) -> float:
        """The maximum over ranks / the mean of the memory, averaged over the windows."""
        return _imbalance(self.current.mean(axis=0))

    @property
    def peak_imbalance(self) -> float:
        """The maximum over ranks / the mean of the highest peaks."""
        return _imbalance(self.peak.max(axis=0))

    @property
    def slopes(self) -> Floats | None:
        """The growth of each rank's memory in bytes per window, without the first window; None for too few windows."""
        points = self.current[1:]
        return np.array([_slope(*_fewer(mine))[0] for mine in points.T]) if len(points) >= _LEAST else None

    @property
    def growing(self) -> list[int]:
        """The ranks whose memory grows steadily, by more than chance and by a relevant amount."""
        points = self.current[1:]
        return [rank for rank, mine in enumerate(points.T) if len(points) >= _LEAST and _grows(mine)]


def _imbalance(ranks: Floats) -> float:
    return float(ranks.max() / ranks.mean()) if ranks.any() else 1.0


def _grows(held: Floats) -> bool:
    at, values = _fewer(held)
    slope, excess = _slope(at, values)
    later, _ = _slope(at[len(at) // 2 :], values[len(at) // 2 :])
    level = float(np.median(held[:_LEAST]))
    worth = max(_NOTICEABLE * level / (len(held) - 1), _PER_WINDOW * level)
    return excess > _CHANCE and slope >= worth and later >= _STEADY * slope


def _fewer(held: Floats) -> tuple[Floats, Floats]:
    """Return windows and memory, with neighbouring windows combined by their median if there are many."""
    groups = np.array_split(np.arange(len(held)), min(len(held), _POINTS))
    return np.array([group.mean() for group in groups]), np.array([np.median(held[group]) for group in groups])


def _slope(at: Floats, values: Floats) -> tuple[float, float]:
    """Return the median slope of all pairs (Theil-Sen), and how many deviations more rise than fall (Mann-Kendall)."""
    one, two = np.triu_indices(len(at), 1)
    rises = values[two] - values[one]
    count = len(at)
    deviation = np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return float(np.median(rises / (at[two] - at[one]))), float(np.sign(rises).sum() / deviation)
