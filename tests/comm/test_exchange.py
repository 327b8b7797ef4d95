"""Exchanges without a handshake, and exchanges of bytes, deliver the sent data beside all other collectives of the lane."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.collectives import eager_exchange
from lightning_freescale.comm.collectives.eager_exchange import exchange_bytes, exchange_with_sizes
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import TIMEOUT, everyone_sends, make_group, nothing_left

UNTOUCHED, SHORT_BYTES = 77, 64 * 1024
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool)
Matrix = list[list[int]]
"""The numbers of elements by sender and receiver."""


def _draw(size: int, short: int, draw: torch.Generator) -> tuple[Matrix, Matrix]:
    """Draw parts and slots of all ranks: empty, small, about one message, large. Some slots are longer than the parts."""

    def pick(*of: int) -> int:
        return of[int(torch.randint(len(of), (), generator=draw))]

    parts, slots = ([[0] * size for _ in range(size)] for _ in range(2))
    for one in range(size):
        parts[one][one], slots[one][one] = pick(0, 3, short), 2 * short  # to itself
        for other in range(one):
            if pick(0, 1, 1, 1) == 0:
                continue
            for source, target in ((one, other), (other, one)):
                parts[source][target] = pick(0, 1, 5, 300, short - 1, short, short + 1, 3 * short + 7)
                slots[source][target] = parts[source][target] + pick(0, 0, 1, 90, 2 * short)
            for source, target in ((one, other), (other, one)):  # a rank without a part has a slot
                if not parts[source][target] and not slots[target][source]:
                    slots[target][source] = 1
    return parts, slots


def _content(length: int, *key: int, dtype: torch.dtype) -> torch.Tensor:
    number = sum(value * 31**place for place, value in enumerate(key))
    return ((torch.arange(length) * 7 + number) % 101).to(dtype)


def _one(group: Any, number: int, draw: torch.Generator, with_sizes: bool = False) -> bool:
    """Return True if an exchange of random sizes filled all slots correctly and changed no other memory."""
    rank, size = group.rank(), group.size()
    dtype = DTYPES[number % len(DTYPES)]
    parts, slots = _draw(size, SHORT_BYTES // dtype.itemsize, draw)
    gives, gets = parts[rank], [slots[source][rank] for source in range(size)]
    send = torch.cat([_content(length, rank, target, number, dtype=dtype) for target, length in enumerate(gives)])
    with torch.inference_mode(number % 2 == 0):
        received = torch.full((sum(gets),), UNTOUCHED).to(dtype)
    if with_sizes:
        exchange_with_sizes(group, received, send, gets, gives)
    else:
        group.exchange(received, send, gets, gives)
    for source, slot in enumerate(received.split(gets)):
        came = _content(parts[source][rank], source, rank, number, dtype=dtype)
        untouched = torch.full((gets[source] - len(came),), UNTOUCHED).to(dtype)
        if not torch.equal(slot, torch.cat([came, untouched])):
            return False
    return True


def _random(options: dict[str, Any], count: int) -> list[bool]:
    """Exchange with other collectives of the group in between. Some of them are still in flight."""
    eager_exchange._SHORT_BYTES = SHORT_BYTES  # smaller than the real limit
    with nothing_left():
        group, draw = make_group(**options), torch.Generator().manual_seed(5)
        sound, flying = [], []
        for number in range(count):
            if number == 10 + group.rank():  # the others wait for a late rank
                time.sleep(0.2)
            if number % 3 == 1:
                given = torch.full((20_000 * group.size(),), float(group.rank() + number))
                out = torch.empty_like(given)
                expected = (torch.arange(group.size()) + float(number)).repeat_interleave(20_000)
                flying.append((dist.all_to_all_single(out, given, group=group, async_op=True), out, expected))
            sound.append(_one(group, number, draw))
            if number % 4 == 2:
                sound.append(everyone_sends(group, rows=5 + number))
        for work, out, expected in flying:
            work.wait()
            sound.append(torch.equal(out, expected))
        sound += [_one(group, number, draw, with_sizes=True) for number in range(1, 20, 2)]
        dist.destroy_process_group(group)
        del group, flying, work
    return sound


@pytest.mark.parametrize(
    ("size", "options"),
    [
        *((3, {"chunk_bytes": 4096}), (2, {"transport": "native"})),
        *(pytest.param(size, options, marks=pytest.mark.slow) for size, options in ((2, {}), (3, {"transport": "native"}))),
    ],
)
def test_every_part_comes_to_its_slot(size: int, options: dict[str, Any]) -> None:
    for sound in run_distributed(_random, size, options, 40, timeout=100):
        assert all(sound)


def _in_two_threads() -> list[bool]:
    lanes = [make_group(name=name, priority=priority, chunk_bytes=8192) for priority, name in enumerate(("low", "high"))]

    def use(lane: Any) -> list[bool]:
        draw = torch.Generator().manual_seed(lane.options.priority)
        return [_one(lane, number, draw) for number in range(15)]

    with ThreadPoolExecutor(2) as threads:
        return [sound for each in threads.map(use, lanes) for sound in each]


def test_two_lanes_exchange_at_once_from_two_threads() -> None:
    assert run_distributed(_in_two_threads, 2, timeout=60) == [[True] * 30] * 2


def _too_long() -> str:
    with pytest.raises(dist.DistBackendError) as told:
        exchange_with_sizes(make_group(), torch.empty(2), torch.ones(6), [1, 1], [3, 3])
    return str(told.value)


def test_more_than_a_slot_holds_is_refused_and_a_rank_alone_has_nothing_to_exchange() -> None:
    assert run_distributed(lambda: make_group().exchange(torch.empty(0), torch.empty(0), [0], [0]), 1) == [None]
    for told in run_distributed(_too_long, 2):
        assert "rank 0 " in told and "3" in told and "1" in told


def _own_timeout() -> float:
    group, start = make_group(timeout=TIMEOUT), time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match=r"rank 1 .*0\.5 s"):
            group.exchange(torch.empty(1), torch.ones(1), [0, 1], [0, 1], timeout=timedelta(seconds=0.5))
    dist.barrier()
    return time.monotonic() - start


def test_an_exchange_may_have_a_timeout_of_its_own() -> None:
    assert all(0.3 < seconds < TIMEOUT / 2 for seconds in run_distributed(_own_timeout, 2))


def _after_a_peer_has_closed() -> tuple[list[float], str]:
    """Return the data from a rank that closes its connections after the exchange, and the error of the next exchange."""
    group = make_group()
    rank, received = group.rank(), torch.empty(2)
    if rank:  # rank 1 reads the message after rank 0 has left
        unpack = eager_exchange._Link.unpack
        eager_exchange._Link.unpack = lambda *arguments: (time.sleep(0.5), unpack(*arguments))
    group.exchange(received, torch.full((2,), 1.0 + rank), [1, 1], [1, 1])
    if rank == 0:
        group.abort()
        return received.tolist(), ""
    with pytest.raises(dist.DistBackendError) as caught:
        group.exchange(received, received, [1, 1], [1, 1])
    return received.tolist(), str(caught.value)


def test_an_exchange_is_whole_if_a_peer_closes_after_it() -> None:
    (first, _), (second, error) = run_distributed(_after_a_peer_has_closed, 2)
    assert first == second == [1.0, 2.0]
    assert "rank 0" in error


def _part(source: int, target: int) -> bytes:
    return b"" if (source + target) % 3 == 0 else bytes([source, target]) * (1 + 1000 * source)


def _exchanged() -> list[list[bytes]]:
    world, pair, rank = dist.group.WORLD, dist.new_group([1, 2]), dist.get_rank()
    arrived = [exchange_bytes([_part(rank, target) for target in range(3)], world) for _ in range(2)]
    if rank:
        arrived.append(exchange_bytes([b"to first", b"to second"], pair))
    time.sleep(0.2 * rank)  # the others wait for a late rank
    large = exchange_bytes([bytes([10 * rank + target]) * (1_000_000 + target) for target in range(3)], world)
    assert all(torch.equal(part, torch.full((1_000_000 + rank,), 10 * k + rank)) for k, part in enumerate(large))
    return [[bytes(part.numpy()) for part in parts] for parts in arrived]


def test_every_part_arrives_at_its_rank_of_the_group() -> None:
    for rank, arrived in enumerate(run_distributed(_exchanged, 3)):
        assert arrived[:2] == [[_part(source, rank) for source in range(3)]] * 2
        assert arrived[2:] == ([] if rank == 0 else [[[b"to first"], [b"to second"]][rank - 1] * 2])
