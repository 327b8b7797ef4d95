"""A page on which every assumption of a prediction can be changed: one file, which needs no network."""

from lightning_freescale.simulator.page.writer import write_page

__all__ = ["write_page"]
