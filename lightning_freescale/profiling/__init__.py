"""Where the time of a training step goes. Needs neither Lightning nor TorchRec."""

from lightning_freescale.profiling.attribution import Parts, attribute, bubble
from lightning_freescale.profiling.report import BubbleReport
from lightning_freescale.profiling.timeline import Timeline

__all__ = ["BubbleReport", "Parts", "Timeline", "attribute", "bubble"]
