"""Which lanes of this process have work, and which of them let others go first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_freescale.comm.options import LaneOptions


@dataclass(eq=False)
class Activity:
    """A collective under way.

    Attributes:
        priority: of its lane.
        pauses: whether lower lanes pause for it.
        progress: when a chunk of it last came or went, in seconds of the monotonic clock.
    """

    priority: int
    pauses: bool
    progress: float = field(default_factory=time.monotonic)


class PriorityGate:
    """The collectives under way on all lanes of a process."""

    def __init__(self) -> None:
        self._slots: list[Activity] = []
        self._changed = threading.Condition()
        self._lanes: Counter[int] = Counter()

    def open(self, priority: int) -> None:
        """A lane exists from now on."""
        self._lanes[priority] += 1

    def close(self, priority: int) -> None:
        """It does no more."""
        self._lanes[priority] -= 1

    def has_above(self, priority: int) -> bool:
        """Whether there is a lane of higher priority."""
        return any(other > priority and count > 0 for other, count in list(self._lanes.items()))

    @contextmanager
    def under_way(self, options: LaneOptions, total: int) -> Iterator[Activity]:
        """While a collective of ``total`` bytes runs."""
        slot = Activity(options.priority, options.pause_below is None or total < options.pause_below)
        with self._changed:
            self._slots.append(slot)
        try:
            yield slot
        finally:
            with self._changed:
                self._slots.remove(slot)
                self._changed.notify_all()

    def give_way(self, slot: Activity, patience: float) -> None:
        """Between two chunks: wait while a higher lane has work, at most ``patience`` seconds.

        A higher lane that has seen no progress for that long waits for its peers; it is not waited for.
        """
        slot.progress = now = time.monotonic()
        if len(self._slots) < 2:
            return
        end = now + patience
        with self._changed:
            while (until := min(end, self._last_progress(slot) + patience)) > time.monotonic():
                self._changed.wait(until - time.monotonic())
        slot.progress = time.monotonic()

    def _last_progress(self, slot: Activity) -> float:
        higher = [other.progress for other in self._slots if other.pauses and other.priority > slot.priority]
        return max(higher, default=float("-inf"))


TRAFFIC = PriorityGate()
"""Of this process."""
