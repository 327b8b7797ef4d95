"""Lightning callbacks."""

from lightning_freescale.callbacks.bubble_profiler import BubbleProfiler

__all__ = ["BubbleProfiler"]
