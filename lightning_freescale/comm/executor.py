"""How a collective runs: checked, agreed upon, moved, and what becomes of the lane if that fails."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale._worker import WorkerThread
from lightning_freescale.comm.handshake import CollectiveHandshake
from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.parts import RankBuffers
from lightning_freescale.comm.priority import TRAFFIC
from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.base import Transport
from lightning_freescale.comm.transports.host.transport import HostTransport
from lightning_freescale.comm.transports.topology import choose

Cut = Callable[[int], RankBuffers]
"""Makes the parts for so many ranks."""
_NO_TIME = timedelta(0)
_LIVE: weakref.WeakSet[CollectiveExecutor] = weakref.WeakSet()


class CollectiveExecutor:
    """Runs the all-to-alls and all-gathers of one group, in order. Creating it is collective.

    Args:
        made: what ``torch.distributed`` gives a backend: store, rank, size, timeout.
        options: of the lane.

    Attributes:
        transport: what moves CUDA tensors, None for torch's own backend. CPU tensors go through the host.
        failure: why the lane has ended, if it has.
    """

    def __init__(self, made: Any, options: LaneOptions) -> None:
        self.options, self.failure = options, ""
        self._name, self._timeout, self._count = options.name or str(made.group_id), made.timeout, 0
        store, ranks = dist.PrefixStore("freescale", made.store), list(made.global_ranks_in_group)
        ranks = ranks or list(range(made.group_size))  # torch tells none for the default group
        self._wire = GlooP2P(store, made.group_rank, made.group_size, made.timeout, ranks)
        self._agreement, self._lane = CollectiveHandshake(self._wire), WorkerThread(f"freescale lane {self._name}")
        self._host = HostTransport(self._wire, options)
        self.transport = choose(options, self._wire, self._host, dist.PrefixStore("topology", store), made.timeout)
        self._process = os.getpid()
        if options.transport != "native":
            TRAFFIC.open(options.priority)
        _LIVE.add(self)

    def prepare(self, name: str, outgoing: Cut, incoming: Cut, timeout: timedelta) -> Transfer:
        """The next collective.

        Raises:
            ValueError: the tensors do not fit or cannot be sent; the other ranks have been told.
            DistBackendError: the lane has ended.
        """
        if self.failure:
            raise dist.DistBackendError(self._told(name, self.failure))
        number, self._count = self._count, self._count + 1
        rank, size, timeout = self._wire.rank, self._wire.size, timeout if timeout > _NO_TIME else self._timeout
        try:
            transfer = Transfer.of(name, outgoing(size), incoming(size), rank, timeout, number)
        except Exception as error:
            nothing = Transfer.of(name, RankBuffers.none(size), RankBuffers.none(size), rank, timeout, number)
            told = self._lane.run(partial(self._move, nothing, str(error) or type(error).__name__)).exception()
            if told is not None and not isinstance(told, Exception):
                raise told from None
            raise ValueError(self._told(name, str(error))) from error
        if transfer.device.type == "cuda":
            transfer.issued = torch.cuda.current_stream(transfer.device).record_event()
        return transfer

    def submit(self, transfer: Transfer) -> Future[None]:
        """Do it in the background."""
        return self._lane.submit(partial(self._move, transfer))

    def run(self, transfer: Transfer) -> Future[None]:
        """Do it now, if nothing is before it; the future is done."""
        return self._lane.run(partial(self._move, transfer))

    def rest(self) -> None:
        """Do what the lane has been given, and end its thread until there is more."""
        self._lane.stop(self._timeout.total_seconds() + 1.0)  # a job that waits in vain ends by itself

    def finish(self) -> None:
        """Do what the lane has been given, then close."""
        self.rest()
        self.close()

    def close(self) -> None:
        """Close all connections; what is under way fails."""
        if self in _LIVE:
            _LIVE.discard(self)
            if self.options.transport != "native":
                TRAFFIC.close(self.options.priority)
        self.failure = self.failure or "it has been shut down"
        self._agreement.close()
        self._wire.close()
        self._lane.stop(1.0)
        self._host.close()
        if self.transport is not None:
            self.transport.close()

    def _move(self, transfer: Transfer, refusal: str = "") -> None:
        """On the lane."""
        try:
            if self.failure:
                raise dist.DistBackendError(self.failure)
            # its tensors may be inference tensors, which the mode of this thread must allow for
            with torch.inference_mode(), TRAFFIC.under_way(self.options, transfer.total) as slot:
                self._run(transfer, refusal, partial(TRAFFIC.give_way, slot, self.options.patience))
        except BaseException as error:
            failed = self._give_up(transfer.name, error)
            raise (failed if isinstance(error, Exception) else error) from None

    def _run(self, transfer: Transfer, refusal: str, pause: Callable[[], None]) -> None:
        transport = self.transport if transfer.device.type == "cuda" else self._host
        assert transport is not None
        with torch.cuda.device(transfer.device) if transfer.device.type == "cuda" else nullcontext():
            self._agree_and_move(transport, transfer, refusal, pause)

    def _agree_and_move(self, transport: Transport, transfer: Transfer, refusal: str, pause: Callable[[], None]) -> None:
        if transport is self._host and not refusal:
            finish = self._host.begin(transfer)
            self._agreement.reach(transfer)
            finish(pause)
        else:
            self._agreement.reach(transfer, refusal)
            transport.move(transfer, pause)

    def _give_up(self, name: str, error: BaseException) -> dist.DistBackendError:
        text = str(error) if isinstance(error, dist.DistBackendError) else f"{type(error).__name__}: {error}"
        told = self._told(name, self.failure or text)
        self.failure = self.failure or told
        self._agreement.close()
        self._wire.fail(told)
        self._host.close()
        return dist.DistBackendError(told)

    def _told(self, name: str, text: str) -> str:
        return text if text.startswith("freescale") else f"freescale {name}, lane {self._name!r}: {text}"


@atexit.register
def _close_all() -> None:
    """A thread that waits for a peer while the interpreter ends would crash it."""
    for mover in list(_LIVE):
        if mover._process == os.getpid():  # else the connections are those of the process that this one was forked from
            mover.close()
