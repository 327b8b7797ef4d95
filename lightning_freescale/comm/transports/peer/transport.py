"""Inside one NVLink domain: copy engines write into the memory of the other GPUs, and streams wait for words in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.gpu.driver import Driver, nap
from lightning_freescale.comm.transports.peer.link import Link
from lightning_freescale.comm.transports.peer.symmetric_buffer import SymmetricBuffer
from lightning_freescale.comm.transports.peer.transfer_progress import TransferProgress

_LOOK = 0.1
"""Seconds without progress after which to see whether a peer has given up."""
_GRACE = 5.0
"""Seconds for the GPU to drain after a failure."""


class PeerTransport:
    """Moves CUDA tensors between ranks of one NVLink domain; all of a group, or those of one host.

    A chunk waits on the sender's stream until its slot in the receiver's memory is free, is copied there, and is counted there;
    the receiver's stream waits for the count, copies the slot to its place, and counts it as taken in the sender's memory.
    Waits and counts are stream memory operations and the copies are given to copy engines, so no kernel is launched (within a
    GPU as far as :class:`CudaDriver` can ask for it). A chunk costs the CPU three driver calls at either end, so where NVLink
    is to be filled, pass a larger ``chunk_bytes`` than a network needs.

    If a peer does not come in time, this rank tells its peers that it gives up, and then writes the counts itself that its
    streams wait for, so that they drain. What they copy then is wrong; every rank looks whether a peer has given up before it
    takes what has arrived for good. The transport is of no use afterwards.

    Not tested on GPU.

    Args:
        driver: of the device.
        slab: the memory, mapped on all ranks.
        ranks: of the group, in the order of their places in the slab.
        names: global rank of every rank of the group, for errors.
        start: of all counters.
    """

    name = "peer"

    def __init__(self, driver: Driver, slab: SymmetricBuffer, ranks: list[int], names: list[int], start: int = 0) -> None:
        self.ranks, self._names = ranks, names
        self._driver = driver
        with driver.active():
            self._link: Link | None = Link(driver, slab, ranks, start)
            self._heard = driver.pinned(len(slab.words(slab.place)))
        self._closed: str = ""
        self._busy = threading.Lock()
        self._stuck: list[object] = []

    def move(self, transfer: Transfer, pause: Callable[[], None]) -> None:
        """Fill ``transfer.incoming``. ``pause`` is called between rounds.

        Raises:
            DistBackendError: a peer did not come in time or has given up.
        """
        with self.moving(transfer) as flow:
            self.finish(flow, transfer.timeout, pause)

    @contextmanager
    def moving(self, transfer: Transfer) -> Iterator[TransferProgress]:
        """Begin a transfer, of the parts for and from :attr:`ranks`; :meth:`finish` ends it. A failure releases the GPU."""
        with self._busy, self._driver.active():
            link = self._check(transfer)
            flow = TransferProgress(link, transfer)
            try:
                flow.advance()
                yield flow
            except BaseException as error:
                self._closed = self._closed or str(error) or type(error).__name__
                self._release(link, flow)
                raise

    def finish(self, flow: TransferProgress, timeout: timedelta, pause: Callable[[], None]) -> None:
        """Wait until all bytes are in their place."""
        progress = looked = time.monotonic()
        while not flow.done:
            now = time.monotonic()
            if flow.advance():
                progress = looked = now
                pause()
            elif now - progress > timeout.total_seconds():
                raise dist.DistBackendError(self._late(flow, timeout))
            elif now - looked > _LOOK:
                looked = now
                self._look()
            else:
                nap(now - progress)
        self._look()

    def close(self) -> None:
        """End what is under way, and let go of memory and streams."""
        self._closed = self._closed or "it has been shut down"
        if not self._busy.acquire(timeout=_GRACE):
            return
        try:
            if self._link is not None and not self._stuck:
                with self._driver.active():
                    self._driver.close()
                self._link = None
        finally:
            self._busy.release()

    def _look(self) -> None:
        if self._closed:
            raise dist.DistBackendError("the peer transport was closed")
        if (words := self._words()) is None or words[-1]:
            raise dist.DistBackendError("a peer has given up; its own error says why")

    def _check(self, transfer: Transfer) -> Link:
        if self._link is None or self._closed:
            raise dist.DistBackendError(f"the peer transport is closed: {self._closed}")
        if transfer.device != self._driver.device:
            raise dist.DistBackendError(
                f"the tensors are on {transfer.device}, the group was made on {self._driver.device}: call "
                "torch.cuda.set_device before the group is made"
            )
        return self._link

    def _late(self, flow: TransferProgress, timeout: timedelta) -> str:
        words = self._words()
        told = f"rank {', '.join(str(self._names[rank]) for rank in flow.late(words))}" if words else "a rank"
        return f"{told} did not come within the timeout of {timeout.total_seconds():g} s"

    def _words(self) -> list[int] | None:
        """The words of this rank's slab, once the GPU has copied them."""
        link = self._link
        assert link is not None
        self._driver.copy(link.rescue, self._heard, link.slab.words(link.slab.place))
        event, begun = self._driver.event(link.rescue), time.monotonic()
        while not event.query():
            if (waited := time.monotonic() - begun) > _GRACE:
                return None
            nap(waited)
        return self._heard.tolist()

    def _release(self, link: Link, flow: TransferProgress) -> None:
        """Tell the peers, then let the streams go on with whatever is in the slots."""
        self._stuck = [flow, link]  # the GPU may still write there
        with suppress(RuntimeError):  # of a GPU that is of no use any more
            link.give_up()
            flow.seal()
            begun = time.monotonic()
            while not flow.drained and (waited := time.monotonic() - begun) < _GRACE:
                link.count_for_peers()
                nap(waited)
            if flow.drained:
                self._stuck = []
