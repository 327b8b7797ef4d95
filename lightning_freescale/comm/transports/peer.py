"""The transports inside NVLink domains: copy engines write into other GPUs, and streams wait for words in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_freescale.comm.transports.cuda_driver import WRAP, CudaDriver, nap
from lightning_freescale.comm.transports.host import HostTransport
from lightning_freescale.comm.transports.peer_link import Link, PeerChunks, SymmetricBuffer
from lightning_freescale.comm.transports.transport import Transfer


class TransferProgress:
    """The progress of one transfer through its rounds."""

    def __init__(self, link: Link, transfer: Transfer) -> None:
        self._link = link
        self._transfer = transfer  # keeps its memory alive
        self._sent_before, self._received_before = list(link.sent), list(link.received)
        self._outgoing = PeerChunks(link, link.sending, transfer.outgoing)
        self._incoming = PeerChunks(link, link.receiving, transfer.incoming)
        own = link.ranks[link.buffer.rank]
        source, target = transfer.outgoing[own].data_ptr(), transfer.incoming[own].data_ptr()
        self._own = source, target, len(transfer.outgoing[own]) if source != target else 0
        largest = max(self._outgoing.largest, self._incoming.largest, self._own[2])
        self._rounds = -(-largest // link.buffer.chunk)
        self._started = 0
        link.wait_event(transfer.issued)

    @property
    def is_done(self) -> bool:
        """Whether all bytes have arrived and have been sent."""
        return self._started == self._rounds and self._link.is_idle

    def advance(self) -> bool:
        """Enqueue rounds without waiting, and return whether any round has ended or started."""
        ended, started = self._link.forget_ended(), self._started
        while self._started < self._rounds and not self._link.is_full:
            self._enqueue(self._started)
            self._started += 1
        return ended or self._started > started

    def late_ranks(self, signals: list[int]) -> list[int]:
        """Return the ranks that this rank waits for, by its signal pad. If some made no progress, return only those."""
        link, arrived, consumed = self._link, signals, signals[len(self._link.ranks) :]
        behind = [
            peer
            for peer in link.peers
            if _ahead(link.received[peer], arrived[peer]) > 0 or _ahead(link.sent[peer] - 2, consumed[peer]) > 0
        ]
        unseen = [
            peer
            for peer in behind
            if _ahead(arrived[peer], self._received_before[peer]) <= 0 and _ahead(consumed[peer], self._sent_before[peer]) <= 0
        ]
        return sorted(link.ranks[peer] for peer in unseen or behind)

    def _enqueue(self, number: int) -> None:
        chunk, pointer = self._link.buffer.chunk, self._link.driver.pointer
        begin = number * chunk
        source, target, length = self._own
        own = None
        if length > begin:
            own = pointer(source + begin), pointer(target + begin), min(chunk, length - begin)
        self._outgoing.advance_to(begin)
        self._incoming.advance_to(begin)
        self._link.enqueue_round(self._outgoing, own, self._incoming, is_last=number == self._rounds - 1)


def _ahead(one: int, other: int) -> int:
    """Return the cyclic difference of two counts."""
    return (one - other + WRAP // 2) % WRAP - WRAP // 2


_CHECK_AFTER = 0.1
"""The time without progress, in seconds, after which to check whether a peer has given up."""
_GRACE = 5.0
"""The time for the GPU to drain after a failure, in seconds."""
_GIVEN_UP = "a peer has given up. The error of that rank states the reason"


class PeerTransport:
    """A :class:`.Transport` for CUDA tensors between ranks of one NVLink domain: all ranks of a group, or those of one host.

    A chunk takes these steps:

    1. The sender's stream waits until a slot in the receiver's memory is free, copies the chunk there, and counts it there.
    2. The receiver's stream waits for the count, copies the slot to its target, and counts it as consumed at the sender.

    Waits are stream memory operations, and copy engines write chunks and counts. No kernel is launched, except within a GPU if
    :class:`CudaDriver` cannot request a copy engine. A round has a chunk to and from every peer and takes at most nine driver
    calls, so chunks are large: the slots take ``PEER_BYTES`` on every GPU. A round sends half of it, 128 MiB, which takes a
    third of a millisecond at 400 GB/s.

    If a peer is late, this rank signals to its peers that it gives up. It then writes the awaited counts itself, so that its
    streams end. The bytes that they copy are wrong. Every rank therefore checks at the end of a transfer whether a peer has
    given up. The transport cannot be used afterwards.

    Tested between two processes on one GPU, not between GPUs.

    Args:
        buffer: the memory, mapped on all ranks.
        ranks: the ranks in the group, in the order of their ranks in the buffer.
        global_ranks: the global rank of every rank of the group, for errors.
        start: the first value of all counters.
    """

    def __init__(
        self, driver: CudaDriver, buffer: SymmetricBuffer, ranks: list[int], global_ranks: list[int], start: int = 0
    ) -> None:
        self.ranks, self._global_ranks = ranks, global_ranks
        self._driver = driver
        with driver.active():
            self._link: Link | None = Link(driver, buffer, ranks, start)
        self._closed = ""
        self._busy = threading.Lock()
        self._stuck: list[object] = []

    def move(self, transfer: Transfer, pause: Callable[[], None]) -> None:
        with self.start_transfer(transfer) as progress:
            self.complete_transfer(progress, transfer.timeout, pause)

    @contextmanager
    def start_transfer(self, transfer: Transfer) -> Iterator[TransferProgress]:
        """Start to move the parts for and from :attr:`ranks`. The block completes the transfer. A failure releases the GPU."""
        with self._busy, self._driver.active():
            link = self._check_open(transfer)
            progress = TransferProgress(link, transfer)
            try:
                progress.advance()
                yield progress
            except BaseException as error:
                self._closed = self._closed or str(error) or type(error).__name__
                self._drain(link, progress)
                raise

    def complete_transfer(self, progress: TransferProgress, timeout: timedelta, pause: Callable[[], None]) -> None:
        advanced = checked = time.monotonic()
        while not progress.is_done:
            now = time.monotonic()
            if progress.advance():
                advanced = checked = now
                pause()
            elif now - advanced > timeout.total_seconds():
                signals = self._read_signals()
                late = ", ".join(str(self._global_ranks[rank]) for rank in progress.late_ranks(signals)) if signals else ""
                missing = f"rank {late}" if signals else "a rank"
                raise dist.DistBackendError(f"{missing} did not respond within the timeout of {timeout.total_seconds():g} s")
            elif now - checked > _CHECK_AFTER:
                checked = now
                self._check_closed()
                if (signals := self._read_signals()) is None or signals[-1]:
                    raise dist.DistBackendError(_GIVEN_UP)
            else:
                nap(now - advanced)
        self._check_closed()
        assert self._link is not None
        if self._link.has_seen_failure:
            raise dist.DistBackendError(_GIVEN_UP)

    def close(self) -> None:
        self._closed = self._closed or "it has been shut down"
        if not self._busy.acquire(timeout=_GRACE):
            return
        try:
            if self._link is not None and not self._stuck:
                with self._driver.active():
                    self._driver.destroy_streams()
                self._link = None
        finally:
            self._busy.release()

    def _check_closed(self) -> None:
        if self._closed:
            raise dist.DistBackendError("the peer transport was closed")

    def _check_open(self, transfer: Transfer) -> Link:
        if self._link is None or self._closed:
            raise dist.DistBackendError(f"the peer transport is closed: {self._closed}")
        if transfer.device != self._driver.device:
            raise dist.DistBackendError(
                f"the tensors are on {transfer.device}, the group was created on {self._driver.device}: call "
                "torch.cuda.set_device before you create the group"
            )
        return self._link

    def _read_signals(self) -> list[int] | None:
        """Return the words of this rank's signal pad; None if the GPU does not copy them in time."""
        link = self._link
        assert link is not None
        event, begun = link.copy_signals(), time.monotonic()
        while not event.query():
            if (waited := time.monotonic() - begun) > _GRACE:
                return None
            nap(waited)
        return list(link.signals.tolist())

    def _drain(self, link: Link, progress: TransferProgress) -> None:
        """Signal the failure, and let the streams copy the current contents of the slots."""
        self._stuck = [progress, link]  # the GPU may still write there
        with suppress(RuntimeError):  # the GPU may have failed
            link.signal_failure()
            link.mark_end()
            begun, released = time.monotonic(), link.release_streams()
            while (waited := time.monotonic() - begun) < _GRACE:
                link.forget_ended()
                if released.query():
                    if link.is_idle:
                        self._stuck = []
                        return
                    released = link.release_streams()
                nap(waited)


class TwoLevelTransport:
    """A :class:`.Transport` for CUDA tensors between hosts whose GPUs each form an NVLink domain. Not tested on GPU.

    The GPU's streams move the parts for peers on the same host. At the same time, the CPU moves the other parts and enqueues
    the next rounds of the GPU between its chunks. The parts for other hosts wait for no peer on this host, so the two cannot
    block each other.

    ``near`` is the transport between the ranks of this host. ``host`` is that of all ranks of the group; its owner closes it.
    """

    def __init__(self, near: PeerTransport, host: HostTransport, size: int) -> None:
        self._near, self._host = near, host
        self.far = [rank for rank in range(size) if rank not in near.ranks]

    def move(self, transfer: Transfer, pause: Callable[[], None]) -> None:
        with self._near.start_transfer(transfer) as progress:

            def advance_and_pause() -> None:
                progress.advance()
                pause()

            self._host.move(transfer, advance_and_pause, self.far)
            self._near.complete_transfer(progress, transfer.timeout, pause)

    def close(self) -> None:
        self._near.close()
