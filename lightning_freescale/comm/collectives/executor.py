"""The executor of collectives: check the tensors, agree with the other ranks, move. A failure ends the lane on every rank."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._runtime.error_text import error_text
from lightning_freescale._runtime.worker import WorkerThread
from lightning_freescale.comm.collectives.eager_exchange import EagerExchange
from lightning_freescale.comm.collectives.handshake import CollectiveHandshake
from lightning_freescale.comm.options import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.transports.host import HostTransport
from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.transports.priority import PRIORITY_GATE
from lightning_freescale.comm.transports.selection import gather_topology, set_up_transport
from lightning_freescale.comm.transports.transport import RankBuffers, Transfer, Transport

BuffersForRanks = Callable[[int], RankBuffers]
"""A function that checks tensors and returns their buffers for the given number of ranks."""
GRACE_SECONDS = 0.5
"""The time for which a lane waits for posted messages when it shuts down."""
_LIVE: weakref.WeakSet[CollectiveExecutor] = weakref.WeakSet()


class CollectiveExecutor:
    """The executor of the all-to-alls and all-gathers of one lane, in order. The constructor is collective.

    Only this lane uses the part ``freescale`` of the store.

    Attributes:
        p2p: the lane's connections.
        topology: the hardware of the ranks.
        transport: the transport of CUDA tensors; None for torch's own backend.
        failure: why the lane has ended; empty if it is open.
    """

    def __init__(self, backend_opts: Any, options: ProcessGroupFreeScaleOptions, store: dist.Store) -> None:
        self.options = options
        self.failure = ""
        self._name = options.name or str(backend_opts.group_id)
        self._timeout = backend_opts.timeout
        self._issued = 0
        rank, size = backend_opts.group_rank, backend_opts.group_size
        store = dist.PrefixStore("freescale", store)
        ranks = list(backend_opts.global_ranks_in_group) or list(range(size))  # torch gives none for the default group
        self.p2p = GlooP2P(store, rank, size, self._timeout, ranks)
        self._handshake = CollectiveHandshake(self.p2p)
        self._worker = WorkerThread(f"freescale lane {self._name}")
        self._host = HostTransport(self.p2p, options)
        self._transport_store = dist.PrefixStore("transport", store)
        self._eager = EagerExchange(self.p2p, self._move_agreed)
        self._process = os.getpid()
        PRIORITY_GATE.lanes[options.priority] += 1
        _LIVE.add(self)
        self.transport: Transport | None = None
        try:
            self.topology = gather_topology(options, self.p2p)
            if options.transport != "auto":  # "auto" uses torch's own backend until another transport has passed its trial
                self.set_up_transport(options.transport)
        except BaseException as error:
            self.give_up(error)
            raise

    def set_up_transport(self, kind: str) -> None:
        """Move CUDA tensors by the transport of that name from now on, or raise on every rank. Collective."""
        self.transport = set_up_transport(kind, self.topology, self._host, self._transport_store, self._timeout)

    def run(
        self, name: str, outgoing: BuffersForRanks, incoming: BuffersForRanks, timeout: timedelta, background: bool
    ) -> Future[None]:
        """Start the next collective in the background, or complete it before the return.

        In the second case, the caller's thread runs it if no other job is queued.

        Raises:
            ValueError: the tensors do not fit or cannot be sent. The other ranks raise an error, too.
            DistBackendError: the lane has ended.
        """
        self.check_open(name)
        rank, size, timeout = self.p2p.rank, self.p2p.size, timeout if timeout > timedelta(0) else self._timeout
        number, self._issued = self._issued, self._issued + 1
        try:
            transfer = Transfer.from_buffers(name, outgoing(size), incoming(size), rank, timeout, number)
        except Exception as error:
            nothing = [torch.empty(0, dtype=torch.uint8)] * size
            empty = Transfer(name, nothing, nothing, 0, torch.device("cpu"), timeout, number)
            sent = self._worker.run(partial(self._execute, empty, str(error) or type(error).__name__)).exception()
            if sent is not None and not isinstance(sent, Exception):
                raise sent from None
            raise ValueError(self._locate(name, str(error))) from error
        if transfer.device.type == "cuda":
            transfer.issued = torch.cuda.current_stream(transfer.device).record_event()
        job = partial(self._execute, transfer)
        return self._worker.submit(job) if background else self._worker.run(job)

    def exchange(
        self, received: Tensor, send: Tensor, gets: Sequence[int], gives: Sequence[int], timeout: timedelta | None
    ) -> None:
        """Run :meth:`.EagerExchange.exchange` on the caller's thread, without waiting for queued jobs."""
        self.check_open("exchange")
        try:
            return self._eager.exchange(received, send, gets, gives, timeout or self._timeout)
        except BaseException as error:
            failed: Exception = self._end_lane("exchange", error)
            if isinstance(error, ValueError):
                failed = ValueError(self._locate("exchange", str(error)))
            elif not isinstance(error, Exception):
                raise
        raise failed  # without a context, whose frames would keep the messages and the connections alive

    def check_open(self, name: str) -> None:
        if self.failure:
            raise dist.DistBackendError(self._locate(name, self.failure))

    def give_up(self, error: BaseException) -> None:
        """End the lane because its group cannot be created, and send the reason to the other ranks."""
        self._end_lane("set-up", error)
        self.abort()

    def wait_for_pending_works(self) -> None:
        self._worker.stop(self._timeout.total_seconds() + 1.0)  # a job without progress ends by itself

    def abort(self) -> None:
        if self in _LIVE:
            _LIVE.discard(self)
            PRIORITY_GATE.lanes[self.options.priority] -= 1
        self.failure = self.failure or "it has been shut down"
        # the thread ends soon if its peers are alive; after an immediate close, it might wait for a truncated message
        self.p2p.refuse_more()
        self._worker.stop(GRACE_SECONDS)
        self._handshake.drop_receives()
        self._eager.drop_receives()
        self.p2p.close_connections()
        self._worker.stop(1.0)
        self._host.close()
        if self.transport is not None:
            self.transport.close()

    def _execute(self, transfer: Transfer, refusal: str = "") -> None:
        try:
            if self.failure:
                raise dist.DistBackendError(self.failure)
            # the tensors may be inference tensors, which only this mode may write
            with torch.inference_mode(), PRIORITY_GATE.track(self.options.priority) as activity:
                pause = partial(PRIORITY_GATE.yield_to_higher, activity)
                with torch.cuda.device(transfer.device) if transfer.device.type == "cuda" else nullcontext():
                    self._agree_and_move(transfer, refusal, pause)
        except BaseException as error:
            failed = self._end_lane(transfer.name, error)
            raise (failed if isinstance(error, Exception) else error) from None

    def _agree_and_move(self, transfer: Transfer, refusal: str, pause: Callable[[], None]) -> None:
        transport = (self.transport if transfer.device.type == "cuda" else None) or self._host
        # the host transport posts its first chunks together with the headers, with their sizes as tags
        move = self._host.start_transfer(transfer) if transport is self._host else partial(transport.move, transfer)
        self._handshake.exchange_headers(transfer, refusal)
        move(pause)

    def _move_agreed(self, transfer: Transfer) -> None:
        with PRIORITY_GATE.track(self.options.priority) as activity:
            self._host.move(transfer, partial(PRIORITY_GATE.yield_to_higher, activity))

    def _end_lane(self, name: str, error: BaseException) -> dist.DistBackendError:
        # any failure ends the lane, because gloo cannot safely withdraw messages that are partly posted
        text = str(error) if isinstance(error, dist.DistBackendError) else error_text(error)
        located = self._locate(name, self.failure or text)
        self.failure = self.failure or located
        self._handshake.drop_receives()
        self._eager.drop_receives()
        self.p2p.abort(located)
        self._host.close()
        return dist.DistBackendError(located)

    def _locate(self, name: str, text: str) -> str:
        return text if text.startswith("freescale") else f"freescale {name}, lane {self._name!r}: {text}"


class TransferWork(dist.Work):
    """A collective that a lane runs; ``done`` is the future of its job, which fills the tensors ``results``."""

    def __init__(self, done: Future[None], results: list[Tensor]) -> None:
        super().__init__()
        self._done, self._results = done, results

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the tensors are complete, on CUDA as well. Raise DistBackendError if the collective fails."""
        try:
            error = self._done.exception(timeout.total_seconds() if timeout > timedelta(0) else None)
        except TimeoutError as late:
            raise dist.DistBackendError(f"not done within {timeout.total_seconds():g} s") from late
        if isinstance(error, Exception):
            raise dist.DistBackendError(str(error)) from None  # a new error, whose frames do not form a cycle with the future
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        return self._done.exception() if self._done.done() else None

    def get_future(self) -> torch.futures.Future[Any]:
        device = self._results[0].device if self._results else torch.device("cpu")
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        self._done.add_done_callback(partial(self._resolve, future))
        return future

    def _resolve(self, future: torch.futures.Future[Any], done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(self._results)
        else:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


@atexit.register
def _abort_all() -> None:
    # a thread that waits for a peer while the interpreter exits would crash it
    for executor in list(_LIVE):
        if executor._process == os.getpid():  # the connections of other executors belong to the parent process
            executor.abort()
