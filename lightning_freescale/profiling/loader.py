"""Time spent waiting for the data loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_freescale.profiling.timeline import Timeline


class ObservedLoader:
    """Any iterable of batches, with every ``next`` on the timeline. Looks like the loader it wraps."""

    def __init__(self, loader: Any, timeline: Timeline) -> None:
        self._loader, self._timeline = loader, timeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            with self._timeline.span("data", "fetch"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
