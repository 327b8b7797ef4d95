"""A device made of threads: every stream executes its operations in order, late, and at its own pace."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

WORD = 4
"""Bytes that are copied at once."""
_streams: list[FakeStream] = []
_memory: list[Tensor] = []


def keep(tensor: Tensor) -> Tensor:
    """Let a tensor live until the streams have ended, which know its address only."""
    _memory.append(tensor)
    return tensor


def end_streams() -> None:
    for stream in _streams:
        stream.end()
    for stream in _streams:
        stream.thread.join(10)
        assert not stream.thread.is_alive()
    _streams.clear()
    _memory.clear()


class FakeEvent:
    def __init__(self) -> None:
        self._done = threading.Event()

    def set(self) -> None:
        self._done.set()

    def clear(self) -> None:
        self._done.clear()

    def query(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()

    synchronize = wait


class FakeStream:
    """``hold`` set, it stops before the next operation. ``delay`` is before a copy of a tensor."""

    def __init__(self, delay: float = 0.0) -> None:
        self.hold, self.pending, self._delay = threading.Event(), 0, delay
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.ended = False
        _streams.append(self)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.ended = True
        self.hold.clear()
        self.put(None)

    def put(self, operation: Callable[[], object] | None) -> None:
        self.pending += 1
        self._queue.put(operation)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.clear()
        self.put(event.set)
        return event

    def idle(self) -> bool:
        return self.record_event()._done.wait(5)

    def synchronize(self) -> None:
        self.record_event().wait()

    def wait_event(self, event: FakeEvent) -> None:
        self.put(event.wait)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.put(lambda: (time.sleep(self._delay), target.copy_(source)))

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            while self.hold.is_set():
                time.sleep(1e-4)
            if not self.ended:
                operation()
            self.pending -= 1


class FakeDriver:
    """Stands in for ``CudaDriver``; memory of the CPU is its memory, and that of its peers.

    Copies of one call happen in any order, piece by piece.

    ``serial``: all streams but urgent ones are one, as if they shared a queue of the hardware.
    """

    device = torch.device("cpu")
    kernels = 0
    """Kernels that a captured operation has."""

    def __init__(self, seed: int = 0, slow: float = 2e-4, serial: bool = False) -> None:
        self._random, self._slow, self._serial = random.Random(seed), slow, serial
        self.streams: list[FakeStream] = []
        self.closed = False

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def create_stream(self, urgent: bool = False) -> FakeStream:
        if self._serial and self.streams and not urgent:
            return self.streams[0]
        self.streams.append(FakeStream())
        return self.streams[-1]

    def wait_event(self, stream: FakeStream, event: Any) -> None:
        if event is not None:
            stream.put(event.wait)

    def pointer(self, address: int) -> int:
        return address

    def copy(self, stream: FakeStream, targets: list[int], sources: list[int], lengths: list[int]) -> None:
        assert len(targets) == len(sources) == len(lengths)
        assert all(length > 0 for length in lengths)
        pieces = []
        for target, source, length in zip(targets, sources, lengths):
            half = length // 2
            halves = [(target, source, half), (target + half, source + half, length - half)]
            pieces += halves if length > WORD else [(target, source, length)]
        self._random.shuffle(pieces)
        delays = [self._random.uniform(0, 2 * self._slow / max(len(pieces), 1)) for _ in pieces]

        def copy() -> None:
            for piece, delay in zip(pieces, delays):
                time.sleep(delay)
                ctypes.memmove(*piece)

        if pieces:
            stream.put(copy)

    def word(self, address: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(address)

    def wait_words(self, stream: FakeStream, words: list[ctypes.c_uint32], values: list[int]) -> None:
        assert len(words) == len(values) < 256
        awaited = list(zip(words, values))

        def wait() -> None:
            while not stream.ended and any(signed(word.value - value) < 0 for word, value in awaited):
                time.sleep(2e-5)

        if awaited:
            stream.put(wait)

    def count_kernels_and_copies(self, stream: FakeStream, enqueue: Callable[[], object]) -> tuple[int, int]:
        captured: list[Any] = []
        stream.put = captured.append
        enqueue()
        del stream.put
        return self.kernels * len(captured), 0 if self.kernels else len(captured)

    def allocate_pinned(self, length: int) -> Tensor:
        return keep(torch.zeros(length, dtype=torch.int32))

    def destroy_streams(self) -> None:
        self.closed = True


def signed(value: int) -> int:
    """As a word of 32 bits holds it."""
    return (value + 2**31) % 2**32 - 2**31


def on_ranks(size: int, run: Callable[[int], Any], timeout: float = 60.0) -> list[Any]:
    """Call ``run(rank)`` on a thread per rank; what each returned or raised."""
    results: list[Any] = [TimeoutError("still running")] * size

    def call(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return results
