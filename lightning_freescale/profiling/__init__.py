"""Where the time of a training step goes. Needs neither Lightning nor TorchRec."""

from lightning_freescale.profiling.explaining.parts import Parts, attribute, bubble
from lightning_freescale.profiling.options import Options
from lightning_freescale.profiling.profile import Profile
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.ddp import ddp_waits_on
from lightning_freescale.profiling.recording.loader import ObservedLoader
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.report import About, BubbleReport

__all__ = [
    "About",
    "BubbleReport",
    "ObservedLoader",
    "Options",
    "Parts",
    "Profile",
    "Timeline",
    "attribute",
    "bubble",
    "collectives_on",
    "ddp_waits_on",
]
