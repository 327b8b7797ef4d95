"""Where the time of a training step goes. Needs neither Lightning nor TorchRec."""

from lightning_freescale.profiling.explaining.parts import Parts, attribute, bubble
from lightning_freescale.profiling.recording.timeline import Timeline

__all__ = ["Parts", "Timeline", "attribute", "bubble"]
