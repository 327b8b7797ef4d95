"""Batches on their way from a loader to the training step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_MOST = 4
"""More batches than this do not wait between loader and step: then nobody tells which of them have been trained on."""


class _Upcoming(Enum):
    ENDED = "ended"
    UNKNOWN = "unknown"


ENDED: Final = _Upcoming.ENDED
"""No batch follows in this iteration."""
UNKNOWN: Final = _Upcoming.UNKNOWN
"""Whether a batch follows, and which, cannot be said yet."""


@dataclass
class PrefetchedBatch:
    """A batch, or the error that came instead of it, or the end.

    Attributes:
        state: the loader's before it was fetched.
        given: whether it has been handed out.
    """

    batch: Any = None
    error: Exception | None = None
    end: bool = False
    state: Any = None
    given: bool = False


class PrefetchQueue:
    """What one iteration has fetched and training has not begun on, in order; the last may wait to be handed out."""

    def __init__(self) -> None:
        self.waiting: deque[PrefetchedBatch] = deque()
        self.begun = self.ended = self.lost = False

    @property
    def ahead(self) -> PrefetchedBatch | None:
        """What is handed out next."""
        return self.waiting[-1] if self.waiting and not self.waiting[-1].given else None

    def add(self, fetched: PrefetchedBatch) -> None:
        """Queue what came after the last one."""
        self.waiting.append(fetched)
        self.ended = fetched.end
        self.lost |= len(self.waiting) > _MOST
        while self.lost and self.waiting[0].given:
            self.waiting.popleft()

    def take(self, fetched: PrefetchedBatch) -> Any:
        """Hand out the last one. A batch stays here until training on it begins."""
        fetched.given = True
        if fetched.end or fetched.error is not None:
            self.waiting.pop()
        if fetched.end:
            raise StopIteration
        if fetched.error is not None:
            raise fetched.error
        return fetched.batch

    def begin(self) -> None:
        """Training on the first batch begins."""
        self.begun = True
        while not self.lost and self.waiting and self.waiting[0].given:
            if self.waiting.popleft().batch is not None:
                return  # Lightning passes over batches that are None

    @property
    def upcoming(self) -> Any:
        """The first batch that training has not begun on, or ENDED, or UNKNOWN."""
        if self.lost:
            return UNKNOWN
        otherwise = ENDED if self.ended else UNKNOWN
        return next((fetched.batch for fetched in self.waiting if fetched.batch is not None), otherwise)

    @property
    def resume_at(self) -> PrefetchedBatch | None:
        """The first one that training has not begun on, or, if nobody says when it begins, that was not handed out."""
        follows = self.begun and not self.lost
        return next((fetched for fetched in self.waiting if follows or not fetched.given), None)
