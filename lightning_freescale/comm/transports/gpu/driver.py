"""What a transport asks of a GPU: streams, copies by the copy engines, and waits for and writes of a word in memory."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

WRAP = 2**32
"""Words count modulo this; a wait compares cyclically, so that counters may wrap around."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""


class Driver(Protocol):
    """Operations of one device. All but :meth:`active` and :meth:`pinned` only enqueue, and none launches a kernel."""

    device: torch.device

    def active(self) -> Any:
        """A context in which the calling thread may use the device."""

    def stream(self, urgent: bool = False) -> Any:
        """A stream that nobody else uses; an urgent one gets on although others are stuck."""

    def after(self, stream: Any, issued: Any) -> None:
        """What comes next on ``stream`` waits for an event of another stream."""

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Copy contiguous bytes, within the device, to or from a peer or pinned memory."""

    def write(self, stream: Any, word: Tensor, value: int) -> None:
        """Store ``value`` in a word of 32 bits, of this device or a peer, after all that is before it on the stream."""

    def wait(self, stream: Any, word: Tensor, value: int) -> None:
        """Hold the stream until a word of this device has reached ``value``: the cyclic difference is not negative."""

    def event(self, stream: Any) -> Event:
        """The present end of a stream."""

    def pinned(self, length: int) -> Tensor:
        """Host memory for ``length`` words, int32."""

    def close(self) -> None:
        """Let go of the streams."""


def nap(waited: float) -> None:
    """Sleep before looking again, a tenth of the seconds waited so far, so that long waits leave the CPU to others."""
    time.sleep(min(1e-3, 2e-5 + waited / 10))
