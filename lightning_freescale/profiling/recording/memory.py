"""The memory that each rank holds, read without waiting for the device, and its growth over a run."""

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
"""Windows after the first from which on a trend can be distinguished from chance."""
_POINTS = 64
"""Windows are put together until there are no more: the slopes of all pairs are looked at."""
_CHANCE = 3.3
"""Standard deviations by which more pairs must rise than fall: one flat series in two thousand does that."""
_STEADY = 0.5
"""Share of its slope that memory keeps in the second half; what saturates keeps less."""
_NOTICEABLE, _PER_WINDOW = 0.02, 0.0025
"""Shares of the memory that it grows by, over all windows and in one, before it is worth a word."""


class MemoryReading(NamedTuple):
    """The memory of a rank at one moment, in bytes.

    Attributes:
        current: held now.
        peak: the most that was ever held, so far.
        reserved: what the allocator keeps for itself, ``current`` included; None where there is none.
    """

    current: int
    peak: int
    reserved: int | None = None


def memory_reader(device: torch.device) -> Callable[[], MemoryReading] | None:
    """Return what reads the memory of this rank; None if it cannot be known.

    On a CPU that is without Linux's ``/proc``; on CUDA with an allocator that does not count, as pluggable ones.

    Nothing is reset: peaks are others' to reset, too. A reading takes tens of microseconds, so one at the end of a window of
    steps is next to nothing.
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
    """Read counters of torch's allocator, which are on the host, so nothing waits for the device."""
    current, peak, reserved = (
        of(device) for of in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved)
    )
    return MemoryReading(current, peak, reserved)


def _resident() -> MemoryReading:
    """Read this process's anonymous memory, because what it maps from files and shares is not its own.

    The kernel keeps the peak of all of it; the files mapped by now are taken off, which hardly ever become fewer.
    """
    held = _status()
    current = held["RssAnon"]
    return MemoryReading(current, max(current, held["VmHWM"] - held["RssFile"] - held["RssShmem"]))


def _status() -> dict[str, int]:
    """Read the kernel's sizes of this process, in bytes."""
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * _KB for name, size, _ in lines}


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MemoryWindows:
    """Memory of every rank at the end of every window, a window being the steps between two exchanges of records.

    Attributes:
        steps: number of the last step of each window.
        current: bytes held then, shape ``[windows, ranks]``.
        peak: the most ever held until then, same shape.
        reserved: bytes that the allocator kept, same shape; None where there is none.
    """

    steps: Sequence[int]
    current: Floats
    peak: Floats
    reserved: Floats | None = None

    @property
    def imbalance(self) -> float:
        """Max over ranks / mean of what they held, as a mean over the windows."""
        return _imbalance(self.current.mean(axis=0))

    @property
    def peak_imbalance(self) -> float:
        """Max over ranks / mean of the highest peaks."""
        return _imbalance(self.peak.max(axis=0))

    @property
    def slopes(self) -> Floats | None:
        """Bytes per window that each rank's memory grows by, the first window left out; None if there are too few."""
        points = self.current[1:]
        return np.array([_slope(*_fewer(mine))[0] for mine in points.T]) if len(points) >= _LEAST else None

    @property
    def growing(self) -> list[int]:
        """The ranks whose memory grows, steadily, by more than chance and by enough to matter."""
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
    """Return windows and memory, as medians of neighbours where there are many."""
    groups = np.array_split(np.arange(len(held)), min(len(held), _POINTS))
    return np.array([group.mean() for group in groups]), np.array([np.median(held[group]) for group in groups])


def _slope(at: Floats, values: Floats) -> tuple[float, float]:
    """Return the median slope of all pairs (Theil-Sen), and how many deviations more rise than fall (Mann-Kendall)."""
    one, two = np.triu_indices(len(at), 1)
    rises = values[two] - values[one]
    count = len(at)
    deviation = np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return float(np.median(rises / (at[two] - at[one]))), float(np.sign(rises).sum() / deviation)
