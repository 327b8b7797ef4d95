"""Communication without the compute units of a GPU. This package needs only torch."""

from lightning_freescale.comm.options import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.process_group import BACKEND, ProcessGroupFreeScale, register_backend
from lightning_freescale.comm.transports.selection import TransportRefused

__all__ = ["BACKEND", "ProcessGroupFreeScale", "ProcessGroupFreeScaleOptions", "TransportRefused", "register_backend"]
register_backend()
