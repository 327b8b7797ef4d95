"""Communication that takes no compute units from what runs beside it. Needs torch alone."""

from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.process_group import BACKEND, FreeScaleGroup, register_backend

__all__ = ["BACKEND", "FreeScaleGroup", "LaneOptions", "register_backend"]
register_backend()
