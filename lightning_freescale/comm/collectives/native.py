"""The backends of torch under a group: gloo and NCCL."""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.comm.collectives.executor import CollectiveExecutor
from lightning_freescale.comm.waits import until_another_fails

# User tags become even numbers above those of headers and exchanges, which use the same connections. Chunks have odd tags.
_FIRST_TAG = 2**30 + 4
_TAGS = 2**29 - 4
_WITH_TAG = {"send": 2, "recv": 2, "recv_anysource": 1}
"""Methods with a tag, and its position among their arguments."""
_log = logging.getLogger(__name__)


class NativeBackends:
    """The backends that torch itself would use for the collectives of one group.

    Gloo has separate connections, because a failed collective of gloo closes its connections. With ``_lazy_gloo``, the first
    collective creates them, because they need a socket per pair of ranks on both sides. (Gloo's own lazy connections would wait
    five times the timeout for a dead rank.) Messages between two ranks use the connections of the lane. Gloo also runs
    collectives of CUDA tensors if ranks share a GPU, which NCCL refuses.

    Otherwise, the first collective of CUDA tensors, or :meth:`register_nccl`, registers NCCL. NCCL is not registered earlier:
    if the default group is bound to a device, torch connects a registered NCCL as soon as the group is created, and unused
    communicators take GPU memory. Not tested on GPU.

    Attributes:
        inner: the group that has the backends.
        uses_nccl: whether NCCL moves CUDA tensors, now or at the first collective.
        nccl: the NCCL backend; None before its first use.
    """

    def __init__(self, outer: dist.ProcessGroup, backend_opts: Any, lane: CollectiveExecutor) -> None:
        self._outer, self._opts = weakref.ref(outer), backend_opts  # a cycle would keep connections open
        self.inner = dist.ProcessGroup(backend_opts.store, backend_opts.group_rank, backend_opts.group_size)
        self._registering = threading.Lock()
        self._lane = lane
        self._devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        self._prepare_gloo(lane.p2p.open())
        # torch searches the outer group for names, options and backends by device
        _register(outer, dist.ProcessGroup.BackendType.GLOO, lane.p2p.open(), *self._devices)
        shared = lane.topology.find_shared_gpu()
        self.uses_nccl = torch.cuda.is_available() and dist.is_nccl_available() and not shared
        self.nccl: Any = None
        self._gloo: Any = None
        self._gloo_failure = ""
        self._hidden = self._shown = False
        if not lane.options._lazy_gloo:
            self.connect_gloo("set-up")
        if shared and backend_opts.group_rank == 0:
            _warn_of_gloo(shared)

    def call(self, name: str, *args: Any, **kwargs: Any) -> dist.Work:
        """Run the collective of that name on torch's own backend for its tensors.

        Raises:
            DistBackendError: the collective needs gloo, and the lane has ended or a rank does not connect.
            ValueError: the tag of a message is out of range, gloo would have to send a CUDA tensor, or a CUDA tensor is passed
                to a group that was created before its ranks used CUDA.
        """
        on_gpu = self.uses_nccl and any(map(_is_on_gpu, (*args, *kwargs.values())))
        if on_gpu and not self._shown:
            self.register_nccl()
        if on_gpu:
            return getattr(self.inner, name)(*args, **kwargs)
        self._lane.check_open(name)
        if name not in _WITH_TAG:
            self.connect_gloo(name)
            return getattr(self.inner, name)(*args, **kwargs)
        if any(map(_is_on_gpu, args)):
            raise ValueError(
                f"freescale {name}: the ranks share a GPU, so gloo sends messages, and it cannot send a CUDA tensor. Pass "
                "tensor.cpu()"
            )
        args, kwargs = _move_tag(name, args, kwargs)
        return getattr(self._lane.p2p.open(), name)(*args, **kwargs)

    def hiding_nccl(self) -> AbstractContextManager[None]:
        """Register NCCL on the inner group only: torch would connect it again in a group that is being created."""
        return replaced(self, {"_hidden": True})

    def register_nccl(self) -> None:
        """Register NCCL for CUDA tensors if possible. It connects at the first collective, or when torch connects it."""
        with self._registering:
            if not self.uses_nccl:
                return
            if self._lane.topology.find_lacking("gpu"):
                raise ValueError(
                    "freescale: a CUDA tensor was passed to a group that was created before its ranks used CUDA, so it is "
                    "unknown which ranks share a GPU. Call torch.cuda.set_device before you create the group"
                )
            kind = dist.ProcessGroup.BackendType.NCCL
            if self.nccl is None:
                self.nccl = self._make_nccl()
                _register(self.inner, kind, self.nccl, "cuda")
            if not self._hidden and not self._shown:
                _register(self._outer(), kind, self.nccl, "cuda")
                self._shown = True

    def abort(self) -> None:
        if self.nccl is not None:
            self.nccl.abort()

    def connect_gloo(self, name: str) -> None:
        """Connect gloo unless it is connected. ``name`` is the collective that needs it, for errors. Collective."""
        with self._registering:
            if self._gloo is not None:
                return
            if not self._gloo_failure:
                # Several threads may connect different groups at once. If they shared one connection to the store, whose calls
                # are serialized, they could cause a deadlock.
                opts, lazy = self._opts, self._lane.options._lazy_gloo
                store = dist.PrefixStore("gloo", opts.store.clone() if lazy else opts.store)
                try:
                    self._lane.p2p.gather_json(None)  # gloo does not notice the end of a rank while it connects
                    place = (store, opts.group_rank, opts.group_size)
                    gloo = until_another_fails(partial(dist.ProcessGroupGloo, *place, timeout=opts.timeout))
                except RuntimeError as error:
                    self._gloo_failure = str(error)
            if self._gloo_failure:
                raise dist.DistBackendError(f"freescale {name}: gloo could not be connected: {self._gloo_failure}")
            self._prepare_gloo(gloo)
            self._gloo = gloo
            devices = self._devices if self.nccl is None else ["cpu"]
            _register(self.inner, dist.ProcessGroup.BackendType.GLOO, gloo, *devices, default=self.nccl is None)

    def _prepare_gloo(self, gloo: Any) -> None:
        gloo.options.global_ranks_in_group = self._opts.global_ranks_in_group
        gloo.options.group_name = self._opts.group_id
        _number_collectives(gloo)

    def _make_nccl(self) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = self._opts.timeout
        options.global_ranks_in_group = self._opts.global_ranks_in_group
        options.group_name = self._opts.group_id
        if self._lane.options._max_ctas is not None:
            options.config.max_ctas = self._lane.options._max_ctas
        store = dist.PrefixStore("nccl", self._opts.store)
        nccl = dist.ProcessGroupNCCL(store, self._opts.group_rank, self._opts.group_size, options)
        _number_collectives(nccl)
        return nccl


