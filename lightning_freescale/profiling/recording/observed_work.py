"""Parts that all observed exchanges share: the decision to record one, its bytes, and the wait for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_freescale.profiling.recording.records import Collective
from lightning_freescale.profiling.recording.timeline import Timeline


def argument(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a function that finds an argument in a call; None if it is not passed or the function has no such argument."""
    parameters = list(inspect.signature(function).parameters)
    position = parameters.index(name) if name in parameters else len(parameters)
    return lambda args, kwargs: args[position] if len(args) > position else kwargs.get(name)


def is_seen(timeline: Timeline, group: Any, ignored_groups: Collection[Any]) -> bool:
    """Return True if a call on ``group`` (None for all ranks) should be recorded now."""
    if torch.compiler.is_compiling() or not timeline.recording:
        return False
    return group not in ignored_groups and group is not dist.GroupMember.NON_GROUP_MEMBER


def is_coalescing(group: Any) -> bool:
    """Return True if a coalescing manager of torch collects the calls on ``group``."""
    return (group or dist.group.WORLD) in dist.distributed_c10d._world.pg_coalesce_state


def place_of(group: Any) -> str:
    """Return a name of the group that is equal on all of its ranks."""
    return "world" if group is None or group is dist.group.WORLD else str(group.group_name)


def moved_bytes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], group: Any) -> int | None:
    """Return the larger of the bytes that this rank sends and receives; None for objects and sparse tensors."""
    if name.endswith(("object", "object_list")):
        return None
    if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in (*args, *kwargs.values())):
        return None
    size = group.size() if group is not None else dist.get_world_size()
    return over_link(name, max(map(tensor_bytes, (*args, *kwargs.values())), default=0), size)


def over_link(name: str, largest: int, size: int) -> int:
    """Return the bytes over a rank's link from those of the largest tensor, or list of tensors, of a collective."""
    if name in ("broadcast", "reduce"):
        return largest
    if name in ("all_reduce", "all_reduce_coalesced"):
        return 2 * largest * (size - 1) // size
    # for the others, the largest is what all ranks send or receive together
    return largest * (size - 1) // size


def tensor_bytes(value: Any) -> int:
    """Return the bytes of a tensor or a nested list of tensors; 0 for other values."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (Tensor, list, tuple)):
        return sum(map(tensor_bytes, value))
    return 0


class ObservedWork(dist.Work):
    """A Work whose wait is recorded as the wait for the first of ``collectives``; the others end with it.

    ``when_waited`` is called after the first wait.
    """

    def __init__(
        self, work: dist.Work, timeline: Timeline, *collectives: Collective, when_waited: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._work, self._timeline, self._collectives = work, timeline, collectives
        self._when_waited = when_waited

        def done(_: Any) -> None:
            for collective in collectives:
                collective.done = timeline.stamp()

        if timeline.on_host:  # on CUDA, a callback would run on a separate stream
            with suppress(RuntimeError):  # some Works have no future; their end is the end of the wait
                work.get_future().add_done_callback(done)

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._waiting():
            return self._work.wait(timeout)

    @override
    def synchronize(self) -> None:
        with self._waiting():
            self._work.synchronize()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        trains = self._timeline.is_training_thread
        with self._timeline.waiting(self._collectives[0] if trains else None):
            yield
        for collective in self._collectives[1:] if trains else ():
            with self._timeline.waiting(collective):
                pass
        when_waited, self._when_waited = self._when_waited, None
        if when_waited is not None and self._timeline.recording:
            when_waited()


def _delegate(name: str) -> Callable[[ObservedWork], Any]:
    return lambda work: getattr(work._work, name)()


for _name in ("is_completed", "is_success", "exception", "get_future", "result", "_source_rank"):
    setattr(ObservedWork, _name, _delegate(_name))
