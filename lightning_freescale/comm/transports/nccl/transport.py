"""NCCL's collectives by copy engines, which occupy no streaming multiprocessor: its zero-CTA policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.gpu.driver import Driver, nap

_ALIGN = 16


class Nccl(Protocol):
    """A communicator and its memory.

    Attributes:
        window: uint8 of shape ``[2, size * slot]``, in a symmetric window.
    """

    window: Tensor

    def exchange(self, stream: Any, output: Tensor, input: Tensor) -> None:
        """Enqueue the all-to-all of uint8 tensors of shape ``[size * width]``."""

    def abort(self) -> None:
        """End what is under way; called once."""


class ZeroCtaTransport:
    """Moves CUDA tensors by NCCL's all-to-all of equal parts, between ranks of one NVLink domain.

    NCCL uses copy engines for it only if both buffers are in a symmetric window, and never for explicit splits; else it
    launches kernels and does not say so. So parts are packed into equal slots of a window, in rounds of a chunk per pair, each
    as wide as the largest part of any rank asks for: uneven parts cost the padding. To see that copy engines are used, set
    ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING``: NCCL then prints "Copy Engine".

    If a rank does not come in time, NCCL's communicator is aborted, and the transport is of no use afterwards. Not tested on
    GPU.

    Args:
        driver: of the device, for packing and unpacking.
        nccl: between the ranks of the group.
        size: of the group.
    """

    name = "nccl-zero-cta"

    def __init__(self, driver: Driver, nccl: Nccl, size: int) -> None:
        self._driver, self._nccl, self._size = driver, nccl, size
        self._slot = nccl.window.shape[1] // size
        with driver.active():
            self._stream = driver.stream()
        self._busy, self._closed = threading.Lock(), False
        self._kept: Transfer | None = None

    def move(self, transfer: Transfer, pause: Callable[[], None]) -> None:
        """Fill ``transfer.incoming``. ``pause`` is called between rounds.

        Raises:
            DistBackendError: the ranks did not all come in time.
        """
        with self._busy, self._driver.active():
            self._kept = transfer  # the GPU may still write there after a failure
            self._driver.after(self._stream, transfer.issued)
            for begin in range(0, transfer.largest, self._slot):
                if self._closed:
                    raise dist.DistBackendError("the transport is closed")
                pause()
                self._round(transfer, begin, aligned(min(self._slot, transfer.largest - begin)))
                self._wait(transfer.timeout)
            self._kept = None

    def close(self) -> None:
        """End what is under way, and let go of NCCL's communicator and the stream."""
        self._end()
        with self._busy, self._driver.active():
            self._driver.close()

    def _round(self, transfer: Transfer, begin: int, width: int) -> None:
        """Enqueue bytes ``begin`` to ``begin + width`` of every part."""
        packed, arrived = (half[: self._size * width] for half in self._nccl.window)
        for target, part in zip(packed.split(width), transfer.outgoing):
            self._copy(target, part[begin : begin + width])
        self._nccl.exchange(self._stream, arrived, packed)
        for source, part in zip(arrived.split(width), transfer.incoming):
            self._copy(part[begin : begin + width], source)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        length = min(len(target), len(source))
        if length:
            self._driver.copy(self._stream, target[:length], source[:length])

    def _wait(self, timeout: timedelta) -> None:
        event, begun = self._driver.event(self._stream), time.monotonic()
        while not event.query():
            if (waited := time.monotonic() - begun) > timeout.total_seconds():
                self._end()
                raise dist.DistBackendError(f"not all ranks came within the timeout of {timeout.total_seconds():g} s")
            if self._closed:
                raise dist.DistBackendError("the transport was closed")
            nap(waited)

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self._nccl.abort()


def aligned(length: int) -> int:
    """``length`` bytes, rounded up."""
    return -(-length // _ALIGN) * _ALIGN
