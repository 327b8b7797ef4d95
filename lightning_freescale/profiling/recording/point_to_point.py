"""Messages from one rank to another on a timeline: each is an exchange of the two."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from functools import partial, update_wrapper, wraps
from typing import Any

import torch.distributed as dist

from lightning_freescale.profiling.recording.observed_work import (
    ObservedWork,
    argument,
    is_coalescing,
    is_seen,
    place_of,
    replaced,
    tensor_bytes,
)
from lightning_freescale.profiling.recording.records import Collective
from lightning_freescale.profiling.recording.timeline import Timeline

_PEER = {"isend": "dst", "send": "dst", "send_object_list": "dst", "irecv": "src", "recv": "src", "recv_object_list": "src"}


@contextmanager
def messages_on(timeline: Timeline, ignored_groups: Collection[dist.ProcessGroup] = ()) -> Generator[None, None, None]:
    """Have torch's functions that send and receive stamp ``timeline`` meanwhile, as the exchanges ``send`` and ``recv``.

    The n-th message of a step from one rank to another, of a group and a tag, is one exchange of both: a rank that waits for it
    before the other has called its function waits for a straggler.
    """
    own = {name: getattr(dist, name) for name in (*_PEER, "batch_isend_irecv")}
    stamped = {name: _Stamped(function, timeline, ignored_groups) for name, function in own.items()}
    init = dist.P2POp.__init__

    @wraps(init)
    def init_with_torchs_own(self: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        init(self, inspect.unwrap(op), *args, **kwargs)  # torch tells sends by this function, also when we are gone

    dist.P2POp.__init__ = init_with_torchs_own  # type: ignore[method-assign]
    try:
        with replaced(dist, stamped):
            yield
    finally:
        dist.P2POp.__init__ = init  # type: ignore[method-assign]


class _Stamped:
    """A function that sends or receives, as seen; equal to torch's own, because torch compares with it."""

    def __init__(self, function: Callable[..., Any], timeline: Timeline, ignored: Collection[Any]) -> None:
        update_wrapper(self, function)
        batch = function.__name__ not in _PEER
        self._call = (_stamped_batch if batch else _stamped)(function, timeline, ignored)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return callable(other) and inspect.unwrap(self) is inspect.unwrap(other)

    def __hash__(self) -> int:
        return hash(inspect.unwrap(self))


def _stamped(function: Callable[..., Any], timeline: Timeline, ignored: Collection[Any]) -> Callable[..., Any]:
    name: str = function.__name__
    kind, to = ("send", True) if "send" in name else ("recv", False)
    group_of, tag_of = argument(function, "group"), argument(function, "tag")
    peer_of, group_peer_of = argument(function, _PEER[name]), argument(function, f"group_{_PEER[name]}")

    def call(*args: Any, **kwargs: Any) -> Any:
        group = group_of(args, kwargs)
        if not is_seen(timeline, group, ignored) or is_coalescing(group):
            return function(*args, **kwargs)
        # objects have no tag, but an order of their own
        objects = "object" in name
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

        def tell_sender(source: int | None) -> None:
            if source is not None:  # it is not of the group otherwise
                message.key = timeline.key_in(place(source))

        if name[0] != "i":
            with timeline.waiting(message):
                source = function(*args, **kwargs)
            if from_any:
                tell_sender(source)
            return source
        work = function(*args, **kwargs)
        if work is None:
            return None
        when_waited = (lambda: tell_sender(_global_rank(None, work._source_rank(), group))) if from_any else None
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
        if len(seen) < len(arrived):  # part of another exchange
            return works
        if len(works) == len(seen):
            return [ObservedWork(work, timeline, message) for work, message in zip(works, seen)]
        return [ObservedWork(work, timeline, *seen) for work in works]  # one Work for all of them

    return call


def _arrive(timeline: Timeline, op: Any) -> Collective | None:
    to = inspect.unwrap(op.op) is inspect.unwrap(dist.isend)
    return timeline.arrive("send" if to else "recv", _place(op.group, to, op.tag, op.peer), tensor_bytes(op.tensor))


def _place(group: Any, to: bool, tag: Any, peer: int | None) -> str:
    """Return what names the messages from one rank to another on both of them; only on this one if the sender is not known."""
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
    except ValueError:  # there is no such rank, as torch is about to say
        return None
