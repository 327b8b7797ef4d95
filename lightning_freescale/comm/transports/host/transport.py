"""Through host memory and the network card, driven by the CPU: no kernel is launched.

The way of FreeScale's SM-free communication (arXiv 2604.24073): device to pinned memory, chunk by chunk over the network,
pinned memory to device, the three stages at work on different chunks at the same time. CPU tensors take the middle stage only.
Chunks go directly to their rank, not around a ring: the bytes that leave each rank are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch

from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.host.schedule import EXACT, InFlightWindow, P2PSchedule
from lightning_freescale.comm.transports.host.staging import DeviceStaging, HostStaging, Staging


class HostTransport:
    """Moves CPU and CUDA tensors over a :class:`GlooP2P`."""

    name = "host"

    def __init__(self, wire: GlooP2P, options: LaneOptions) -> None:
        self._wire, self._options = wire, options
        self._stagings: dict[torch.device, DeviceStaging] = {}

    def begin(self, transfer: Transfer, ranks: Collection[int] | None = None) -> Callable[[Callable[[], None]], None]:
        """Post what comes first, which may be before the ranks have agreed.

        Returns:
            What fills ``transfer.incoming``, that of ``ranks`` only, if given; as :meth:`move`.
        """
        served, pace = range(self._wire.size) if ranks is None else ranks, InFlightWindow.of(self._options)
        rounds = P2PSchedule(self._wire, self._staging(transfer.device), transfer, self._options.chunk_bytes, served)
        rounds.begin(pace, early=self._options.chunk_bytes <= EXACT)
        return partial(rounds.finish, pace=pace)

    def move(self, transfer: Transfer, pause: Callable[[], None], ranks: Collection[int] | None = None) -> None:
        """Fill ``transfer.incoming``, that of ``ranks`` only, if given. ``pause`` is called between chunks."""
        self.begin(transfer, ranks)(pause)

    def close(self) -> None:
        """Let go of pinned memory and streams, once no copy is under way: its tensors may be freed."""
        for staging in self._stagings.values():
            staging.close()
        self._stagings.clear()

    @property
    def pinned_in_use(self) -> int:
        """Bytes of pinned memory that a chunk is in."""
        return sum(staging.pinned_in_use for staging in self._stagings.values())

    def _staging(self, device: torch.device) -> Staging:
        if device.type == "cpu":
            return HostStaging()
        if device not in self._stagings:
            self._stagings[device] = DeviceStaging(device, self._options.pinned_bytes)
        return self._stagings[device]
