"""Chunks go through pinned memory in order, within its bound, and the three stages are at work at the same time.

There is no GPU here: streams are threads that copy late, so that whoever does not wait for an event finds wrong bytes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm import LaneOptions
from lightning_freescale.comm.transports.host.staging import DeviceStaging, HostStaging
from lightning_freescale.comm.transports.host.transport import HostTransport
from lightning_freescale.testing import run_distributed
from tests.comm.transports.test_host import DEVICE, all_arrived, draw_sizes, make_host, make_p2p, make_transfer
from tests.helpers.comm_groups import nothing_left, pinned_in_use

_CURRENT = threading.local()


class Event:
    """Of a stream, as in ``torch.cuda``."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def record(self) -> None:
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        assert self._done.wait(30)


class Stream:
    """A thread that does what it is given late, one after the other, as a stream of a GPU does."""

    def __init__(self, device: Any = None, delay: float = 0.0005) -> None:
        self._given, self._copied, self._delay = 0, 0, delay
        self._jobs: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            job()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._given += 1
        self._jobs.put(lambda: self._copy(target, source))

    def synchronize(self) -> None:
        done = threading.Event()
        self._jobs.put(done.set)
        assert done.wait(30)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        time.sleep(self._delay)
        target.copy_(source)
        self._copied += 1

    @property
    def at_work(self) -> bool:
        return self._given > self._copied

    def wait_event(self, event: Event) -> None:
        self._jobs.put(event.synchronize)

    def record_event(self) -> Event:
        event = Event()
        self._jobs.put(event.record)
        return event


class Api:
    """As ``torch.cuda``; counts how often all stages are at work."""

    def __init__(self, delay: float = 0.0005) -> None:
        self._delay, self.streams = delay, list[Stream]()

    def Stream(self, device: Any) -> Stream:  # noqa: N802 (torch's name)
        self.streams.append(Stream(device, self._delay))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        _CURRENT.stream = stream
        yield
        _CURRENT.stream = None


class Pinned(torch.Tensor):
    """Memory to and from which copies that are not to block are queued on the current stream."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = (each.as_subclass(torch.Tensor) for each in args)
            _CURRENT.stream.copy(target, source)  # there must be one
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class Memory:
    """Makes pinned memory and knows how much there ever was at a time."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, length: int) -> Tensor:
        self.made += length
        return torch.full((length,), 238, dtype=torch.uint8).as_subclass(Pinned)


def _staging(api: Api, pinned_bytes: int, memory: Callable[[int], Tensor]) -> DeviceStaging:
    return DeviceStaging(DEVICE, pinned_bytes, api=api, allocate=memory)


def _random(chunk: int, pinned_bytes: int, cases: int) -> tuple[int, int, int]:
    """Wrong transfers; the most pinned bytes that were held; and those still in use."""
    p2p, api, wrong, most = make_p2p(), Api(), 0, 0
    draw, caller = (
        random.Random(chunk),
        Stream(delay=0.002 + 0.01 * (p2p.rank == 1)),
    )  # so that chunks come before rank 1 is ready
    staging = _staging(api, pinned_bytes, Memory())
    host = make_host(p2p, chunk, staging, pinned_bytes=pinned_bytes)
    for number in range(cases):
        sizes = draw_sizes(draw, p2p.size, chunk)
        given = make_transfer(sizes, p2p.rank, number)
        transfer = make_transfer(sizes, p2p.rank, number)
        for late, part in zip(given.outgoing, transfer.outgoing):  # the caller's stream is still at work on both
            part.zero_()
            caller.copy(part, late)
        for part in transfer.incoming:
            caller.copy(part, torch.full_like(part, 77))
        transfer.issued = caller.record_event()

        def look() -> None:
            nonlocal most
            most = max(most, staging._outgoing.held, staging._incoming.held)

        host.move(transfer, look)
        look()
        wrong += not all_arrived(transfer, sizes, p2p.rank, range(p2p.size))
    return wrong, most, pinned_in_use(host)


