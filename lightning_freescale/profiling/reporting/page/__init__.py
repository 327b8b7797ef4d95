"""Bubble reports as one HTML file that needs nothing else."""

from lightning_freescale.profiling.reporting.page.writer import write_page

__all__ = ["write_page"]
