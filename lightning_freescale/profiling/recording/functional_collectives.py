"""Torch's functional collectives on a timeline: they return tensors that are waited for when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_freescale.profiling.recording.observed_work import argument, is_seen, over_link, place_of, replaced, tensor_bytes
from lightning_freescale.profiling.recording.records import Collective
from lightning_freescale.profiling.recording.timeline import Timeline

# the others call these
_NAMES = (
    "broadcast", "all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_reduce_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip


@contextmanager
def functional_collectives_on(
    timeline: Timeline, ignored_groups: Collection[dist.ProcessGroup] = ()
) -> Generator[None, None, None]:
    """Have torch's functional collectives stamp ``timeline`` meanwhile: this rank arrives when it calls one.

    It waits where the tensor is first used, or ``wait_tensor`` is called. What autograd does for their backward is seen as
    ``functional backward``, which the ranks are taken to call in the same order whatever the group.
    """
    calls = _FunctionalCalls(timeline, ignored_groups)
    stamped = {name: calls.stamped(name, getattr(funcol, name)) for name in _NAMES}
    with replaced(funcol, {**stamped, "wait_tensor": calls.stamped_wait(funcol.wait_tensor)}):
        yield


class _FunctionalCalls:
    """The collectives that were called, by the memory of what they returned: a wait says no more than that."""

    def __init__(self, timeline: Timeline, ignored: Collection[Any]) -> None:
        self._timeline, self._ignored = timeline, ignored
        self._called: dict[StorageWeakRef, Collective] = {}
        self._calling: Collective | None = None

    def stamped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        group_of, tensors_of = argument(function, "group"), argument(function, "self")
        inputs_of = argument(function, "inputs")

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._timeline.recording or not self._timeline.is_training_thread:
                return function(*args, **kwargs)
            place, group = _group_of(group_of(args, kwargs))
            if group is None or not is_seen(self._timeline, group, self._ignored):
                return function(*args, **kwargs)
            tensors = inputs_of(args, kwargs) if name.startswith("reduce_scatter_single_c") else tensors_of(args, kwargs)
            moved = _moved(name, tensor_bytes(tensors), group.size())
            collective = self._timeline.arrive(name, place, moved)
            before, self._calling = self._calling, collective
            try:
                result = function(*args, **kwargs)
            finally:
                self._calling = before
            if collective is not None:
                self._remember(result, collective)
            return result

        return call

    def stamped_wait(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @wraps(function)
        def call(tensor: Tensor) -> Tensor:
            if torch.compiler.is_compiling() or not self._timeline.recording or not self._timeline.is_training_thread:
                return function(tensor)
            with self._timeline.waiting(self._awaited(tensor)):
                return function(tensor)

        return call

    def _remember(self, result: Any, collective: Collective) -> None:
        # memory that is gone is not waited for any more
        self._called = {memory: one for memory, one in self._called.items() if not memory.expired()}
        for tensor in _tensors(result):
            with suppress(RuntimeError, NotImplementedError):  # a tensor of functorch's has no memory of its own
                self._called[StorageWeakRef(tensor.untyped_storage())] = collective

    def _awaited(self, tensor: Tensor) -> Collective | None:
        """Return what a wait is for; waiting again for what is there already takes no time."""
        for one in _tensors(tensor):
            with suppress(RuntimeError, NotImplementedError):
                called = self._called.get(StorageWeakRef(one.untyped_storage()))
                if called is not None:
                    return called
        if self._calling is not None:  # some wait before they return
            return self._calling
        if torch._C._current_graph_task_id() >= 0:
            return self._timeline.arrive("functional backward")
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    for each in value if isinstance(value, (list, tuple)) else (value,):
        yield each.elem if isinstance(each, funcol.AsyncCollectiveTensor) else each


def _group_of(group: Any) -> tuple[str, Any]:
    """Return what names a group on all of its ranks, and the group.

    None for lists of ranks, which torch has deprecated, and for what torch is about to refuse.
    """
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    elif isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        group = group[0].get_group(group[1])
    elif isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return (place_of(group), group) if isinstance(group, dist.ProcessGroup) else ("", None)


def _moved(name: str, given: int, size: int) -> int:
    return over_link(name, given * size if name.startswith("all_gather") else given, size)
