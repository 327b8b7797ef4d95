"""torch's own backends under a group: gloo and NCCL."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.collectives.executor import CollectiveExecutor
from lightning_freescale.comm.transports.selection import all_gather_json

# User tags are made even and put above those of headers and exchanges, which use the same connections; chunks have odd ones.
_FIRST_TAG = 2**30 + 4
_TAGS = 2**29 - 4
_WITH_TAG = {"send": 2, "recv": 2, "recv_anysource": 1}
"""Methods with a tag, and where it stands among their arguments."""
_log = logging.getLogger(__name__)


class NativeBackends:
    """The backends that torch itself would use for the collectives of one group.

    Gloo has connections of its own: on the lane's a collective of gloo that fails would close those. With ``_lazy_gloo`` the
    first collective makes them, because they cost every pair of ranks a socket on both sides. (Gloo's own lazy connections
    would wait five times the timeout for a rank that is gone.) Messages between two ranks take the lane's. Gloo's collectives
    take CUDA tensors, too, and keep them where ranks share a GPU, which NCCL refuses.

    Elsewhere NCCL is registered for CUDA tensors when a collective first needs it, or by :meth:`register_nccl`. torch connects
    a registered NCCL as soon as the group is made, if the default group is bound to a device: unused communicators would
    cost GPU memory. Not tested on GPU.

    Attributes:
        inner: the group that has the backends.
        uses_nccl: whether CUDA tensors go to NCCL, now or once they come.
        nccl: NCCL's backend, once there is one.
    """

    def __init__(self, outer: dist.ProcessGroup, backend_opts: Any, lane: CollectiveExecutor) -> None:
        self._outer, self._opts = weakref.ref(outer), backend_opts  # no circle, which would keep connections open
        self.inner = dist.ProcessGroup(backend_opts.store, backend_opts.group_rank, backend_opts.group_size)
        self._registering = threading.Lock()
        self._lane = lane
        self._devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        self._prepare_gloo(lane.p2p.open())
        # torch finds names, options and backends by device there
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
            _tell_of_gloo(shared)

    def call(self, name: str, *args: Any, **kwargs: Any) -> dist.Work:
        """Run the collective of that name on torch's own backend for its tensors.

        Raises:
            DistBackendError: it is gloo's, and the lane has ended, or a rank does not come to connect it.
            ValueError: the tag of a message is out of range, gloo would have to send a CUDA tensor, or the first CUDA tensor
                comes to a group that was made before CUDA was in use.
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
                f"freescale {name}: a CUDA tensor, which gloo cannot send, and ranks share a GPU: pass tensor.cpu()"
            )
        args, kwargs = _move_tag(name, args, kwargs)
        return getattr(self._lane.p2p.open(), name)(*args, **kwargs)

    @contextmanager
    def hiding_nccl(self) -> Iterator[None]:
        """Register NCCL on the inner group alone in the block: in a group that is being made, torch would connect it again."""
        self._hidden = True
        try:
            yield
        finally:
            self._hidden = False

    def register_nccl(self) -> None:
        """Let NCCL have the CUDA tensors, where it can; it connects at the first collective, or if torch connects it."""
        with self._registering:
            if not self.uses_nccl:
                return
            if self._lane.topology.find_lacking("gpu"):
                raise ValueError(
                    "freescale: a CUDA tensor on a group that was made before its ranks used CUDA, so that it is not known "
                    "which share a GPU: call torch.cuda.set_device before the group is made"
                )
            kind = dist.ProcessGroup.BackendType.NCCL
            if self.nccl is None:
                self.nccl = self._make_nccl()
                _register(self.inner, kind, self.nccl, "cuda")
            if not self._hidden and not self._shown:
                _register(self._outer(), kind, self.nccl, "cuda")
                self._shown = True

    def abort(self) -> None:
        """End NCCL's collectives in flight."""
        if self.nccl is not None:
            self.nccl.abort()

    def connect_gloo(self, name: str) -> None:
        """Connect gloo unless it is connected; ``name`` is that of the collective that needs it. Collective."""
        with self._registering:
            if self._gloo is not None:
                return
            if not self._gloo_failure:
                # several threads may come here for groups of their own: on one connection to the store, where one waits after
                # the other, they could wait crosswise
                opts, lazy = self._opts, self._lane.options._lazy_gloo
                store = dist.PrefixStore("gloo", opts.store.clone() if lazy else opts.store)
                try:
                    all_gather_json("connected", None, self._lane.p2p, store, opts.timeout)
                    gloo = dist.ProcessGroupGloo(store, opts.group_rank, opts.group_size, timeout=opts.timeout)
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
    if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):  # from torch 2.14 on they are numbered from the beginning
        backend._set_sequence_number_for_group()


def _register(group: Any, kind: Any, backend: Any, *devices: str, default: bool = True) -> None:
    if default:
        group._set_default_backend(kind)
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)


def _is_on_gpu(argument: Any) -> bool:
    """Return whether an argument of a collective is a CUDA tensor, has one in it, or is a barrier's options with a GPU."""
    if isinstance(argument, Tensor):
        return argument.is_cuda
    if isinstance(argument, list | tuple):
        return any(map(_is_on_gpu, argument))
    return getattr(getattr(argument, "device", None), "type", "") == "cuda"


def _move_tag(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    place = _WITH_TAG[name]
    tag = kwargs["tag"] if "tag" in kwargs else args[place]
    if not 0 <= tag < _TAGS:
        raise ValueError(f"freescale {name}: tag={tag}: pass one from 0 to {_TAGS - 1}")
    moved = _FIRST_TAG + 2 * tag
    if "tag" in kwargs:
        return args, {**kwargs, "tag": moved}
    return (*args[:place], moved, *args[place + 1 :]), kwargs


@cache
def _tell_of_gloo(shared: str) -> None:
    _log.warning(
        "backend 'freescale': %s, which NCCL refuses: torch's own collectives of CUDA tensors take gloo. If they have GPUs "
        "of their own, call torch.cuda.set_device before the group is made",
        shared,
    )
