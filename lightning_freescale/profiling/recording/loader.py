"""Time spent waiting for the data loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_freescale._lightning.loader_wrapper import LoaderWrapper
from lightning_freescale.profiling.recording.timeline import Timeline


class ObservedLoader(LoaderWrapper):
    """Any iterable of batches, with every ``next`` on the timeline."""

    def __init__(self, loader: Any, timeline: Timeline) -> None:
        super().__init__(loader, _timeline=timeline)

    def __iter__(self) -> Iterator[Any]:
        return self._observed(iter(self._loader))  # a loader draws its workers' seed now, not at the first batch

    def _observed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._timeline.span("data", "fetch"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