def _number_collectives(backend: Any) -> None:
    if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):  # torch 2.14 numbers them from the beginning
        backend._set_sequence_number_for_group()


def _register(group: Any, kind: Any, backend: Any, *devices: str, default: bool = True) -> None:
    if default:
        group._set_default_backend(kind)
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)


def _is_on_gpu(argument: Any) -> bool:
    if isinstance(argument, Tensor):
        return argument.is_cuda
    if isinstance(argument, list | tuple):
        return any(map(_is_on_gpu, argument))
    return getattr(getattr(argument, "device", None), "type", "") == "cuda"


def _move_tag(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    place = _WITH_TAG[name]
    tag = kwargs["tag"] if "tag" in kwargs else args[place]
    if not 0 <= tag < _TAGS:
        raise ValueError(f"freescale {name}: tag={tag}: pass a tag from 0 to {_TAGS - 1}")
    moved = _FIRST_TAG + 2 * tag
    if "tag" in kwargs:
        return args, {**kwargs, "tag": moved}
    return (*args[:place], moved, *args[place + 1 :]), kwargs


@cache
def _warn_of_gloo(shared: str) -> None:
    _log.warning(
        "backend 'freescale': %s, which NCCL refuses. torch's own collectives of CUDA tensors use gloo. If each rank has a GPU "
        "of its own, call torch.cuda.set_device before you create the group",
        shared,
    )