@pytest.mark.parametrize(
    ("size", "chunk", "pinned_bytes"),
    [(2, 64, 64 * 40), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 100, 100 * 40), (3, 16, 1 << 20)])],
)
def test_all_bytes_arrive_within_the_bound_and_all_memory_is_given_back(size: int, chunk: int, pinned_bytes: int) -> None:
    for wrong, most, in_use in run_distributed(_random, size, chunk, pinned_bytes, 20, timeout=100):
        assert wrong == 0
        assert 0 < most <= pinned_bytes // 2
        assert in_use == 0


def test_neither_direction_begins_before_the_callers_stream_is_there() -> None:
    staging, caller = _staging(Api(), 4000, Memory()), Stream(delay=0.1)
    given, wanted, out = torch.zeros(50), torch.arange(50.0), torch.zeros(50)
    source, target = (each.view(torch.uint8) for each in (given, out))
    caller.copy(given, wanted)
    caller.copy(out, torch.full_like(out, 77.0))
    staging.wait_event(caller.record_event())
    arrived = staging.allocate(target)
    arrived[: len(target)] = wanted.view(torch.uint8)
    staging.copy_to_device(arrived, target)
    copy = staging.copy_to_host(source)
    assert torch.equal(copy.wait().as_subclass(Tensor), wanted.view(torch.uint8))
    staging.synchronize()
    assert torch.equal(out, wanted)
    staging.release(copy)
    assert staging._outgoing.in_use == staging._incoming.in_use == 0


def _overlap() -> tuple[int, bool]:
    """Chunks that were on the network while others were being copied to the host and to the device."""
    p2p, api = make_p2p(), Api(delay=0.002)
    staging = _staging(api, 4000, Memory())
    to_host, to_device = api.streams
    moments, wait, sends = [0], p2p.wait, set[int]()
    send = p2p.send

    def noted_send(*args: Any) -> Any:
        work = send(*args)
        sends.add(id(work))
        return work

    def counted_wait(work: Any, *rest: Any) -> None:
        moments[0] += id(work) in sends and to_host.at_work and to_device.at_work
        wait(work, *rest)

    p2p.send, p2p.wait = noted_send, counted_wait
    sizes = [[0, 4000], [4000, 0]]
    transfer = make_transfer(sizes, p2p.rank, 0)
    transfer.issued = Stream().record_event()
    make_host(p2p, 100, staging, pinned_bytes=4000).move(transfer, lambda: None)
    return moments[0], all_arrived(transfer, sizes, p2p.rank, range(2))


def test_chunks_are_copied_to_the_host_sent_and_copied_to_the_device_at_the_same_time() -> None:
    for moments, right in run_distributed(_overlap, 2, timeout=60):
        assert moments >= 10
        assert right


def _fails() -> int:
    """Memory in use after the peer has gone in the middle of a transfer."""
    p2p, api, rank = make_p2p(), Api(), dist.get_rank()
    host = make_host(p2p, 100, _staging(api, 1 << 16, Memory()))
    with nothing_left(host):
        sizes = [[0, 40_000], [40_000, 0]]
        transfer, chunks = make_transfer(sizes, rank, 0), iter(range(5))
        transfer.issued = Stream().record_event()

        def stop() -> None:
            if rank == 1 and next(chunks, None) is None:
                raise RuntimeError("enough")

        with pytest.raises(RuntimeError):
            host.move(transfer, stop)
        in_use = pinned_in_use(host)
        p2p.close_connections()
        host.close()
        del transfer
    return in_use


def test_closing_lets_go_of_what_a_failed_transfer_was_using() -> None:
    _, stopped = run_distributed(_fails, 2, timeout=60)
    assert stopped > 0  # or there is nothing to let go of


def test_every_device_has_pinned_memory_and_streams_of_its_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device))
    host, gpus = (
        HostTransport(Mock(), LaneOptions(pinned_bytes=1000, chunk_bytes=10)),
        [torch.device("cuda", index) for index in (1, 0)],
    )
    first, other = map(host._staging, gpus)
    assert first is not other and first is host._staging(gpus[0])
    assert made == [gpus[0]] * 2 + [gpus[1]] * 2, "a stream for each direction"
    assert first._outgoing.bound == first._incoming.bound == 500
    assert isinstance(host._staging(torch.device("cpu")), HostStaging)
