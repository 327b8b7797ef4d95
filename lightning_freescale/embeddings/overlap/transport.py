"""The worker thread of a collection, and its messages between ranks.

It counts bytes and waits. If NCCL moves the messages of several collections, all ranks launch them in the same order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import compress, count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale._runtime.worker import WorkerThread
from lightning_freescale.comm import BACKEND
from lightning_freescale.comm.options import OverlapOptions
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_codec import WireFormat


class LaunchOrder:
    """The order in which one process launches the exchanges of its collections if NCCL moves them: the order of rank 0.

    NCCL's kernels wait on the device for those of the other ranks. With one communicator per collection, two ranks that launch
    in different orders may wait for each other, if the second kernel cannot start before the first has ended. So the
    collections take turns, and rank 0 numbers each exchange when it reaches it. Every lower number is launched eventually:
    after a head all ranks are at the same message, and a job without a head directly follows a job with one.

    All-reduces of DistributedDataParallel and exchanges of TorchRec's own modules are launched by torch and take no turns. They
    start beside these exchanges, whose communicators use few of the device's multiprocessors.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self.numbers, self._launched = count(), 0  # rank 0 draws the numbers and sends them to the others
        self._failure = ""

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Enter the context in which to launch, after the exchanges with lower numbers. Raise if one fails or is late."""
        with self._changed:
            seconds = self._timeout.total_seconds()
            if not self._changed.wait_for(lambda: self._failure or self._launched == number, seconds):
                raise RuntimeError(
                    f"Exchange {number} of this rank's collections waited {seconds:g} s for exchange {self._launched}, which "
                    "was not launched."
                )
            if self._failure:
                raise RuntimeError(f"An exchange launched before this one failed: {self._failure}")
        yield
        with self._changed:
            self._launched = number + 1
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()


def refuse_one_queue() -> None:
    """Raise a ValueError if the environment gives the device one queue, in which work on one stream waits for others."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives the device one queue. An overlapped exchange and DDP's all-reduce may wait "
            "for each other there forever. Unset the variable, or pass FreeScaleStrategy(overlap='torchrec')."
        )


FAREWELL = timedelta(seconds=2)
"""How long a rank that has finished its exchanges waits for the others."""


def new_group(name: str, transport: str, timeout: timedelta | None, ranks: list[int] | None = None) -> Any:
    """Create a process group for the messages of one collection. Collective."""
    return dist.new_group(ranks, backend=BACKEND, timeout=timeout, pg_options=OverlapOptions(transport, name=name))


class RowTransport:
    """Sends the messages of one collection over its own process group, and counts bytes and seconds.

    ``wire`` is the form of rows and gradients in messages. ``far`` marks the ranks on other nodes; it is empty if there are
    none or if nodes are unknown. ``near`` tells whether the messages are hot rows within a node.
    """

    def __init__(
        self,
        group: Any,
        wire: WireFormat,
        device: torch.device,
        statistics: ExchangeStatistics,
        order: LaunchOrder | None = None,
        far: Sequence[bool] = (),
        near: bool = False,
    ) -> None:
        self.rank, self.ranks, self.wire, self.device = group.rank(), group.size(), wire, device
        self.observer: Any = None  # the Timeline that records exchanges, if there is one
        self.statistics, self._group, self._order = statistics, group, order
        self._far, self._near = far, near

    def rows(self, count: int) -> Tensor:
        return torch.empty(count, self.wire.rows.words, device=self.device)

    def gradients(self, count: int) -> Tensor:
        return torch.empty(count, self.wire.gradients.words, device=self.device)

    def exchange(self, received: Tensor, message: Tensor, gives: list[int], gets: list[int], exact: bool = False) -> None:
        """Send ``gives[rank]`` words to each rank and receive ``gets[rank]``, or at most as many if not exact. Collective."""
        began = time.perf_counter()
        with self._recorded(gives, gets if exact else gives), self._turn():
            self._group.exchange(received.view(-1), message.view(-1), gets, gives, exact=exact)
        self.statistics.count(transfer_s=time.perf_counter() - began)

    def exchange_rows(self, values: Tensor, gives: list[int], gets: list[int]) -> Tensor:
        """Send ``gives[rank]`` rows or gradients to each rank and return ``gets[rank]`` received ones of each. Collective."""
        words = values.shape[1]
        received = values.new_empty(sum(gets), words)
        self.exchange(received, values, [size * words for size in gives], [size * words for size in gets], exact=True)
        self.count("colliding", 4 * words, gives)
        return received

    def exchange_words(self, words: Tensor, gives: list[int], gets: list[int]) -> Tensor:
        """Send ``gives[rank]`` numbers of 32 bits to each rank and return the received ones. Collective."""
        received = words.new_empty(sum(gets))
        self.exchange(received.view(torch.float32), words.view(torch.float32), gives, gets, exact=True)
        self.count("ids", 4, gives)
        return received

    def exchange_numbers(self, numbers: np.ndarray) -> list[list[int]]:
        """Send ``numbers[rank]``, of 32 bits, from host to host; return the received row of each rank. Collective."""
        received, size = np.empty_like(numbers), [numbers.shape[1]] * self.ranks
        with self._recorded(size, size):
            self._group.exchange(torch.from_numpy(received.ravel()), torch.from_numpy(numbers.ravel()), size, size, exact=True)
        self.count("ids", 4, size)
        return [[int(number) for number in row] for row in received]

    def say_farewell(self) -> None:
        """Wait until all ranks have called this, or one of them has failed or is late."""
        if self.device.type == "cpu":
            nothing, sizes = torch.zeros(self.ranks), [1] * self.ranks
            with suppress(dist.DistBackendError):
                self._group.exchange(torch.empty_like(nothing), nothing, sizes, sizes, exact=True, timeout=FAREWELL)

    def count(self, kind: str, width: int, gives: list[int]) -> None:
        """Count the bytes sent to other ranks: ``gives[rank]`` times ``width`` to each."""
        counted = {f"{kind}_bytes": width * (sum(gives) - gives[self.rank])}
        if self._far:
            counted["cross_node_bytes"] = width * sum(compress(gives, self._far))
        if self._near:
            counted["hot_near_bytes"] = counted[f"{kind}_bytes"]
        self.statistics.count(**counted)

    def _turn(self) -> AbstractContextManager[None]:
        if self._order is None:
            return nullcontext()
        first, others = self.rank == 0, [0, *[1] * (self.ranks - 1)]
        number = torch.full((self.ranks - 1 if first else 1,), next(self._order.numbers) if first else 0)
        sent, came = (number, number.new_empty(0)) if first else (number.new_empty(0), number)
        none = [0] * self.ranks
        gives, gets = (others, none) if first else (none, [1, *none[1:]])
        self._group.exchange(came, sent, gets, gives, exact=True)
        return self._order.turn(int(number[0]))

    def _recorded(self, gives: list[int], gets: list[int]) -> AbstractContextManager[None]:
        if self.observer is None or not self.observer.recording:
            return nullcontext()
        moved = max(sum(sizes) - sizes[self.rank] for sizes in (gives, gets))
        return self.observer.background_collective("embedding exchange", 4 * moved)


