"""The transport through NCCL's zero-CTA policy, which uses copy engines and no streaming multiprocessor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._runtime.worker import call_on_daemon
from lightning_freescale.comm.transports.cuda_driver import CudaDriver, align, nap
from lightning_freescale.comm.transports.peer_link import PEER_BYTES
from lightning_freescale.comm.transports.transport import Transfer

_ALIGN = 16
_GRACE = 5.0
"""The time for NCCL to end its collectives after a failure, in seconds."""


class NcclCommunicator:
    """A separate communicator with the zero-CTA policy, and its memory. The constructor is collective. Not tested on GPU.

    NCCL 2.31 has a policy per collective, but torch cannot pass it up to version 2.14. A communicator for all lanes would also
    need one order of the collectives of all lanes on all ranks. Lanes run on separate threads, and ranks agree within a lane.

    The memory comes from NCCL's allocator through a pool of torch. The pool is registered after the allocation, because later
    allocations do not become part of the window.

    Attributes:
        window: uint8 of shape ``[2, size * slot]`` in a symmetric window, at most ``PEER_BYTES``. All ranks have the same slot.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, timeout: timedelta, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        options._timeout = 2 * timeout  # then NCCL's watchdog may end the process; the transport raises earlier
        self._nccl: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._nccl.eager_connect_single_device(device)  # a window belongs to a communicator
        self._pool = torch.cuda.MemPool(self._nccl.mem_allocator)
        slot = PEER_BYTES // (2 * size) // _ALIGN * _ALIGN
        with torch.cuda.use_mem_pool(self._pool):
            self.window = torch.empty((2, size * slot), dtype=torch.uint8, device=device)
        self._nccl.register_mem_pool(self._pool, symm=True)

    def all_to_all(self, stream: Any, output: Tensor, input: Tensor) -> None:
        """Enqueue the all-to-all of uint8 of shape ``[size * width]``. Split sizes would make NCCL launch kernels."""
        options = dist.AllToAllOptions()
        options.asyncOp = False  # otherwise NCCL waits for peers on a stream that torch may share with other work
        with torch.cuda.stream(stream):
            self._nccl.alltoall_base(output, input, [], [], options)

    def abort(self) -> None:
        """End collectives in flight. Call this once. It may not return while a stream waits for a peer."""
        self._nccl.abort()


class ZeroCtaTransport:
    """A :class:`.Transport` for CUDA tensors through NCCL's all-to-all of equal parts, in one NVLink domain.

    NCCL uses copy engines only if both buffers are in a symmetric window and there are no split sizes. Otherwise, it launches
    kernels without a warning, which :meth:`require_copy_engines` detects. The parts are therefore packed into equal slots of a
    window, in rounds of one slot per pair of ranks. The largest part of any rank determines the width of the slots, so a
    transfer moves ``size`` times the largest part from every rank. A round is as wide as the rest of the largest part, and at
    most as one slot.

    If a rank is late, the transport aborts NCCL's communicator and cannot be used afterwards. Not tested on GPU.
    """

    def __init__(self, driver: CudaDriver, communicator: NcclCommunicator, size: int) -> None:
        self._driver = driver
        self._communicator, self._size = communicator, size
        self._slot = communicator.window.shape[1] // size
        with driver.active():
            self._stream = driver.create_stream()
        self._busy = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._kept: Transfer | None = None

    def require_copy_engines(self, timeout: timedelta) -> None:
        """Raise a RuntimeError if NCCL launches kernels, or no copy, for an all-to-all in the window. Collective.

        The first all-to-all connects the ranks and runs. The second one is captured and does not run. While NCCL is captured,
        it enqueues single copies instead of a batch. The check therefore shows that NCCL selects copy engines, but not that
        the GPU executes a batch without kernels.
        """
        packed, arrived = self._communicator.window
        all_to_all = partial(self._communicator.all_to_all, self._stream, arrived, packed)
        with self._driver.active():
            all_to_all()
            self._wait(timeout)
            kernels, copies = self._driver.count_kernels_and_copies(self._stream, all_to_all)
        if kernels:
            raise RuntimeError(
                f"NCCL launches {kernels} kernels for an all-to-all in a symmetric window instead of using copy engines. Unset "
                "NCCL_CTA_POLICY, NCCL_WIN_ENABLE, NCCL_CUMEM_ENABLE, NCCL_P2P_DISABLE and NCCL_P2P_LEVEL in the environment, "
                "/etc/nccl.conf and ~/.nccl.conf. NCCL_DEBUG=INFO prints which of them NCCL reads"
            )
        if not copies:
            raise RuntimeError(
                f"NCCL enqueues no copy for an all-to-all on the stream of the transport: torch {torch.__version__} may use "
                "another stream. Update torch, or pass 'peer'"
            )

    def move(self, transfer: Transfer, pause: Callable[[], None]) -> None:
        with self._busy, self._driver.active():
            self._kept = transfer  # the GPU may still write there after a failure
            self._driver.wait_event(self._stream, transfer.issued)
            for begin in range(0, transfer.largest, self._slot):
                if self._closed:
                    raise dist.DistBackendError("the transport is closed")
                pause()
                width = align(min(self._slot, transfer.largest - begin), _ALIGN)
                packed, arrived = (half[: self._size * width] for half in self._communicator.window)
                self._copy(packed.split(width), [part[begin : begin + width] for part in transfer.outgoing])
                self._communicator.all_to_all(self._stream, arrived, packed)
                self._copy([part[begin : begin + width] for part in transfer.incoming], arrived.split(width))
                self._wait(transfer.timeout)
            self._kept = None

    def close(self) -> None:
        self._abort()
        if not self._busy.acquire(timeout=_GRACE):  # a call of NCCL does not return
            return
        try:
            with self._driver.active():
                self._driver.destroy_streams()
        finally:
            self._busy.release()

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy each source to its target, up to the length of the shorter one."""
        copies = [(target, source, min(len(target), len(source))) for target, source in zip(targets, sources)]
        copies = [each for each in copies if each[2]]
        self._driver.copy(
            self._stream,
            [self._driver.pointer(target.data_ptr()) for target, _, _ in copies],
            [self._driver.pointer(source.data_ptr()) for _, source, _ in copies],
            [length for _, _, length in copies],
        )

    def _wait(self, timeout: timedelta) -> None:
        event, begun = self._stream.record_event(), time.monotonic()
        while not event.query():
            if (waited := time.monotonic() - begun) > timeout.total_seconds():
                self._abort()
                raise dist.DistBackendError(f"not all ranks responded within the timeout of {timeout.total_seconds():g} s")
            if self._closed:
                break
            nap(waited)
        if self._closed:  # even if the stream has ended: after an abort, the received bytes are not those that were sent
            raise dist.DistBackendError("the transport was closed")

    def _abort(self) -> None:
        with self._closing:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            # NCCL frees memory, for which CUDA waits until the streams end. If a peer never comes, only this thread waits.
            wait([call_on_daemon(self._communicator.abort, "freescale abort")], _GRACE)
