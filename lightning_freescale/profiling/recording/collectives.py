"""Collectives on a timeline: those called through ``torch.distributed``, one by one or coalesced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from lightning_freescale.profiling.recording.functional_collectives import functional_collectives_on
from lightning_freescale.profiling.recording.observed_work import (
    ObservedWork,
    argument,
    is_coalescing,
    is_seen,
    moved_bytes,
    place_of,
    replaced,
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
_Coalesced = dict[Any, list[tuple[str, "int | None"]]]
"""Names and bytes of the calls that coalescing managers have collected so far, by group."""


@contextmanager
def collectives_on(timeline: Timeline, ignored_groups: Collection[dist.ProcessGroup] = ()) -> Generator[None, None, None]:
    """Have the functions of ``torch.distributed`` stamp ``timeline`` meanwhile; their results are what they were.

    Seen are collectives, messages from one rank to another, what a coalescing manager runs as one, and torch's functional
    collectives, which DTensor calls. Calls by other Python threads are exchanges in the background. Not seen are those in
    compiled code, asynchronous ones whose Work nobody waits for with ``wait`` or ``synchronize`` (of asynchronous
    ``*_coalesced`` functions, which return futures, none), and whoever took the functions out of ``torch.distributed`` by name
    before.

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
        functional_collectives_on(timeline, ignored_groups),
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