class _JobDone(NamedTuple):
    """The result of a job."""

    result: Any  # its return value
    queued: Any  # on CUDA: the event behind its queued work
    stamp: Any  # when it finished; None if no observer records


class ExchangeWorker(WorkerThread):
    """A worker thread with a CUDA stream that stops at the first error.

    Its queue is the agreed order of exchanges: every rank's jobs exchange the same messages in the same order, without
    coordination. A queue for all collections would require knowing in which order the model calls them. When a job fails, the
    process groups ``hops`` are aborted, because ranks outside of them would not notice.
    """

    def __init__(
        self,
        path: str,
        device: torch.device,
        statistics: ExchangeStatistics,
        order: LaunchOrder | None = None,
        hops: Sequence[Any] = (),
    ) -> None:
        super().__init__(f"freescale-{path}")
        self.error: Exception | None = None
        self.observer: Any = None  # the Timeline that records waits for rows, if there is one
        self._arrived: Any = None
        self._path, self._statistics, self._order, self._hops = path, statistics, order, hops
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a job. It runs after the work that the current CUDA stream has been given so far."""
        issued = None
        if self._stream is not None:
            _record_stream(args, self._stream)
            issued = torch.cuda.current_stream(self._stream.device).record_event()
        return super().submit(self._run_in_order, issued, job, *args)

    def wait(self, future: Future[Any]) -> Any:
        """Wait for a job and return its result, or raise the first error of a job.

        On CUDA, the current stream waits for the work that the job has queued.
        """
        done: _JobDone = future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(done.queued)
        return done.result

    def arrive(self) -> None:
        """Record that this rank has finished its part of the next awaited exchange."""
        self._arrived = None if self.observer is None else self.observer.stamp()

    def await_rows(self, *jobs: Future[Any] | None) -> Any:
        """Wait for jobs in order, as exposed communication; return the last one's result. See :meth:`wait`."""
        result, last = None, None
        arrived, self._arrived = self._arrived, None
        observed: AbstractContextManager[Any] = (
            nullcontext() if self.observer is None else self.observer.awaited("embedding rows", arrived)
        )
        with self._statistics.timed("exposed_s"), observed as collective:
            for job in jobs:
                if job is not None:
                    result, last = self.wait(job), job
        if collective is not None and last is not None:
            collective.done = last.result().stamp
        return result

    def hand_over(self, *tensors: Tensor) -> None:
        """Allow the current stream to use tensors that a job created."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self._stream.device))

    def _stamp(self) -> Any:
        return self.observer.stamp() if self.observer is not None and self.observer.recording else None

    def _run_in_order(self, issued: Any, job: Callable[..., Any], *args: Any) -> Any:
        if self.error is not None:  # a job failed, so the other ranks are out of step for those behind it
            raise self.error
        try:
            if self._stream is None:
                return _JobDone(job(*args), None, self._stamp())
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(issued)
                result = job(*args)
                return _JobDone(result, self._stream.record_event(), self._stamp())
        except ValueError as error:  # explains itself
            self.error = error
        except BaseException as error:  # any error: another thread waits for the job
            self.error = RuntimeError(f"Embedding exchange of collection {self._path!r}: {error}")
            self.error.__cause__ = error
            for group in self._hops:
                group.abort()
        if self._order is not None:  # other collections may wait for their turn after this one
            self._order.fail(str(self.error))
        raise self.error


def _record_stream(values: Iterable[Any], stream: Any) -> None:
    for each in values:
        if isinstance(each, (Tensor, KeyedJaggedTensor)):
            each.record_stream(stream)
        elif isinstance(each, (list, tuple)):
            _record_stream(each, stream)
