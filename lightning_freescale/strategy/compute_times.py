"""How long this rank computed in each of its last steps, by the strategy's timeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_freescale.profiling.analysis.breakdown import attribute
from lightning_freescale.profiling.recording.records import StepRecord, resolve
from lightning_freescale.profiling.recording.timeline import Timeline

_KEPT = 32


class ComputeTimes:
    """Opens and closes the timeline's steps, unless a profiler does, and knows the compute times of the last ones.

    Args:
        timeline: enabled.

    Attributes:
        step: number of the step that has begun last, from 0 on.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.step = -1
        self._timeline, self._drives = timeline, not timeline.driven
        self._records: dict[int, StepRecord] = {}
        timeline.on_step = self._keep

    @property
    def on_host(self) -> bool:
        """Whether a step that has ended was computed, too: nothing runs behind the host."""
        return self._timeline.on_host

    def start_step(self) -> None:
        """Begin the next step; call it before ``training_step``."""
        if self._drives:
            self._timeline.close_step()
        self.step += 1
        if self._drives:
            self._timeline.open_step()

    def seconds(self, step: int) -> float:
        """Return the compute time of a step that has ended, 0 if it was not recorded or is too long ago.

        Waits for the device, if that has not come so far.
        """
        return self._seconds(self._records.get(step))

    def later(self, step: int) -> Callable[[], float]:
        """Return what will tell the same, however long ago that will be."""
        return partial(self._seconds, self._records.get(step))

    def _seconds(self, record: StepRecord | None) -> float:
        clock = self._timeline.clock
        if record is None or clock is None:
            return 0.0
        (resolved,) = resolve([record], clock)
        # the rank's own arrivals: whatever it waited for, it did not compute
        return attribute(resolved, [collective.arrive for collective in resolved.collectives]).compute

    def stop(self) -> None:
        """Stop recording; the timeline goes off unless a profiler drives it."""
        self._timeline.on_step = None
        if self._drives:
            self._timeline.disable()

    def _keep(self, record: StepRecord) -> None:
        self._records[self.step] = record
        self._records.pop(self.step - _KEPT, None)
