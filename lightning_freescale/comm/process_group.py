"""The process group ``"freescale"``: all-to-all and all-gather by its transport, everything else by torch's own backends."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.agreement import Agreement
from lightning_freescale.comm.lane import Lane
from lightning_freescale.comm.native import NOT_OBSERVED, OBSERVED, delegate, native_backends, register
from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.parts import Parts
from lightning_freescale.comm.topology import choose
from lightning_freescale.comm.traffic import TRAFFIC
from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.base import Transport
from lightning_freescale.comm.transports.host import HostTransport
from lightning_freescale.comm.wire import Wire
from lightning_freescale.comm.work import Observed, Observer, TransferWork

BACKEND = "freescale"
_NO_TIME = timedelta(0)
_Cut = Callable[[int], Parts]
_LIVE: weakref.WeakSet[FreeScaleGroup] = weakref.WeakSet()


class FreeScaleGroup(dist.ProcessGroup):
    """Moves all-to-all and all-gather without the compute units; ``dist.new_group(backend="freescale")`` makes one.

    Attributes:
        options: of its lane.
        observer: told of every collective but point-to-point messages and barriers; None for nobody.
        transport: what moves CUDA tensors, None for torch's own backend. CPU tensors go through the host.
        inner: a group of torch's own backends, for all other collectives.
    """

    def __init__(self, made: Any, options: LaneOptions) -> None:
        rank, size = made.group_rank, made.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # the two-argument constructor is the one that Python may subclass
        self.observer: Observer | None = None
        self.options = options
        self._lane_name = options.name or str(made.group_id)
        self._timeout: timedelta = made.timeout
        self._count = 0
        self._failure: str | None = None
        natives = native_backends(made, rank, size)
        self.inner = dist.ProcessGroup(made.store, rank, size)
        for group in (self.inner, self):
            register(group, natives)
        self._wire = Wire(dist.PrefixStore("freescale", made.store), rank, size, made.timeout, list(made.global_ranks_in_group))
        self._agreement = Agreement(self._wire)
        self._lane = Lane(self._lane_name)
        self._host = HostTransport(self._wire, options)
        store = dist.PrefixStore("topology", made.store)
        self.transport: Transport | None = choose(options, self._wire, self._host, store, made.timeout)
        TRAFFIC.open(options.priority)
        _LIVE.add(self)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """The registered name."""
        return BACKEND

    # -- the collectives that a transport moves, under torch's old and new names

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """As ``dist.all_to_all_single``."""
        if self._is_native(input):
            return self._native("alltoall_base", output, input, list(output_split_sizes), list(input_split_sizes), opts)
        outgoing = partial(Parts.cut, "input", input, input_split_sizes)
        incoming = partial(Parts.cut, "output", output, output_split_sizes)
        return self._collective("all_to_all_single", outgoing, incoming, [output], opts)

    def alltoall(self, output: list[Tensor], input: list[Tensor], opts: Any = None) -> dist.Work:
        """As ``dist.all_to_all``."""
        if self._is_native(input[0]):
            return self._native("alltoall", output, input, opts)
        outgoing, incoming = partial(Parts.listed, "input", input), partial(Parts.listed, "output", output)
        return self._collective("all_to_all", outgoing, incoming, output, opts)

    def allgather(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """As ``dist.all_gather``."""
        outputs, tensor = (output[0], input[0]) if isinstance(input, list) else (output, input)
        if self._is_native(tensor):
            return self._native("allgather", [outputs], [tensor], opts)
        outgoing, incoming = partial(Parts.repeated, tensor), partial(Parts.listed, "output", outputs)
        return self._collective("all_gather", outgoing, incoming, outputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """As ``dist.all_gather_into_tensor``."""
        if self._is_native(input):
            return self._native("_allgather_base", output, input, opts)
        outgoing, incoming = partial(Parts.repeated, input), partial(Parts.cut, "output", output.view(-1), ())
        return self._collective("all_gather_single", outgoing, incoming, [output], opts)

    def all_gather_single_coalesced(self, output: list[Tensor], input: list[Tensor], opts: Any = None) -> dist.Work:
        """As several :meth:`all_gather_single`."""
        return _Together([self.all_gather_single(*pair, opts) for pair in zip(output, input)], output)

    def allgather_coalesced(self, output: list[list[Tensor]], input: list[Tensor], opts: Any = None) -> dist.Work:
        """As several :meth:`allgather`; ``output`` is by rank."""
        columns = [list(column) for column in zip(*output)]
        return _Together([self.allgather([column], [tensor], opts) for column, tensor in zip(columns, input)], input)

    # -- the end

    def shutdown(self) -> None:
        """Finish what the lane has been given, and close all connections."""
        self._lane.close(self._timeout.total_seconds())
        self.abort()
        self.inner.shutdown()

    def abort(self) -> None:
        """Close the lane's connections; what is under way fails."""
        if self in _LIVE:
            _LIVE.discard(self)
            TRAFFIC.close(self.options.priority)
        self._failure = self._failure or "it has been shut down"
        self._agreement.close()
        self._wire.close()
        self._lane.close(1.0)
        for transport in (self._host, self.transport):
            if transport is not None:
                transport.close()

    # -- how a collective runs

    def _is_native(self, tensor: Tensor) -> bool:
        return self.options.transport == "native" or (tensor.is_cuda and self.transport is None)

    def _native(self, name: str, *args: Any) -> dist.Work:
        seen = Observed(self.observer, name)
        return seen.work(getattr(self.inner, name)(*(argument for argument in args if argument is not None)))

    def _collective(self, name: str, outgoing: _Cut, incoming: _Cut, results: list[Tensor], opts: Any) -> dist.Work:
        if self._failure is not None:
            raise dist.DistBackendError(self._told(name, self._failure))
        number, self._count = self._count, self._count + 1
        timeout = getattr(opts, "timeout", _NO_TIME)
        timeout = timeout if timeout > _NO_TIME else self._timeout
        try:
            transfer = Transfer.of(name, outgoing(self.size()), incoming(self.size()), timeout, number)
        except Exception as error:  # the others hear of it before it is raised
            self._refuse(Transfer.of(name, Parts.none(self.size()), Parts.none(self.size()), timeout, number), error)
            raise ValueError(self._told(name, str(error))) from error
        if transfer.device.type == "cuda":
            transfer.issued = torch.cuda.current_stream(transfer.device).record_event()
        seen = Observed(self.observer, name)
        if getattr(opts, "asyncOp", True):
            return seen.work(TransferWork(self._lane.submit(partial(self._move, transfer)), results))
        with seen.waiting():
            work = TransferWork(self._lane.run(partial(self._move, transfer)), results)
            work.wait()
        return work

    def _refuse(self, transfer: Transfer, error: Exception) -> None:
        self._lane.run(partial(self._move, transfer, str(error) or type(error).__name__))

    def _move(self, transfer: Transfer, refusal: str = "") -> None:
        """On the lane."""
        try:
            if self._failure is not None:
                raise dist.DistBackendError(self._failure)
            with TRAFFIC.under_way(self.options, transfer.total) as slot:
                self._run(transfer, refusal, partial(TRAFFIC.give_way, slot, self.options.patience))
        except Exception as error:
            raise self._give_up(transfer.name, error) from None

    def _run(self, transfer: Transfer, refusal: str, pause: Callable[[], None]) -> None:
        transport = self.transport if transfer.device.type == "cuda" else self._host
        assert transport is not None
        if transport is self._host and not refusal:
            finish = self._host.begin(transfer)
            self._agreement.reach(transfer)
            finish(pause)
        else:
            self._agreement.reach(transfer, refusal)
            transport.move(transfer, pause)

    def _give_up(self, name: str, error: Exception) -> dist.DistBackendError:
        told = str(error) if self._failure else self._told(name, str(error))
        self._failure = self._failure or told
        # Frames and Works of the failed transfer would keep the connections open, and the other ranks waiting.
        error.with_traceback(None)
        self._agreement.close()
        self._wire.fail(told)
        self._host.close()
        return dist.DistBackendError(told)

    def _told(self, name: str, text: str) -> str:
        return text if text.startswith("freescale") else f"freescale {name}, lane {self._lane_name!r}: {text}"


for _old, _new in (
    ("alltoall_base", "all_to_all_single"),
    ("_allgather_base", "all_gather_single"),
    ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
):
    setattr(FreeScaleGroup, _old, getattr(FreeScaleGroup, _new))
for _name in (*OBSERVED, *NOT_OBSERVED):
    setattr(FreeScaleGroup, _name, delegate(_name, _name in OBSERVED))


class _Together(dist.Work):
    """Several Works as one."""

    def __init__(self, works: list[dist.Work], results: list[Tensor]) -> None:
        super().__init__()
        self._works, self._results = works, results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)  # each raises or is true

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def register_backend() -> None:
    """Make ``"freescale"`` known to ``torch.distributed``."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(made: Any, options: Any = None) -> FreeScaleGroup:
    if options is not None and not isinstance(options, LaneOptions):
        raise TypeError(f"pg_options={options!r}: backend 'freescale' takes lightning_freescale.comm.LaneOptions")
    return FreeScaleGroup(made, options or LaneOptions())


@atexit.register
def _close_all() -> None:
    """A thread that waits for a peer while the interpreter ends would crash it."""
    for group in list(_LIVE):
        group.abort()
