"""What is delegated: every collective but all-to-all and all-gather, to gloo (CPU) and NCCL (CUDA).

Every method is delegated explicitly. One that falls through to the C++ base class would run while holding the GIL, which
deadlocks with gloo's own thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

DELEGATED = (
    *("broadcast", "reduce", "gather", "scatter", "allreduce_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("send", "recv", "recv_anysource", "barrier", "monitored_barrier"),
)


def native_backends(options: Any, rank: int, size: int) -> list[tuple[torch.device, Any, Any]]:
    """Device, kind and backend of what torch itself would use; collective."""
    kinds = dist.ProcessGroup.BackendType
    natives = [(torch.device("cpu"), kinds.GLOO, _gloo(options, rank, size))]
    if torch.cuda.is_available() and dist.is_nccl_available():
        natives.append((torch.device("cuda"), kinds.NCCL, _nccl(options, rank, size)))
    return natives


def register(group: dist.ProcessGroup, natives: list[tuple[torch.device, Any, Any]]) -> None:
    """Make a group one of these backends: names, options and lookups by device go there."""
    group._set_default_backend(natives[-1][1])
    for device, kind, native in natives:
        group._register_backend(device, kind, native)


def delegate(name: str) -> Callable[..., Any]:
    """A method that calls the same of ``self.inner``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _named(native: Any, options: Any) -> Any:
    native.options.global_ranks_in_group = options.global_ranks_in_group
    native.options.group_name = options.group_id
    native._set_sequence_number_for_group()
    return native


def _gloo(options: Any, rank: int, size: int) -> Any:
    store = dist.PrefixStore("gloo", options.store)
    return _named(dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout), options)


def _nccl(options: Any, rank: int, size: int) -> Any:
    native = dist.ProcessGroupNCCL.Options()
    native._timeout = options.timeout
    return _named(dist.ProcessGroupNCCL(dist.PrefixStore("nccl", options.store), rank, size, native), options)
