"""How much memory a rank holds, read without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

_STATUS = Path("/proc/self/status")
_KB = 1024


class MemoryReading(NamedTuple):
    """What a rank holds at one moment, in bytes.

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
    """Of torch's allocator on the device: counters on the host, for which nobody waits."""
    current, peak, reserved = (
        of(device) for of in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved)
    )
    return MemoryReading(current, peak, reserved)


def _resident() -> MemoryReading:
    """Of this process: its anonymous memory, because what it maps from files and shares is not its own.

    The kernel keeps the peak of all of it; the files mapped by now are taken off, which hardly ever become fewer.
    """
    held = _status()
    current = held["RssAnon"]
    return MemoryReading(current, max(current, held["VmHWM"] - held["RssFile"] - held["RssShmem"]))


def _status() -> dict[str, int]:
    """The kernel's sizes of this process, in bytes."""
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * _KB for name, size, _ in lines}
