"""Collectives on a timeline: those called through ``torch.distributed``, and what can be seen of DDP's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.profiling.recording.records import Collective
from lightning_freescale.profiling.recording.timeline import Timeline

NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter", "scatter_object_list",
)  # fmt: skip


@contextmanager
def collectives_on(timeline: Timeline, ignored_groups: Collection[dist.ProcessGroup] = ()) -> Iterator[None]:
    """Have the functions of ``torch.distributed`` stamp ``timeline`` meanwhile; their results are what they were.

    Calls by other Python threads are exchanges in the background. Not seen are point-to-point messages, torch's functional
    and coalesced collectives, those in compiled code, asynchronous ones whose Work nobody waits for with ``wait`` or
    ``synchronize``, and whoever took the functions out of ``torch.distributed`` by name before.

    Args:
        timeline: records them while a step is open.
        ignored_groups: groups whose collectives are not recorded.
    """
    # functions, because Lightning, TorchRec and models call them: wrapping a process group would miss the default one,
    # which must stay stock
    stamped = {name: _stamped(name, getattr(dist, name), timeline, ignored_groups) for name in NAMES}
    with replaced(dist, stamped):
        yield


@contextmanager
def replaced(owner: object, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Let a module or an instance have other attributes meanwhile; the class stays as it is."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(owner).pop(name, None)
        vars(owner).update(own)


class _ObservedWork(dist.Work):
    """A Work whose wait is on a timeline."""

    def __init__(self, work: dist.Work, timeline: Timeline, collective: Collective) -> None:
        super().__init__()
        self._work, self._timeline, self._collective = work, timeline, collective

        def done(_: Any) -> None:
            collective.done = timeline.stamp()

        if timeline.on_host:  # on CUDA a callback would get a stream of its own
            with suppress(RuntimeError):  # some Works have no future: then it is done when it was waited for
                work.get_future().add_done_callback(done)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._waiting():
            return self._work.wait(timeout)

    def synchronize(self) -> None:
        with self._waiting():
            self._work.synchronize()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def result(self) -> Any:
        return self._work.result()

    def _waiting(self) -> AbstractContextManager[None]:
        return self._timeline.waiting(self._collective if self._timeline.is_training_thread else None)


def _stamped(name: str, function: Callable[..., Any], timeline: Timeline, ignored: Collection[Any]) -> Callable[..., Any]:
    group_of = _argument(function, "group")
    is_async = _argument(function, "async_op")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not timeline.recording:
            return function(*args, **kwargs)
        group = group_of(args, kwargs)
        # a coalescing manager of torch collects the calls of such groups, to run them when it ends
        coalesces = (group or dist.group.WORLD) in dist.distributed_c10d._world.pg_coalesce_state
        if coalesces or group in ignored or group is dist.GroupMember.NON_GROUP_MEMBER:
            return function(*args, **kwargs)
        moved = moved_bytes(name, args, kwargs, group)
        if not timeline.is_training_thread:
            with timeline.background_collective(name, moved):
                return function(*args, **kwargs)
        of_world = group is None or group is dist.group.WORLD
        collective = timeline.arrive(name, "world" if of_world else str(group.group_name), moved)
        if not is_async(args, kwargs):
            with timeline.waiting(collective):
                return function(*args, **kwargs)
        work = function(*args, **kwargs)
        return work if work is None or collective is None else _ObservedWork(work, timeline, collective)

    return call


def _argument(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return what finds an argument in a call: None if it is not given, or the function has no such argument."""
    parameters = list(inspect.signature(function).parameters)
    position = parameters.index(name) if name in parameters else len(parameters)
    return lambda args, kwargs: args[position] if len(args) > position else kwargs.get(name)


def moved_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> int | None:
    """Return the larger of what this rank sends and receives in a collective, in bytes.

    None for objects and sparse tensors, whose size is not known ahead.
    """
    if name.endswith(("object", "object_list")):
        return None
    if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in (*args, *kwargs.values())):
        return None
    largest = max(map(_bytes, (*args, *kwargs.values())), default=0)
    if not largest:
        return 0
    size = group.size() if group is not None else dist.get_world_size()
    if name in ("broadcast", "reduce"):
        return largest
    if name == "all_reduce":
        return 2 * largest * (size - 1) // size
    # of all others the largest tensor, or list of them, is what the ranks send or receive together
    return largest * (size - 1) // size


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return sum(each.nbytes for each in value)
    return 0


@contextmanager
def ddp_waits_on(timeline: Timeline, model: object, loss: Tensor) -> Iterator[None]:
    """Record DDP's wait for its last gradients, around the backward of ``loss``, as the collective ``dense gradients``.

    Does nothing if ``model`` is no DDP, or does not synchronize this time. What DDP hides behind backward is not seen.
    """
    with ExitStack() as waiting:
        if timeline.recording and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            # what a backward queues runs in order when all gradients are there: ours, DDP's wait for its buckets, what ours
            # queues; a communication hook would see more, but replace DDP's own reduction
            engine = torch.autograd.Variable._execution_engine

            def wait_begins() -> None:
                waiting.enter_context(timeline.collective("dense gradients", moved=_last_bucket(model)))
                engine.queue_callback(waiting.close)

            loss.register_hook(lambda _: engine.queue_callback(wait_begins))
        yield


def buffers_on(timeline: Timeline, model: object) -> AbstractContextManager[None]:
    """Record DDP's broadcast of the module's buffers, around a forward of it, as the collective ``buffers``."""
    if not timeline.recording or not isinstance(model, DistributedDataParallel) or not model.modules_buffers:
        return nullcontext()
    sync = model._sync_buffers  # DDP calls it where it needs it, and has no hook for it

    def stamped() -> None:
        with timeline.collective("buffers"):
            sync()

    return replaced(model, {"_sync_buffers": stamped})


def _last_bucket(model: DistributedDataParallel) -> int:
    """Bytes that travel when nothing is left to compute: the others do so behind backward."""
    ignored = getattr(model, "parameters_to_ignore", ())
    trained = (p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    ranks = model.process_group.size()
    return 2 * min(whole, int(model.bucket_bytes_cap)) * (ranks - 1) // ranks
