"""Where the time of a training step goes. Needs neither Lightning nor TorchRec."""

from lightning_freescale.profiling.analysis.breakdown import StepBreakdown, attribute, bubble
from lightning_freescale.profiling.options import Options
from lightning_freescale.profiling.profiler import StepProfiler
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.ddp import ddp_waits_on
from lightning_freescale.profiling.recording.loader import ObservedLoader
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.facts import RunInfo
from lightning_freescale.profiling.reporting.report import BubbleReport

__all__ = [
    "BubbleReport",
    "ObservedLoader",
    "Options",
    "RunInfo",
    "StepBreakdown",
    "StepProfiler",
    "Timeline",
    "attribute",
    "bubble",
    "collectives_on",
    "ddp_waits_on",
]
