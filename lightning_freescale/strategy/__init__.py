"""The Lightning strategy ``"freescale"`` and what it does between Lightning's hooks."""

from lightning_freescale.strategy.freescale import FreeScaleStrategy

__all__ = ["FreeScaleStrategy"]
