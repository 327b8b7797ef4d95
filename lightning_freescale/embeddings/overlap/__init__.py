"""Fetch the rows of the next batch while this one computes, exactly."""

from lightning_freescale.embeddings.overlap.engine import OverlapEngine
from lightning_freescale.embeddings.overlap.report import OverlapReport
from lightning_freescale.embeddings.overlap.split_backward import WeightGradientsLast, WindowGradients

__all__ = ["OverlapEngine", "OverlapReport", "WeightGradientsLast", "WindowGradients"]
