"""The host transport delivers every byte through limited pinned memory, without deadlocks.

Threads that copy late stand in for the streams of a GPU. Code that does not wait for an event finds wrong bytes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_freescale.comm import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.transports.host import PINNED_BYTES, DeviceStaging, HostTransport, PinnedPool
from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.transports.transport import DTYPES, RankBuffers, Transfer
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import nothing_left, pinned_in_use
from tests.helpers.fake_gpu import FakeStream

Sizes = list[list[int]]
"""The bytes by source and target."""
UNTOUCHED = 255
DEVICE = torch.device("cuda", 0)
"""A device by name only, so that the transport also moves small parts, which would travel in the headers."""


def make_p2p() -> GlooP2P:
    size = dist.get_world_size()
    return GlooP2P(
        dist.PrefixStore("test", _get_default_store()), dist.get_rank(), size, timedelta(seconds=20), list(range(size))
    )


def content(source: int, target: int, length: int, number: int) -> Tensor:
    """Return bytes that identify their source, their target and their position."""
    return ((torch.arange(length) * 31 + 97 * source + 59 * target + 13 * number) % 251).to(torch.uint8)


def make_transfer(sizes: Sizes, rank: int, number: int) -> Transfer:
    everyone, dtype = range(len(sizes)), DTYPES.index(torch.uint8)
    outgoing = [content(rank, peer, sizes[rank][peer], number) for peer in everyone]
    incoming = [torch.full((sizes[peer][rank],), UNTOUCHED, dtype=torch.uint8) for peer in everyone]
    ways = (RankBuffers(buffers, dtype, DEVICE) for buffers in (outgoing, incoming))
    transfer = Transfer.from_buffers("test", *ways, rank, timeout=timedelta(seconds=20), sequence_number=number)
    transfer.largest = max(map(max, sizes))
    return transfer


def make_host(p2p: GlooP2P, chunk: int, staging: Any = None, pinned_bytes: int = PINNED_BYTES) -> HostTransport:
    host = HostTransport(p2p, ProcessGroupFreeScaleOptions(chunk_bytes=chunk), pinned_bytes)
    host._stagings[DEVICE] = staging
    return host


def all_arrived(transfer: Transfer, sizes: Sizes, rank: int, ranks: Collection[int]) -> bool:
    """Return True if all parts of these ranks are correct and no other memory has changed."""
    for peer, part in enumerate(transfer.incoming):
        expected = content(peer, rank, sizes[peer][rank], transfer.sequence_number)
        if not torch.equal(part, expected if peer in ranks else torch.full_like(expected, UNTOUCHED)):
            return False
    return True


def draw_sizes(draw: random.Random, size: int, chunk: int) -> Sizes:
    """Draw parts around multiples of a chunk, which are often empty and sometimes much longer than all others."""

    def one() -> int:
        kind = draw.random()
        if kind < 0.3:
            return 0
        if kind < 0.4:
            return chunk * draw.randint(15, 30) + draw.randint(0, chunk)
        return max(0, chunk * draw.randint(0, 5) + draw.randint(-2, 2))

    return [[one() for _ in range(size)] for _ in range(size)]


def _random(seed: int, cases: int) -> list[tuple[int, int, Sizes]]:
    draw, p2p, rank, wrong = random.Random(seed), make_p2p(), dist.get_rank(), []
    for number in range(cases):
        chunk = draw.choice([1, 2, 3, 7, 64, 100, 1000, 4096, draw.randint(1, 4096)])
        sizes = draw_sizes(draw, p2p.size, chunk)
        transfer, pauses = make_transfer(sizes, rank, number), Mock()
        make_host(p2p, chunk).move(transfer, pauses)
        longest = max((max(sizes[rank][k], sizes[k][rank]) for k in p2p.peers), default=0)
        if not all_arrived(transfer, sizes, rank, range(p2p.size)) or pauses.call_count < -(-longest // chunk):
            wrong.append((number, chunk, sizes))
    return wrong


@pytest.mark.parametrize(
    ("size", "cases"), [(1, 20), (2, 250), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 200), (4, 150)])]
)
def test_random_parts_in_random_chunks_arrive(size: int, cases: int) -> None:
    assert run_distributed(_random, size, 7 * size, cases, timeout=100) == [[]] * size


UNEQUAL: dict[str, Sizes] = {
    "one gives much to all and gets from one": [[0, 900, 900, 900], [0, 0, 5, 0], [0, 0, 0, 5], [900, 0, 0, 0]],
    "a ring of long parts with short ones back": [[0, 900, 0, 1], [1, 0, 900, 0], [0, 1, 0, 900], [900, 0, 1, 0]],
    "all for one": [[3, 0, 0, 0], [900, 3, 0, 0], [901, 0, 3, 0], [1, 0, 0, 3]],
    "one for all": [[900, 901, 899, 1], [0] * 4, [0] * 4, [0] * 4],
    "stairs": [[10, 20, 40, 80], [160, 320, 640, 1280], [1280, 640, 320, 160], [80, 40, 20, 10]],
}


def _unequal() -> list[str]:
    """Return the failed cases. The last one moves first the parts of the other pair, then those of the own pair."""
    p2p, rank, wrong = make_p2p(), dist.get_rank(), []
    for case, sizes in UNEQUAL.items():
        transfer = make_transfer(sizes, rank, 0)
        make_host(p2p, 3).move(transfer, lambda: None)
        wrong += [] if all_arrived(transfer, sizes, rank, range(4)) else [case]
    host, draw, pair = make_host(p2p, 10), random.Random(5), {0, 1} if rank < 2 else {2, 3}
    for number in range(0, 60, 2):
        sizes = draw_sizes(draw, 4, 10)
        transfer, others = make_transfer(sizes, rank, number), {0, 1, 2, 3} - pair
        for ranks, arrived in ((others, others), (pair, range(4))):  # other parts do not change
            host.move(transfer, lambda: None, ranks=ranks)
            wrong += [] if all_arrived(transfer, sizes, rank, arrived) else [f"some ranks, {number}"]
    return wrong


def test_very_unequal_parts_do_not_hang_also_between_some_ranks_only() -> None:
    assert run_distributed(_unequal, 4, timeout=60) == [[]] * 4


_CURRENT = threading.local()


class Api:
    """A stand-in for ``torch.cuda`` whose streams copy late."""

    def __init__(self, delay: float = 0.0005) -> None:
        self._delay, self.streams = delay, list[FakeStream]()

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802 (torch's name)
        self.streams.append(FakeStream(self._delay))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        _CURRENT.stream = stream
        yield
        _CURRENT.stream = None


class Pinned(torch.Tensor):
    """Memory that queues non-blocking copies on the current stream."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = (each.as_subclass(torch.Tensor) for each in args)
            _CURRENT.stream.copy(target, source)  # there must be one
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def _pinned(length: int) -> Tensor:
    return torch.full((length,), 238, dtype=torch.uint8).as_subclass(Pinned)


