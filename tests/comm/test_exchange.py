"""Exchanges whose ranks have agreed by themselves bring what was sent, whatever else the lane does."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import LaneOptions, eager_exchange
from lightning_freescale.comm.priority import PRIORITY_GATE
from lightning_freescale.comm.sized_exchange import exchange_with_sizes
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import TIMEOUT, everyone_sends, make_group, nothing_left

UNTOUCHED, SHORT_BYTES = 77, 64 * 1024
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool)
Matrix = list[list[int]]
"""Elements by sender and receiver."""


def _draw(size: int, short: int, draw: torch.Generator) -> tuple[Matrix, Matrix]:
    """Parts and slots of all ranks: nothing, little, about what fits into one message, a lot; slots as long or longer."""

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
            for source, target in ((one, other), (other, one)):  # who has nothing to give has a slot
                if not parts[source][target] and not slots[target][source]:
                    slots[target][source] = 1
    return parts, slots


def _content(length: int, *key: int, dtype: torch.dtype) -> torch.Tensor:
    number = sum(value * 31**place for place, value in enumerate(key))
    return ((torch.arange(length) * 7 + number) % 101).to(dtype)


def _one(group: Any, number: int, draw: torch.Generator, with_sizes: bool = False) -> bool:
    """Whether an exchange of random sizes filled all slots as it should, and no more of them."""
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
    """With the group's other collectives between them, of which some are still in flight."""
    eager_exchange._SHORT_BYTES = SHORT_BYTES  # less to move than with the real one
    with nothing_left():
        group, draw = make_group(**options), torch.Generator().manual_seed(5)
        sound, flying = [], []
        for number in range(count):
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
        dist.destroy_process_group(group)
        del group, flying, work
    return sound


@pytest.mark.parametrize("options", [{"chunk_bytes": 4096}, {}, {"transport": "native"}], ids=["chunks", "whole", "native"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_part_comes_to_its_slot(size: int, options: dict[str, Any]) -> None:
    for sound in run_distributed(_random, size, options, 40, timeout=100):
        assert all(sound)


def _with_sizes() -> list[bool]:
    group, draw = make_group(), torch.Generator().manual_seed(6)
    return [_one(group, number, draw, with_sizes=True) for number in range(1, 20, 2)]


def test_sizes_that_travel_first_bring_the_same() -> None:
    for sound in run_distributed(_with_sizes, 3, timeout=100):
        assert all(sound)


def _too_long() -> str:
    group = make_group()
    try:
        exchange_with_sizes(group, torch.empty(2), torch.ones(6), [1, 1], [3, 3])
    except dist.DistBackendError as error:
        return str(error)
    return "nothing"


def test_more_than_a_slot_holds_is_refused_where_sizes_travel_first() -> None:
    for told in run_distributed(_too_long, 2):
        assert "rank 0 sends 3 elements, and its slot here holds 1" in told


def _alone() -> bool:
    make_group().exchange(torch.empty(0), torch.empty(0), [0], [0])
    return True


def test_a_rank_alone_has_nothing_to_exchange() -> None:
    assert run_distributed(_alone, 1) == [True]


def _late(length: int) -> bool:
    group, n, rank = make_group(), dist.get_world_size(), dist.get_rank()
    sizes = [0 if peer == rank else length for peer in range(n)]
    for late in range(n):
        if rank == late:
            time.sleep(0.2)
        received = torch.empty(sum(sizes))
        group.exchange(received, torch.full_like(received, rank), sizes, sizes)
        expected = torch.tensor([float(peer) for peer in range(n) if peer != rank])
        if not torch.equal(received, expected.repeat_interleave(length)):
            return False
    return True


@pytest.mark.parametrize("length", [16, 2_000_000])
def test_a_late_rank_is_waited_for(length: int) -> None:
    assert run_distributed(_late, 3, length, timeout=60) == [True] * 3


def _two_lanes() -> list[bool]:
    groups = [make_group(name=name, priority=priority, chunk_bytes=8192) for priority, name in enumerate(("low", "high"))]
    sound: list[bool] = []

    def use(group: Any, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        sound.extend([_one(group, number, draw) for number in range(15)])

    threads = [threading.Thread(target=use, args=(group, seed)) for seed, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sound


def test_two_lanes_exchange_at_once_from_two_threads() -> None:
    assert run_distributed(_two_lanes, 2, timeout=60) == [[True] * 30] * 2


def _paused(transport: str) -> tuple[bool, bool]:
    """Whether a long exchange of a low lane comes to its end beside a higher lane that is at work, and after it."""
    group, length = make_group(chunk_bytes=4096, max_pause_seconds=30.0, transport=transport), 5_000_000
    sizes = [0 if peer == dist.get_rank() else length for peer in range(2)]
    tensors = torch.empty(length, dtype=torch.uint8), torch.ones(length, dtype=torch.uint8)
    thread = threading.Thread(target=group.exchange, args=(*tensors, sizes, sizes))
    with PRIORITY_GATE.track(LaneOptions(priority=1), 1) as activity:
        thread.start()
        end = time.monotonic() + (0.5 if transport == "auto" else TIMEOUT)
        while time.monotonic() < end and thread.is_alive():
            activity.last_progress = time.monotonic()
            time.sleep(0.01)
        beside = not thread.is_alive()
        dist.barrier()
    thread.join(TIMEOUT)
    return beside, bool(tensors[0].all())


@pytest.mark.parametrize(("transport", "beside"), [("auto", False), ("native", True)])
def test_a_long_exchange_pauses_for_a_higher_lane_unless_its_lane_is_native(transport: str, beside: bool) -> None:
    assert run_distributed(_paused, 2, transport, timeout=60) == [(beside, True)] * 2


def _own_timeout() -> float:
    group, start = make_group(timeout=TIMEOUT), time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match=r"rank 1 did not come within the timeout of 0\.5 s"):
            group.exchange(torch.empty(1), torch.ones(1), [0, 1], [0, 1], timeout=timedelta(seconds=0.5))
    dist.barrier()
    return time.monotonic() - start


def test_an_exchange_may_have_a_timeout_of_its_own() -> None:
    assert all(0.3 < seconds < TIMEOUT / 2 for seconds in run_distributed(_own_timeout, 2))
