"""The order of what CUDA streams would do, checked on CPU: events carry vector clocks, every operation is an access.

Memory written on one stream and touched on another must be ordered by events; that the host has waited does not count. And
memory used on another stream than the one it was made on must have been recorded there, or it may be given away too early.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.helpers.thread_mode import ThreadMode


class ClockEvent:
    def __init__(self, clock: Counter[str]) -> None:
        self.clock = clock


class ClockStream:
    made = 0
    events_count = True
    device = torch.device("cpu")

    def __init__(self, *args: Any) -> None:
        ClockStream.made += 1
        self.name = f"stream {ClockStream.made}"
        self.clock: Counter[str] = Counter()

    def record_event(self) -> ClockEvent:
        return ClockEvent(Counter(self.clock))

    def wait_event(self, event: ClockEvent) -> None:
        if self.events_count:
            self.clock |= event.clock  # the later of both, stream by stream

    def synchronize(self) -> None:
        """The host waits, which orders no streams."""


class Accesses:
    """What all streams have read and written.

    Attributes:
        unordered: pairs of accesses that no event orders.
        unrecorded: uses on a stream that the memory was not recorded on.
        seen: how many operations.
    """

    def __init__(self) -> None:
        self.unordered: set[str] = set()
        self.seen = 0
        self._writes: dict[int, tuple[ClockStream, int, str]] = {}
        self._reads: dict[int, dict[str, tuple[int, str]]] = defaultdict(dict)
        self._made_on: dict[int, tuple[ClockStream, str]] = {}
        self._used_on: dict[tuple[int, str], str] = {}
        self._recorded: set[tuple[int, str]] = set()
        self._kept: list[Any] = []  # or an address would be met again as other memory
        self._lock = threading.RLock()

    @property
    def unrecorded(self) -> set[str]:
        return {
            f"{place}, made by {self._made_on[address][1]}"
            for (address, stream), place in self._used_on.items()
            if (address, stream) not in self._recorded
        }

    def record(self, tensor: Tensor, stream: ClockStream) -> None:
        self._recorded.add((_address(tensor), stream.name))

    def add(self, what: str, read: list[Tensor], written: list[Tensor], made: list[Tensor]) -> None:
        with self._lock:
            stream = torch.cuda.current_stream()
            self.seen += 1
            stream.clock[stream.name] = self.seen
            place = f"{what} at {place_in_package()} on {stream.name}"
            self._kept += [tensor.untyped_storage() for tensor in read + written + made]
            for tensor in made:
                self._made_on.setdefault(_address(tensor), (stream, place))
            for tensor in read + written:
                self._touch(_address(tensor), stream, place)
            for tensor in written + made:
                self._write(_address(tensor), stream, place)
            for address in map(_address, read):
                self._reads[address][stream.name] = (self.seen, place)

    def _touch(self, address: int, stream: ClockStream, place: str) -> None:
        writer, when, where = self._writes.get(address, (stream, 0, ""))
        if address and writer is not stream and stream.clock[writer.name] < when:
            self.unordered.add(f"{place} after {where}")
        home = self._made_on.get(address)
        if address and home is not None and home[0] is not stream:
            self._used_on.setdefault((address, stream.name), place)

    def _write(self, address: int, stream: ClockStream, place: str) -> None:
        for reader, (when, where) in self._reads.pop(address, {}).items():
            if address and reader != stream.name and stream.clock[reader] < when:
                self.unordered.add(f"{place} writes after {where}")
        self._writes[address] = (stream, self.seen, place)


class Watch(ThreadMode):
    """Every operation of this thread is an access."""

    def __init__(self, accesses: Accesses) -> None:
        super().__init__()
        self._accesses = accesses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        addresses = {_address(each) for each in read}
        returned = [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
        made = [each for each in returned if _address(each) not in addresses]
        named = list(zip(func._schema.arguments, args)) + [
            (a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs
        ]
        written = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
        written = [each for each in pytree.tree_leaves(written) if isinstance(each, Tensor)]
        if made or written or not returned:  # else a view, which touches nothing
            self._accesses.add(func.overloadpacket.__name__, read, written, made)
        return out


def install(accesses: Accesses) -> None:
    """Put the clocks in the place of CUDA's streams, in a process that ends with the test."""
    current = threading.local()
    first = ClockStream()

    def current_stream(device: Any = None) -> ClockStream:
        return getattr(current, "stream", first)

    @contextmanager
    def on_stream(stream: ClockStream) -> Iterator[None]:
        before, current.stream = current_stream(), stream
        yield
        current.stream = before

    replaced: dict[str, Callable[..., Any]] = {"current_stream": current_stream, "stream": on_stream, "Stream": ClockStream}
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    torch.Tensor.record_stream = lambda tensor, stream: accesses.record(tensor, stream)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # has no storage
        return 0


def place_in_package() -> str:
    for frame in reversed(traceback.extract_stack(limit=30)):
        if "/lightning_freescale/" in frame.filename:
            return f"{frame.filename.rsplit('/lightning_freescale/', 1)[1]}:{frame.lineno}"
    return "the model"
