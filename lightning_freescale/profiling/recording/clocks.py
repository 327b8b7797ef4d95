"""Clocks that take stamps now and turn them into seconds later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch


class HostClock:
    """For devices that the host waits for: a stamp is the time it is taken."""

    def __init__(self) -> None:
        self.stamp = time.perf_counter

    def seconds(self, stamp: float) -> float:
        """Return the seconds of a stamp on this host's monotonic clock: the stamp itself."""
        return stamp

    def release(self, stamps: Iterable[float]) -> None:
        """Take back stamps that nobody will ask about again: numbers need none of it."""

    def tie(self) -> None:
        """Compare the device's clock with the host's: they are one."""


class CudaClock:
    """For streams that run behind the host: a stamp is an event on the current stream, from a pool.

    All are of one device: no time can be had from one GPU's event to another's. They measure milliseconds in single
    precision, so times are counted from an event that moves along with the run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._free: deque[Any] = deque()
        self._base: Any = None
        self.tie()

    def stamp(self) -> Any:
        """Record an event on the current stream of the clock's device."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        # not the calling thread's device: a thread that has chosen none works on the first GPU, which may be another rank's
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamp: Any) -> float:
        """Return the seconds of an event; waits for it, so ask only for what is long past."""
        stamp.synchronize()
        return self._base_seconds + float(self._base.elapsed_time(stamp)) / 1000

    def release(self, stamps: Iterable[Any]) -> None:
        """Take the events back; the last of them becomes the one that times are counted from."""
        events = list(stamps)
        if not events:
            return
        seconds, base = self.seconds(events[-1]), events.pop()
        self._free.append(self._base)
        self._base, self._base_seconds = base, seconds
        self._free.extend(events)

    def tie(self) -> None:
        """Wait for the device, then read its clock and the host's at once; call it while nothing runs."""
        torch.cuda.synchronize(self._device)
        self._base = self.stamp()
        self._base.synchronize()
        self._base_seconds = time.perf_counter()


Clock = HostClock | CudaClock
"""Takes stamps now and turns them into seconds later."""


def clock_for(device: torch.device) -> Clock:
    """Return the clock that fits a device.

    Raises:
        ValueError: nothing is known of devices of that type.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the timeline can stamp the work of cpu and cuda devices, not of {device}: profile without it there")
    return CudaClock(device) if device.type == "cuda" else HostClock()
