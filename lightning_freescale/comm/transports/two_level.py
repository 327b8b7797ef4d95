"""Several hosts: copy engines between the GPUs of a host, the network between hosts, both at the same time."""

from __future__ import annotations

from collections.abc import Callable

from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.host.transport import HostTransport
from lightning_freescale.comm.transports.peer.transport import PeerTransport


class TwoLevelTransport:
    """Moves CUDA tensors between hosts whose GPUs each form an NVLink domain. Not tested on GPU.

    The parts for peers on the same host are on the GPU's streams while the CPU moves the others; between its chunks it puts the
    next ones there. What it does for other hosts waits for no peer on this one, so the two cannot hold each other up.

    ``near`` is between the ranks of this host, this one included, ``host`` between all ranks of the group.
    """

    def __init__(self, near: PeerTransport, host: HostTransport, size: int) -> None:
        self._near, self._host = near, host
        self.far = [rank for rank in range(size) if rank not in near.ranks]

    def move(self, transfer: Transfer, pause: Callable[[], None]) -> None:
        """Fill ``transfer.incoming``. ``pause`` is called between chunks.

        Raises:
            DistBackendError: a peer is gone, did not come in time, or has given up.
        """
        with self._near.start_transfer(transfer) as progress:

            def advance_and_pause() -> None:
                progress.advance()
                pause()

            self._host.move(transfer, advance_and_pause, self.far)
            self._near.complete_transfer(progress, transfer.timeout, pause)

    def close(self) -> None:
        """Let go of the memory and streams for this host; who made the host's transport closes it."""
        self._near.close()
