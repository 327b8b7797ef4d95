"""A CUDA device whose work runs behind the host, on a clock that only tests move, and others beside it that do nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_freescale.profiling.recording import records


class Device:
    """Seconds of the host's clock, and until when the device is busy.

    Every thread works on the first device until it chooses another, as with CUDA.
    """

    def __init__(self) -> None:
        self._chosen = threading.local()
        self.now, self.busy_until = 1000.0, 0.0
        self.synchronized, self.events = 0, 0

    def work(self, seconds: float) -> None:
        """Queue a kernel; the host goes on at once."""
        self.busy_until = max(self.busy_until, self.now) + seconds

    def host(self, seconds: float) -> None:
        """The host is busy, the device goes on."""
        self.now += seconds

    def synchronize(self, device: Any = None) -> None:
        self.synchronized += 1
        self.now = max(self.now, self.busy_until)

    def choose(self, index: int) -> None:
        self._chosen.index = index

    def current(self) -> int:
        return getattr(self._chosen, "index", 0)

    def current_stream(self, device: torch.device | None = None) -> SimpleNamespace:
        own = device is None or device.index is None
        return SimpleNamespace(device=torch.device("cuda", self.current()) if own else device)

    def event(self, enable_timing: bool = False) -> Event:
        assert enable_timing
        self.events += 1
        return Event(self)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "current_device", self.current)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(records, "time", SimpleNamespace(perf_counter=lambda: self.now))
        return self


class Event:
    """As torch.cuda.Event: of the device it was first recorded on; times in single precision, and only of what is over."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, np.nan
        self.recorded_on: torch.device | None = None

    def record(self, stream: SimpleNamespace | None = None) -> None:
        where = (stream or self.device.current_stream()).device
        assert self.recorded_on in (None, where), f"an event of {self.recorded_on}, recorded on a stream of {where}"
        self.recorded_on = where
        self.at = max(self.device.busy_until, self.device.now)

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert self.recorded_on == end.recorded_on, f"events of {self.recorded_on} and {end.recorded_on}"
        assert max(self.at, end.at) <= self.device.now, "device not ready"
        return float(np.float32((end.at - self.at) * 1e3))
