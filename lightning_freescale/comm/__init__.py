"""Communication that takes no compute units from what runs beside it. Needs torch alone."""

from lightning_freescale.comm.options import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.process_group import BACKEND, ProcessGroupFreeScale, register_backend
from lightning_freescale.comm.transports.selection import TransportRefused

__all__ = ["BACKEND", "ProcessGroupFreeScale", "ProcessGroupFreeScaleOptions", "TransportRefused", "register_backend"]
register_backend()
