"""A profiler of the time of training steps, for any training loop. It only needs numpy and torch.

A duration has four forms between the code and the page:

1. ``Span`` and ``Collective`` of a ``StepRecord``: stamps, which are numbers or CUDA events that may be pending.
2. ``Interval`` and ``ResolvedCollective`` of a ``ResolvedStep``: seconds on rank 0's clock. A step's spans may overlap;
   ``intervals_of`` cuts it so that every moment lies in one interval.
3. Sums of intervals: ``StepBreakdown`` of a step, ``RankSegments`` between its collectives.
4. Rows of the report and slices of the trace.
"""

from lightning_freescale.profiling.analysis.breakdown import StepBreakdown, attribute, bubble
from lightning_freescale.profiling.analysis.imbalance import PlannedStep
from lightning_freescale.profiling.hang_watch import HangWatch
from lightning_freescale.profiling.profiler import ProfilerOptions, StepProfiler
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.ddp_exchanges import ddp_waits_on
from lightning_freescale.profiling.recording.timeline import Timeline, batches_on
from lightning_freescale.profiling.reporting.document import RunInfo
from lightning_freescale.profiling.reporting.report import BubbleReport

__all__ = [
    "BubbleReport",
    "HangWatch",
    "PlannedStep",
    "ProfilerOptions",
    "RunInfo",
    "StepBreakdown",
    "StepProfiler",
    "Timeline",
    "attribute",
    "batches_on",
    "bubble",
    "collectives_on",
    "ddp_waits_on",
]
