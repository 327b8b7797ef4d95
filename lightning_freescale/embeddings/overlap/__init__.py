"""Fetch the rows of the next batch while this one computes, exactly."""

from lightning_freescale.embeddings.overlap.engine import OverlapEngine

__all__ = ["OverlapEngine"]
