"""Priorities of lanes: a lane pauses between two chunks while a lane of higher priority in this process has work."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MAX_PAUSE_SECONDS = 0.05
"""The longest pause between two chunks, so that no lane starves, and the longest wait for a higher lane without progress."""


@dataclass(eq=False)
class Activity:
    """A collective that a lane is running."""

    priority: int
    last_progress: float = field(default_factory=time.monotonic)  # the time of its last sent or received chunk


class PriorityGate:
    """The lanes of a process, and the collectives that they are running."""

    def __init__(self) -> None:
        self.lanes: Counter[int] = Counter()  # the number of open lanes, by priority
        self._activities: list[Activity] = []
        self._changed = threading.Condition()

    def has_higher_lane(self, priority: int) -> bool:
        return any(other > priority and count > 0 for other, count in list(self.lanes.items()))

    @contextmanager
    def track(self, priority: int) -> Iterator[Activity]:
        """Register a collective of this priority, which the block runs, so that other lanes pause for it."""
        activity = Activity(priority)
        with self._changed:
            self._activities.append(activity)
        try:
            yield activity
        finally:
            with self._changed:
                self._activities.remove(activity)
                self._changed.notify_all()

    def yield_to_higher(self, activity: Activity) -> None:
        """Wait between two chunks while a higher lane has work."""
        activity.last_progress = now = time.monotonic()
        if len(self._activities) < 2:
            return
        end = now + MAX_PAUSE_SECONDS
        with self._changed:
            # Do not pause for a higher lane without progress. It waits for its peers, and one of them may wait in its low lane
            # for this rank.
            while (until := min(end, self._last_progress_above(activity) + MAX_PAUSE_SECONDS)) > time.monotonic():
                self._changed.wait(until - time.monotonic())
        activity.last_progress = time.monotonic()

    def _last_progress_above(self, activity: Activity) -> float:
        above = (other for other in self._activities if other.priority > activity.priority)
        return max((other.last_progress for other in above), default=float("-inf"))


PRIORITY_GATE = PriorityGate()
"""The lanes of this process."""
