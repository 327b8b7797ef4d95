"""Collectives on a timeline: functions of ``torch.distributed``, one by one or coalesced, and functional collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_freescale.profiling.recording.observed_work import (
    ObservedWork,
    argument,
    is_coalescing,
    is_seen,
    moved_bytes,
    over_link,
    place_of,
    replaced,
    tensor_bytes,
)
from lightning_freescale.profiling.recording.point_to_point import messages_on
from lightning_freescale.profiling.recording.records import Collective
from lightning_freescale.profiling.recording.timeline import Timeline

NAMES = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_object", "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip
_FUNCTIONAL_NAMES = (
    "broadcast", "all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_reduce_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
"""Functional collectives that the others call."""
_Coalesced = dict[Any, list[tuple[str, "int | None"]]]
"""Names and bytes of the calls that coalescing managers have collected so far, by group."""


@contextmanager
def collectives_on(timeline: Timeline, ignored_groups: Collection[dist.ProcessGroup] = ()) -> Generator[None, None, None]:
    """Have the functions of ``torch.distributed`` stamp ``timeline`` meanwhile; their results are what they were.

    Seen are collectives, messages from one rank to another, what a coalescing manager runs as one, and torch's functional
    collectives, which DTensor calls. Calls by other Python threads are exchanges in the background. Not seen are those in
    compiled code, asynchronous ones whose Work is not waited for with ``wait`` or ``synchronize`` (none of asynchronous
    ``*_coalesced`` functions, which return futures), and calls by code that imported the functions by name before.

    Args:
        timeline: records them while a step is open.
        ignored_groups: groups whose collectives are not recorded.
    """
    # functions, because Lightning, TorchRec and models call them: wrapping a process group would miss the default one,
    # which must stay stock
    coalesced: _Coalesced = {}
    stamped = {name: _stamped(name, getattr(dist, name), timeline, ignored_groups, coalesced) for name in NAMES}
    manager = {"_coalescing_manager": _coalescing(timeline, ignored_groups, coalesced)}
    with (
        replaced(dist, {**stamped, **manager}),
        messages_on(timeline, ignored_groups),
        _functional_collectives_on(timeline, ignored_groups),
    ):
        yield


def _stamped(
    name: str, function: Callable[..., Any], timeline: Timeline, ignored: Collection[Any], coalesced: _Coalesced
) -> Callable[..., Any]:
    group_of = argument(function, "group")
    is_async = argument(function, "async_op")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = group_of(args, kwargs)
        if not is_seen(timeline, group, ignored):
            return function(*args, **kwargs)
        moved = moved_bytes(name, args, kwargs, group)
        if is_coalescing(group):
            coalesced.get(group or dist.group.WORLD, []).append((name, moved))
            return function(*args, **kwargs)
        if not timeline.is_training_thread:
            with timeline.background_collective(name, moved):
                return function(*args, **kwargs)
        collective = timeline.arrive(name, place_of(group), moved)
        if not is_async(args, kwargs):
            with timeline.waiting(collective):
                return function(*args, **kwargs)
        work = function(*args, **kwargs)
        return ObservedWork(work, timeline, collective) if collective is not None and isinstance(work, dist.Work) else work

    return call


def _coalescing(timeline: Timeline, ignored: Collection[Any], coalesced: _Coalesced) -> Callable[..., Any]:
    manager: Callable[..., AbstractContextManager[Any]] = dist._coalescing_manager

    @wraps(manager)
    @contextmanager
    def stamped(group: Any = None, device: Any = None, async_ops: bool = False) -> Generator[Any, None, None]:
        of = group or dist.group.WORLD
        if not (is_seen(timeline, group, ignored) and timeline.is_training_thread) or is_coalescing(group):
            with manager(group, device, async_ops) as works:
                yield works
            return
        with ExitStack() as running:
            works = running.enter_context(manager(group, device, async_ops))
            calls = coalesced[of] = []
            try:
                yield works
            finally:
                del coalesced[of]
            collective = _arrive_together(timeline, group, calls)
            with timeline.waiting(None if async_ops else collective):
                running.close()  # runs what was collected
        if async_ops and collective is not None:
            works.works = [ObservedWork(work, timeline, collective) for work in works.works]

    return stamped


def _arrive_together(timeline: Timeline, group: Any, calls: Sequence[tuple[str, int | None]]) -> Collective | None:
    if not calls:  # or messages alone, which are not of all ranks of the group
        return None
    known = [moved for _, moved in calls if moved is not None]
    moved = sum(known) if len(known) == len(calls) else None
    return timeline.arrive(f"{calls[0][0]} (coalesced)", place_of(group), moved)


@contextmanager
def _functional_collectives_on(
    timeline: Timeline, ignored_groups: Collection[dist.ProcessGroup] = ()
) -> Generator[None, None, None]:
    """Have torch's functional collectives stamp ``timeline`` meanwhile: this rank arrives when it calls one.

    It waits where the tensor is first used, or ``wait_tensor`` is called. What autograd does for their backward is seen as
    ``functional backward``, which the ranks are taken to call in the same order whatever the group.
    """
    calls = _FunctionalCalls(timeline, ignored_groups)
    stamped = {name: calls.stamped(name, getattr(funcol, name)) for name in _FUNCTIONAL_NAMES}
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
