"""Record the collectives and messages of ``torch.distributed``, coalesced and functional collectives included."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial, update_wrapper, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.profiling.recording.observed_work import (
    ObservedWork,
    argument,
    is_coalescing,
    is_seen,
    moved_bytes,
    over_link,
    place_of,
    tensor_bytes,
)
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
"""The functional collectives that call torch's operators; the others call these."""
_PEER = {"isend": "dst", "send": "dst", "send_object_list": "dst", "irecv": "src", "recv": "src", "recv_object_list": "src"}
_Coalesced = dict[Any, list[tuple[str, "int | None"]]]
"""Names and bytes of the calls that open coalescing managers have collected, by group."""


@contextmanager
def collectives_on(timeline: Timeline, ignored_groups: Collection[dist.ProcessGroup] = ()) -> Generator[None, None, None]:
    """Record the calls of ``torch.distributed`` on ``timeline`` within the context. Their results do not change.

    The timeline has collectives, messages from one rank to another, the calls of a coalescing manager as one collective, and
    torch's functional collectives, which DTensor calls. Calls of other Python threads are background exchanges. The following
    calls are not recorded: those in compiled code, asynchronous calls whose Work is not waited for with ``wait`` or
    ``synchronize``, asynchronous ``*_coalesced`` functions, which return futures, and calls of code that imported the functions
    by name before.

    Args:
        timeline: records the calls while a step is open.
        ignored_groups: groups whose calls are not recorded.
    """
    # functions, because Lightning, TorchRec and models call them. A wrapped process group would miss the default group, which
    # must not be replaced.
    coalesced: _Coalesced = {}
    stamped = {name: _stamped(name, getattr(dist, name), timeline, ignored_groups, coalesced) for name in NAMES}
    manager = {"_coalescing_manager": _coalescing(timeline, ignored_groups, coalesced)}
    calls = _FunctionalCalls(timeline, ignored_groups)
    functional = {name: calls.stamped(name, getattr(funcol, name)) for name in _FUNCTIONAL_NAMES}
    functional["wait_tensor"] = calls.stamped_wait(funcol.wait_tensor)
    with replaced(dist, {**stamped, **manager}), _messages_on(timeline, ignored_groups), replaced(funcol, functional):
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
                running.close()  # runs the collected calls
        if async_ops and collective is not None:
            works.works = [ObservedWork(work, timeline, collective) for work in works.works]

    return stamped


def _arrive_together(timeline: Timeline, group: Any, calls: Sequence[tuple[str, int | None]]) -> Collective | None:
    if not calls:  # or only messages, which do not involve all ranks of the group
        return None
    known = [moved for _, moved in calls if moved is not None]
    moved = sum(known) if len(known) == len(calls) else None
    return timeline.arrive(f"{calls[0][0]} (coalesced)", place_of(group), moved)


# -- functional collectives


class _FunctionalCalls:
    """The functional collectives by the memory of their results, which is all that a wait knows.

    A rank arrives when it calls a functional collective. It waits when the tensor is first used, or in ``wait_tensor``. The
    backward that autograd runs is recorded as ``functional backward``, assuming that all ranks run these in the same order.
    """

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
            given = tensor_bytes(tensors) * (group.size() if name.startswith("all_gather") else 1)
            collective = self._timeline.arrive(name, place, over_link(name, given, group.size()))
            with replaced(self, {"_calling": collective}):
                result = function(*args, **kwargs)
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
        self._called = {memory: one for memory, one in self._called.items() if not memory.expired()}
        for tensor in _tensors(result):
            with suppress(RuntimeError, NotImplementedError):  # functorch's tensors have no memory
                self._called[StorageWeakRef(tensor.untyped_storage())] = collective

    def _awaited(self, tensor: Tensor) -> Collective | None:
        """Return the collective that a wait is for; a second wait takes no time."""
        for one in _tensors(tensor):
            with suppress(RuntimeError, NotImplementedError):
                called = self._called.get(StorageWeakRef(one.untyped_storage()))
                if called is not None:
                    return called
        if self._calling is not None:  # some collectives wait before they return
            return self._calling
        if torch._C._current_graph_task_id() >= 0:
            return self._timeline.arrive("functional backward")
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    for each in value if isinstance(value, (list, tuple)) else (value,):
        yield each.elem if isinstance(each, funcol.AsyncCollectiveTensor) else each


def _group_of(group: Any) -> tuple[str, Any]:
    """Return the name of a group and the group; None for lists of ranks, which are deprecated, and for invalid groups."""
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    elif isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        group = group[0].get_group(group[1])
    elif isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return (place_of(group), group) if isinstance(group, dist.ProcessGroup) else ("", None)


# -- messages from one rank to another