def _staging(api: Api, chunk: int, pinned_bytes: int) -> DeviceStaging:
    return DeviceStaging(DEVICE, chunk, pinned_bytes, api=api, allocate=_pinned)


def _staged(chunk: int, pinned_bytes: int, cases: int) -> tuple[int, int, int]:
    """Return the wrong transfers, the most pinned bytes, and the pinned buffers still in use."""
    p2p, api, wrong, most = make_p2p(), Api(), 0, 0
    draw, caller = random.Random(chunk), FakeStream(delay=0.002 + 0.01 * (p2p.rank == 1))  # chunks come before rank 1 is ready
    staging = _staging(api, chunk, pinned_bytes)
    host = make_host(p2p, chunk, staging, pinned_bytes)
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
            most = max(most, *(chunk * pool.made for pool in (staging._outgoing, staging._incoming)))

        host.move(transfer, look)
        look()
        wrong += not all_arrived(transfer, sizes, p2p.rank, range(p2p.size))
    return wrong, most, pinned_in_use(host)


@pytest.mark.parametrize(
    ("size", "chunk", "pinned_bytes"),
    [(2, 64, 64 * 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 100, 100 * 40), (3, 16, 1 << 20)])],
)
def test_all_bytes_arrive_within_the_bound_and_all_memory_is_given_back(size: int, chunk: int, pinned_bytes: int) -> None:
    for wrong, most, in_use in run_distributed(_staged, size, chunk, pinned_bytes, 20, timeout=100):
        assert wrong == 0
        assert 0 < most <= pinned_bytes // 2
        assert in_use == 0


def _fails() -> int:
    """Return the memory in use after the peer has left in the middle of a transfer."""
    p2p, api, rank = make_p2p(), Api(), dist.get_rank()
    host = make_host(p2p, 100, _staging(api, 100, 1 << 16))
    with nothing_left(host):
        sizes = [[0, 40_000], [40_000, 0]]
        transfer, chunks = make_transfer(sizes, rank, 0), iter(range(5))
        transfer.issued = FakeStream().record_event()

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
    assert stopped > 0  # otherwise there is nothing to release


def test_every_device_has_pinned_memory_and_streams_of_its_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device))
    host = HostTransport(Mock(), ProcessGroupFreeScaleOptions(chunk_bytes=10), pinned_bytes=1000)
    gpus = [torch.device("cuda", index) for index in (1, 0)]
    first, other = map(host.staging, gpus)
    assert first is not other and first is host.staging(gpus[0])
    assert made == [gpus[0]] * 2 + [gpus[1]] * 2, "a stream for each direction"
    assert first._outgoing._most == first._incoming._most == 50
    assert host.staging(torch.device("cpu")) is None


def test_a_pool_keeps_what_is_released_and_makes_no_more_than_its_bound() -> None:
    pool = PinnedPool(64, 3, lambda length: torch.empty(length, dtype=torch.uint8))
    taken = [pool.acquire() for _ in range(4)]
    assert [None if each is None else len(each) for each in taken] == [64, 64, 64, None]
    pool.free.append(taken[1])
    assert pool.acquire() is taken[1] and pool.acquire() is None
