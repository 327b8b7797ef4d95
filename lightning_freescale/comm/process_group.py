"""The process group ``"freescale"``. Its transport runs all-to-all and all-gather; torch's own backends run everything else."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.collectives.auto_transport import settle_transport
from lightning_freescale.comm.collectives.eager_exchange import exchange_with_sizes
from lightning_freescale.comm.collectives.executor import BuffersForRanks, CollectiveExecutor, TransferWork
from lightning_freescale.comm.collectives.native import NativeBackends
from lightning_freescale.comm.options import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.transports.host import HostTransport
from lightning_freescale.comm.transports.selection import auto_candidates
from lightning_freescale.comm.transports.transport import RankBuffers

BACKEND = "freescale"

# The garbage collector destroys an unused model and the process groups of its tables. In a DataLoader worker, their destructors
# would wait for threads that fork has not copied: the worker would hang, or crash with a segmentation fault. A forked process
# therefore never collects inherited objects.
os.register_at_fork(after_in_child=gc.freeze)

# Every method is delegated explicitly. A method of the C++ base class would run while it holds the GIL, which causes a deadlock
# with gloo's own thread.
_DELEGATED = (
    *("broadcast", "reduce", "gather", "gather_single", "gather_into_tensor", "scatter", "allreduce_coalesced"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("send", "recv", "recv_anysource", "barrier"),
)
# torch runs these in C++ without the lane. It would create groups without a lane from the backends of this group, or call hooks
# for the delegated collectives only. The messages of a monitored barrier could be mixed up with those of the lane.
_REFUSED = (
    *("split_group", "merge_remote_group", "new_window", "get_reconfigure_handle", "reconfigure"),
    *("register_pre_hook", "register_post_hook", "register_abort_hook", "monitored_barrier"),
)


class ProcessGroupFreeScale(dist.ProcessGroup):
    """A process group that runs all-to-all and all-gather without the compute units of a GPU.

    ``dist.new_group(backend="freescale")`` creates one. The group and its transport are called a lane.

    Attributes:
        options: the options of the group.
        supports_reconfigure: whether ranks can be replaced. torch reads it since version 2.14.
        interrupted: whether messages of a failed run may be left in the lane.
        current: a list with the group that has replaced this one, or this one; empty if the group is not shared.
    """

    supports_reconfigure = False
    interrupted = False
    current: Sequence[ProcessGroupFreeScale] = ()

    def __init__(self, backend_opts: Any, options: ProcessGroupFreeScaleOptions) -> None:
        rank, size = backend_opts.group_rank, backend_opts.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # Python may subclass the two-argument constructor only
        self.options = options
        self._executor = CollectiveExecutor(backend_opts, options, backend_opts.store)
        try:
            self._backends = NativeBackends(self, backend_opts, self._executor)
            if options.transport == "auto" and auto_candidates(self._executor.topology):
                settle_transport(backend_opts, self._executor, self._backends)
            if self.moves_by_nccl and self._backends.nccl is None:
                self._backends.register_nccl()  # torch connects it as soon as the group is created
        except BaseException as error:
            self._executor.give_up(error)
            raise

    @property
    def is_open(self) -> bool:
        """Whether the lane has neither failed nor been closed."""
        return not self._executor.failure

    @property
    def moves_by_nccl(self) -> bool:
        """Whether NCCL moves the tensors of :meth:`exchange`, in processes that use CUDA."""
        in_use = not self._executor.topology.find_lacking("gpu")
        return in_use and self._executor.transport is None and self._backends.uses_nccl

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL runs torch's own collectives of CUDA tensors. If ranks share a GPU, gloo runs or refuses them."""
        return self._backends.uses_nccl

    @property
    def waits_on_device(self) -> bool:
        """Whether CUDA streams wait for other ranks, which is false for the host transport and for gloo."""
        transport = self._executor.transport
        return self.moves_by_nccl or not (transport is None or isinstance(transport, HostTransport))

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name of the backend."""
        return BACKEND

    def _get_backend_name(self) -> str:
        # torch treats tensors as CPU tensors if the name is "gloo"
        return BACKEND if torch.cuda.is_available() else "gloo"

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """Send split ``r`` of the input to rank ``r``, as ``dist.all_to_all_single`` does."""
        if self._is_native(input):
            return self._native("alltoall_base", output, input, list(output_split_sizes), list(input_split_sizes), opts)
        outgoing = partial(RankBuffers.from_tensor, "input", input, input_split_sizes)
        incoming = partial(RankBuffers.from_tensor, "output", output, output_split_sizes)
        return self._collective("all_to_all_single", outgoing, incoming, [output], opts)

    def alltoall(self, output: list[Tensor], input: list[Tensor], opts: Any = None) -> dist.Work:
        """Send tensor ``r`` of the inputs to rank ``r``, as ``dist.all_to_all`` does."""
        if self._is_native(*input[:1]) and self._backends.uses_nccl and any(tensor.is_cuda for tensor in input):
            return self._native("alltoall", output, input, opts)  # gloo requires tensors of equal size
        outgoing = partial(RankBuffers.from_tensors, "input", input)
        incoming = partial(RankBuffers.from_tensors, "output", output)
        return self._collective("all_to_all", outgoing, incoming, output, opts)

    def allgather(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Gather a tensor of every rank in a list, as ``dist.all_gather`` does."""
        outputs, inputs = (output, input) if isinstance(input, list) else ([output], [input])
        if self._is_native(*inputs):
            return self._native("allgather", outputs, inputs, opts)
        outgoing = partial(RankBuffers.from_tensors, "input", inputs * self.size())
        gathered = [tensor for of_input in outputs for tensor in of_input]
        incoming = partial(RankBuffers.from_tensors, "output", gathered)
        return self._collective("all_gather", outgoing, incoming, gathered, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather a tensor of every rank in one tensor, as ``dist.all_gather_into_tensor`` does."""
        if self._is_native(input):
            return self._native("_allgather_base", output, input, opts)
        outgoing = partial(RankBuffers.from_tensors, "input", [input] * self.size())
        incoming = partial(RankBuffers.from_tensor, "output", output, None)
        return self._collective("all_gather_single", outgoing, incoming, [output], opts)

    def _all_reduce(self, tensors: Any, opts: Any = None, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce as ``dist.all_reduce`` does, and also average integers, as Lightning requires of backends other than gloo.

        An average of integers returns when all ranks have called it, even if ``asyncOp`` is set.
        """
        given = [argument for argument in (opts, *args) if argument is not None]
        first = tensors[0] if isinstance(tensors, list) else tensors
        nccl = self._backends.uses_nccl and first.is_cuda
        if getattr(opts, "reduceOp", None) != dist.ReduceOp.AVG or nccl or first.is_floating_point():
            return self._native("allreduce", tensors, *given, **kwargs)
        opts.reduceOp = dist.ReduceOp.SUM
        work = self._native("allreduce", tensors, *given, **kwargs)
        opts.reduceOp = dist.ReduceOp.AVG
        work.wait()
        first.copy_(torch.div(first, self.size(), rounding_mode="trunc"))
        return work

    def exchange(
        self,
        received: Tensor,
        send: Tensor,
        gets: Sequence[int],
        gives: Sequence[int],
        *,
        exact: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Send every rank its part without a handshake, and return when all parts have arrived. Collective.

        It costs little more than gloo's own all-to-all, because the ranks do not compare sizes beforehand. All ranks issue the
        same exchanges in the same order, from one thread. Other collectives of the group may run between them or be pending.
        With CUDA tensors, it is an :meth:`all_to_all_single` on the current stream. Unless ``exact`` is set, another one
        precedes it for the sizes. Not tested on GPU.

        Args:
            received: the tensor to fill, shape ``[sum(gets)]``, of any number type.
            send: the tensor to send, shape ``[sum(gives)]``, of the same type.
            gets: the length of the slot for each rank, in elements. A received part starts at the beginning of its slot and may
                be shorter. The rest of the slot is unchanged. The length of the part is not returned.
            gives: the number of elements for each rank. The own part is copied. A rank without slot and part is omitted, and
                must omit this rank.
            exact: whether every slot has the length of the received part.
            timeout: how long a peer may show no progress; by default the timeout of the group, which CUDA tensors always use.

        Raises:
            ValueError: an argument is wrong. The other ranks raise an error, too.
            DistBackendError: a peer has disconnected, does not respond, sends another dtype or more than its slot holds, or is
                at another exchange; or the lane has ended before.
        """
        if not send.is_cuda:
            self._executor.exchange(received, send, gets, gives, timeout)
        elif exact:
            dist.all_to_all_single(received, send, list(gets), list(gives), group=self)
        else:
            exchange_with_sizes(self, received, send, gets, gives)

    def connect(self) -> None:
        """Connect torch's own backend for all-to-alls of CUDA tensors, instead of at the first one. Collective."""
        if self.moves_by_nccl:
            self._all_reduce([torch.zeros(1, device="cuda")]).wait()
        elif self._executor.transport is None and not self._executor.topology.find_lacking("gpu"):
            self._backends.connect_gloo("connect")

    def wait_for_pending_works(self) -> None:
        """Complete the submitted collectives, and end the thread until the next one."""
        self._executor.wait_for_pending_works()

    def shutdown(self) -> None:
        """Complete the submitted collectives unless the lane has failed, and close all connections."""
        if self.is_open:
            self._executor.wait_for_pending_works()
        self._executor.abort()
        self._backends.inner.shutdown()

    def abort(self) -> None:
        """Close the connections. Collectives in flight fail, including those of NCCL."""
        self._executor.abort()
        self._backends.abort()

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._backends.register_nccl()  # gloo does not coalesce
        super()._start_coalescing(device)

    def _is_native(self, *tensors: Tensor) -> bool:
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        return self.options.transport == "native" or (on_gpu and self._executor.transport is None)

    def _native(self, name: str, *args: Any, **kwargs: Any) -> dist.Work:
        return self._backends.call(name, *(argument for argument in args if argument is not None), **kwargs)

    def _collective(
        self, name: str, outgoing: BuffersForRanks, incoming: BuffersForRanks, results: list[Tensor], opts: Any
    ) -> dist.Work:
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", timedelta(0))
        background = getattr(opts, "asyncOp", True)
        work = TransferWork(self._executor.run(name, outgoing, incoming, timeout, background), results)
        if not background:
            work.wait()
        return work


def _delegate(name: str) -> Callable[..., Any]:
    return lambda group, *args, **kwargs: group._backends.call(name, *args, **kwargs)


def _refuse_by_name(name: str) -> Callable[..., NoReturn]:
    def refuse(group: ProcessGroupFreeScale, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"freescale {name}: the lane cannot run it. Pass a group of backend 'gloo' or 'nccl'")

    return refuse


for _old, _new in (  # torch has renamed methods, and calls both names
    ("allreduce", "_all_reduce"),
    ("alltoall_base", "all_to_all_single"),
    ("_allgather_base", "all_gather_single"),
):
    setattr(ProcessGroupFreeScale, _old, getattr(ProcessGroupFreeScale, _new))
for _names, _method in ((_DELEGATED, _delegate), (_REFUSED, _refuse_by_name)):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):  # torch 2.14 added some
            setattr(ProcessGroupFreeScale, _name, _method(_name))


def register_backend() -> None:
    """Register the backend ``"freescale"`` with ``torch.distributed``. The import of this package does it."""
    if BACKEND not in dist.Backend.backend_list:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=devices)


def _create_group(backend_opts: Any, options: Any = None) -> ProcessGroupFreeScale:
    if options is not None and not isinstance(options, ProcessGroupFreeScaleOptions):
        raise TypeError(
            f"pg_options={options!r}: backend 'freescale' requires lightning_freescale.comm.ProcessGroupFreeScaleOptions"
        )
    return ProcessGroupFreeScale(backend_opts, options or ProcessGroupFreeScaleOptions())
