"""The strategy "freescale" of Lightning Fabric."""

from lightning_freescale.fabric.strategy import FreeScaleFabricStrategy

__all__ = ["FreeScaleFabricStrategy"]
