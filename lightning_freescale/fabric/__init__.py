"""Lightning Fabric's strategy "freescale"."""

from lightning_freescale.fabric.strategy import FreeScaleFabricStrategy

__all__ = ["FreeScaleFabricStrategy"]
