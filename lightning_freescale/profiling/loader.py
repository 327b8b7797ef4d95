"""Time spent waiting for the data loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_freescale.profiling.timeline import Timeline


class ObservedLoader:
    """Any iterable of batches, with every ``next`` on the timeline. Looks like the loader it wraps."""

    def __init__(self, loader: Any, timeline: Timeline) -> None:
        self.__dict__.update(_loader=loader, _timeline=timeline)
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            # in the instance: a runtime-checkable protocol does not look at __getattr__
            self.__dict__.update(state_dict=loader.state_dict, load_state_dict=loader.load_state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy and pickle ask before there is a loader
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)  # Lightning sets worker_init_fn and resets _iterator

    def __len__(self) -> int:
        return len(self._loader)

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