@contextmanager
def _messages_on(timeline: Timeline, ignored_groups: Collection[dist.ProcessGroup]) -> Generator[None, None, None]:
    """Record torch's functions that send and receive as the exchanges ``send`` and ``recv``.

    The n-th message of a step from one rank to another, with the same group and tag, is one exchange of both. A rank that waits
    for a message before the other rank has called its function waits for a straggler.
    """
    own = {name: getattr(dist, name) for name in (*_PEER, "batch_isend_irecv")}
    stamped = {name: _StampedMessage(function, timeline, ignored_groups) for name, function in own.items()}
    init = dist.P2POp.__init__

    @wraps(init)
    def init_with_torchs_own(self: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        init(self, inspect.unwrap(op), *args, **kwargs)  # torch compares with this function, also after the context

    dist.P2POp.__init__ = init_with_torchs_own  # type: ignore[method-assign]
    try:
        with replaced(dist, stamped):
            yield
    finally:
        dist.P2POp.__init__ = init  # type: ignore[method-assign]


class _StampedMessage:
    """A function that sends or receives. It is equal to torch's own function, because torch compares with that."""

    def __init__(self, function: Callable[..., Any], timeline: Timeline, ignored: Collection[Any]) -> None:
        update_wrapper(self, function)
        batch = function.__name__ not in _PEER
        self._call = (_stamped_batch if batch else _stamped_message)(function, timeline, ignored)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return callable(other) and inspect.unwrap(self) is inspect.unwrap(other)

    def __hash__(self) -> int:
        return hash(inspect.unwrap(self))


def _stamped_message(function: Callable[..., Any], timeline: Timeline, ignored: Collection[Any]) -> Callable[..., Any]:
    name: str = function.__name__
    kind, to = ("send", True) if "send" in name else ("recv", False)
    group_of, tag_of = argument(function, "group"), argument(function, "tag")
    peer_of, group_peer_of = argument(function, _PEER[name]), argument(function, f"group_{_PEER[name]}")

    def call(*args: Any, **kwargs: Any) -> Any:
        group = group_of(args, kwargs)
        if not is_seen(timeline, group, ignored) or is_coalescing(group):
            return function(*args, **kwargs)
        objects = "object" in name  # objects have no tag, but a separate order
        moved = None if objects else tensor_bytes(args[0] if args else kwargs.get("tensor"))
        tag = "objects" if objects else tag_of(args, kwargs) or 0
        if not timeline.is_training_thread:
            with timeline.background_collective(kind, moved):
                return function(*args, **kwargs)
        peer = _global_rank(peer_of(args, kwargs), group_peer_of(args, kwargs), group)
        place = partial(_place, group, to, tag)
        message = timeline.arrive(kind, place(peer), moved)
        if message is None:
            return function(*args, **kwargs)

        from_any = peer is None and not to

        def set_sender(source: int | None) -> None:
            if source is not None:  # None: this rank is not in the group
                message.key = timeline.key_in(place(source))

        if name[0] != "i":
            with timeline.waiting(message):
                source = function(*args, **kwargs)
            if from_any:
                set_sender(source)
            return source
        work = function(*args, **kwargs)
        if work is None:
            return None
        when_waited = (lambda: set_sender(_global_rank(None, work._source_rank(), group))) if from_any else None
        return ObservedWork(work, timeline, message, when_waited=when_waited)

    return call


def _stamped_batch(
    function: Callable[..., list[dist.Work]], timeline: Timeline, ignored: Collection[Any]
) -> Callable[..., list[dist.Work]]:
    def call(p2p_op_list: list[Any]) -> list[dist.Work]:
        messages = isinstance(p2p_op_list, list) and all(isinstance(op, dist.P2POp) for op in p2p_op_list)
        if not messages or not all(is_seen(timeline, op.group, ignored) for op in p2p_op_list):
            return function(p2p_op_list)
        if not timeline.is_training_thread:
            with timeline.background_collective("send and recv", sum(tensor_bytes(op.tensor) for op in p2p_op_list)):
                return function(p2p_op_list)
        arrived = [_arrive(timeline, op) for op in p2p_op_list]
        works = function(p2p_op_list)
        seen = [message for message in arrived if message is not None]
        if len(seen) < len(arrived):  # the batch is a part of another exchange
            return works
        if len(works) == len(seen):
            return [ObservedWork(work, timeline, message) for work, message in zip(works, seen)]
        return [ObservedWork(work, timeline, *seen) for work in works]  # one Work for all messages

    return call


def _arrive(timeline: Timeline, op: Any) -> Collective | None:
    to = inspect.unwrap(op.op) is inspect.unwrap(dist.isend)
    return timeline.arrive("send" if to else "recv", _place(op.group, to, op.tag, op.peer), tensor_bytes(op.tensor))


def _place(group: Any, to: bool, tag: Any, peer: int | None) -> str:
    """Return a name of the messages from one rank to another that is equal on both; without a known sender, a local name."""
    here = dist.get_rank()
    if peer is None:
        return f"{place_of(group)} any>{here} of {here}"
    source, target = (here, peer) if to else (peer, here)
    return f"{place_of(group)} {source}>{target} {tag}"


def _global_rank(rank: int | None, group_rank: int | None, group: Any) -> int | None:
    if rank is not None or group_rank is None:
        return rank
    try:
        return dist.get_global_rank(group or dist.distributed_c10d._get_default_group(), group_rank)
    except ValueError:  # the rank does not exist, and torch raises an error in the call
        return None
