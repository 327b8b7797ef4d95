"""The process group ``"freescale"``: all-to-all and all-gather by its transport, everything else by torch's own backends."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.executor import CollectiveExecutor, Cut
from lightning_freescale.comm.native import DELEGATED, delegate, native_backends, register
from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.parts import RankBuffers
from lightning_freescale.comm.spelling import accept_c10d_argument_names
from lightning_freescale.comm.work import CoalescedWork, IntegerMeanWork, TransferWork

BACKEND = "freescale"


class FreeScaleGroup(dist.ProcessGroup):
    """Moves all-to-all and all-gather without the compute units; ``dist.new_group(backend="freescale")`` makes one.

    Attributes:
        options: of its lane.
        inner: a group of torch's own backends, for all other collectives.
    """

    def __init__(self, made: Any, options: LaneOptions) -> None:
        rank, size = made.group_rank, made.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # the two-argument constructor is the one that Python may subclass
        self.options = options
        natives = native_backends(made, rank, size)
        self.inner = dist.ProcessGroup(made.store, rank, size)
        for group in (self.inner, self):
            register(group, natives)
        self._mover = CollectiveExecutor(made, options)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """The registered name."""
        return BACKEND

    def _get_backend_name(self) -> str:
        # torch asks whether it is "gloo" to learn that tensors are on the host
        return BACKEND if torch.cuda.is_available() else "gloo"

    # -- the collectives that a transport moves, under torch's old and new names

    @accept_c10d_argument_names
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
        outgoing = partial(RankBuffers.cut, "input", input, input_split_sizes)
        incoming = partial(RankBuffers.cut, "output", output, output_split_sizes)
        return self._collective("all_to_all_single", outgoing, incoming, [output], opts)

    @accept_c10d_argument_names
    def alltoall(self, output: list[Tensor], input: list[Tensor], opts: Any = None) -> dist.Work:
        """As ``dist.all_to_all``."""
        if self._is_native(*input[:1]):
            return self._native("alltoall", output, input, opts)
        outgoing, incoming = partial(RankBuffers.listed, "input", input), partial(RankBuffers.listed, "output", output)
        return self._collective("all_to_all", outgoing, incoming, output, opts)

    @accept_c10d_argument_names
    def allgather(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """As ``dist.all_gather``."""
        outputs, tensor = (output[0], input[0]) if isinstance(input, list) else (output, input)
        if self._is_native(tensor):
            return self._native("allgather", [outputs], [tensor], opts)
        outgoing, incoming = partial(RankBuffers.repeated, tensor), partial(RankBuffers.listed, "output", outputs)
        return self._collective("all_gather", outgoing, incoming, outputs, opts)

    @accept_c10d_argument_names
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """As ``dist.all_gather_into_tensor``."""
        if self._is_native(input):
            return self._native("_allgather_base", output, input, opts)
        outgoing, incoming = partial(RankBuffers.repeated, input), partial(RankBuffers.cut, "output", output, None)
        return self._collective("all_gather_single", outgoing, incoming, [output], opts)

    @accept_c10d_argument_names
    def all_gather_single_coalesced(self, output: list[Tensor], input: list[Tensor], opts: Any = None) -> dist.Work:
        """As several :meth:`all_gather_single`."""
        return CoalescedWork([self.all_gather_single(*pair, opts) for pair in zip(output, input, strict=True)], output)

    @accept_c10d_argument_names
    def allgather_coalesced(self, output: list[list[Tensor]], input: list[Tensor], opts: Any = None) -> dist.Work:
        """As several :meth:`allgather`; ``output`` is by rank."""
        columns = [list(column) for column in zip(*output, strict=True)]
        works = [self.allgather([column], [tensor], opts) for column, tensor in zip(columns, input, strict=True)]
        return CoalescedWork(works, [tensor for each in output for tensor in each])

    # -- what gloo would refuse

    def _all_reduce(self, tensors: Any, opts: Any = None, *args: Any, **kwargs: Any) -> dist.Work:
        """As ``dist.all_reduce``; the mean of whole numbers, too, which Lightning logs where the backend is not called gloo."""
        given = [argument for argument in (opts, *args) if argument is not None]
        first = tensors[0] if isinstance(tensors, list) else tensors
        if getattr(opts, "reduceOp", None) != dist.ReduceOp.AVG or first.is_cuda or first.is_floating_point():
            return self._native("allreduce", tensors, *given, **kwargs)
        opts.reduceOp = dist.ReduceOp.SUM
        work = IntegerMeanWork(self._native("allreduce", tensors, *given, **kwargs), first, self.size())
        opts.reduceOp = dist.ReduceOp.AVG
        if not opts.asyncOp:
            work.wait()
        return work

    # -- the end

    def rest(self) -> None:
        """Finish what the lane has been given, and end its thread; the next collective may start another."""
        self._mover.rest()

    def shutdown(self) -> None:
        """Finish what the lane has been given, and close all connections."""
        self._mover.finish()
        self.inner.shutdown()

    def abort(self) -> None:
        """Close the lane's connections; what is under way fails."""
        self._mover.close()

    # -- how a collective runs

    def _is_native(self, *tensors: Tensor) -> bool:
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        return self.options.transport == "native" or (on_gpu and self._mover.transport is None)

    def _native(self, name: str, *args: Any, **kwargs: Any) -> dist.Work:
        return getattr(self.inner, name)(*(argument for argument in args if argument is not None), **kwargs)

    def _collective(self, name: str, outgoing: Cut, incoming: Cut, results: list[Tensor], opts: Any) -> dist.Work:
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", timedelta(0))
        transfer = self._mover.prepare(name, outgoing, incoming, timeout)
        if getattr(opts, "asyncOp", True):
            return TransferWork(self._mover.submit(transfer), results)
        work = TransferWork(self._mover.run(transfer), results)
        work.wait()
        return work


for _old, _new in (
    ("allreduce", "_all_reduce"),
    ("alltoall_base", "all_to_all_single"),
    ("_allgather_base", "all_gather_single"),
    ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
):
    setattr(FreeScaleGroup, _old, getattr(FreeScaleGroup, _new))
for _name in DELEGATED:
    setattr(FreeScaleGroup, _name, delegate(_name))


def register_backend() -> None:
    """Make ``"freescale"`` known to ``torch.distributed``."""
    if BACKEND not in dist.Backend.backend_list:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)


def _create(made: Any, options: Any = None) -> FreeScaleGroup:
    if options is not None and not isinstance(options, LaneOptions):
        raise TypeError(f"pg_options={options!r}: backend 'freescale' takes lightning_freescale.comm.LaneOptions")
    return FreeScaleGroup(made, options or LaneOptions())
