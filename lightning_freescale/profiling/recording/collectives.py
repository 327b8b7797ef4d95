"""Sees every collective that is called through ``torch.distributed``, whoever calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.profiling.recording.moved import moved_bytes
from lightning_freescale.profiling.recording.records import Collective
from lightning_freescale.profiling.recording.timeline import Timeline

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


@contextmanager
def collectives_on(timeline: Timeline, leave: Collection[dist.ProcessGroup] = ()) -> Iterator[None]:
    """Meanwhile the functions of ``torch.distributed`` stamp ``timeline``; their results are what they were.

    Calls by other Python threads are exchanges in the background. Not seen are point-to-point messages, torch's functional
    and coalesced collectives, those in compiled code, asynchronous ones whose Work nobody waits for with ``wait`` or
    ``synchronize``, and whoever took the functions out of ``torch.distributed`` by name before.

    Args:
        timeline: records them while a step is open.
        leave: groups whose collectives are nobody's business.
    """
    originals = {name: getattr(dist, name) for name in NAMES}
    for name, function in originals.items():
        setattr(dist, name, _stamped(name, function, timeline, leave))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


class ObservedWork(dist.Work):
    """A Work whose wait is on a timeline."""

    def __init__(self, work: dist.Work, timeline: Timeline, collective: Collective) -> None:
        super().__init__()
        self._work, self._timeline, self._collective = work, timeline, collective

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective."""
        with self._waiting():
            return self._work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is done without error."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Its error, if any."""
        return self._work.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        """Its future."""
        return self._work.get_future()

    def result(self) -> Any:
        """Its tensors."""
        return self._work.result()

    def synchronize(self) -> None:
        """Make the current stream wait for it."""
        with self._waiting():
            self._work.synchronize()

    def _waiting(self) -> AbstractContextManager[None]:
        return self._timeline.waiting(self._collective if self._timeline.is_training_thread else None)


def _stamped(name: str, function: Callable[..., Any], timeline: Timeline, leave: Collection[Any]) -> Callable[..., Any]:
    group_of, is_async = _argument(function, "group"), _argument(function, "async_op")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not timeline.recording:
            return function(*args, **kwargs)
        group = group_of(args, kwargs)
        if group in leave or group is dist.GroupMember.NON_GROUP_MEMBER or _coalesces(group):
            return function(*args, **kwargs)
        moved = moved_bytes(name, args, kwargs, group)
        if not timeline.is_training_thread:
            with timeline.elsewhere(name, moved):
                return function(*args, **kwargs)
        collective = timeline.arrive(name, _place(group), moved)
        if not is_async(args, kwargs):
            with timeline.waiting(collective):
                return function(*args, **kwargs)
        work = function(*args, **kwargs)
        return work if work is None or collective is None else _observed(work, timeline, collective)

    return call


def _argument(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Finds an argument in a call; None if it is not given, or the function has no such argument."""
    parameters = list(inspect.signature(function).parameters)
    position = parameters.index(name) if name in parameters else len(parameters)
    return lambda args, kwargs: args[position] if len(args) > position else kwargs.get(name)


def _coalesces(group: Any) -> bool:
    """Whether a coalescing manager of torch collects the group's calls, to run them when it ends."""
    pending = dist.distributed_c10d._world.pg_coalesce_state
    return bool(pending) and (group or dist.group.WORLD) in pending


def _place(group: Any) -> str:
    return "world" if group is None or group is dist.group.WORLD else str(group.group_name)


def _observed(work: dist.Work, timeline: Timeline, collective: Collective) -> dist.Work:
    def done(_: Any) -> None:
        collective.done = timeline.stamp()

    if timeline.on_host:  # on CUDA a callback would get a stream of its own
        with suppress(RuntimeError):  # some Works have no future: then it is done when it was waited for
            work.get_future().add_done_callback(done)
    return ObservedWork(work, timeline, collective)
