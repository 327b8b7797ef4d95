"""The host's transport brings every byte to its place, however uneven the parts, and no rank waits for another in a circle."""

from __future__ import annotations

import random
from collections.abc import Collection
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_freescale.comm import LaneOptions
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.transfer import DTYPES, RankBuffers, Transfer
from lightning_freescale.comm.transports.host.staging import HostStaging
from lightning_freescale.comm.transports.host.transport import HostTransport
from lightning_freescale.testing import run_distributed

Sizes = list[list[int]]
"""Bytes by source and target."""
UNTOUCHED = 255
DEVICE = torch.device("cuda", 0)
"""Only by name: so that small parts go by the transport as well, not in the headers."""


def make_p2p() -> GlooP2P:
    """Collective over all ranks."""
    size = dist.get_world_size()
    return GlooP2P(
        dist.PrefixStore("test", _get_default_store()), dist.get_rank(), size, timedelta(seconds=20), list(range(size))
    )


def content(source: int, target: int, length: int, number: int) -> Tensor:
    """Bytes that tell where they are from and where to, and each from the next ones."""
    return ((torch.arange(length) * 31 + 97 * source + 59 * target + 13 * number) % 251).to(torch.uint8)


def make_transfer(sizes: Sizes, rank: int, number: int) -> Transfer:
    """The part of one rank."""
    everyone, dtype = range(len(sizes)), DTYPES.index(torch.uint8)
    outgoing = [content(rank, peer, sizes[rank][peer], number) for peer in everyone]
    incoming = [torch.full((sizes[peer][rank],), UNTOUCHED, dtype=torch.uint8) for peer in everyone]
    ways = (RankBuffers(buffers, dtype, DEVICE) for buffers in (outgoing, incoming))
    transfer = Transfer.from_buffers("test", *ways, rank, timeout=timedelta(seconds=20), sequence_number=number)
    transfer.largest = max(map(max, sizes))
    return transfer


def make_host(p2p: GlooP2P, chunk: int, staging: Any = None, **options: Any) -> HostTransport:
    """With a stand-in for the device's staging."""
    host = HostTransport(p2p, LaneOptions(chunk_bytes=chunk, **options))
    host._stagings[DEVICE] = staging or HostStaging()
    return host


def all_arrived(transfer: Transfer, sizes: Sizes, rank: int, ranks: Collection[int]) -> bool:
    """All parts of these ranks are there, byte by byte, and no other memory has been written to."""
    for peer, part in enumerate(transfer.incoming):
        expected = content(peer, rank, sizes[peer][rank], transfer.sequence_number)
        if not torch.equal(part, expected if peer in ranks else torch.full_like(expected, UNTOUCHED)):
            return False
    return True


def draw_sizes(draw: random.Random, size: int, chunk: int) -> Sizes:
    """Parts around multiples of a chunk, often empty, sometimes much longer than all others."""

    def one() -> int:
        kind = draw.random()
        if kind < 0.3:
            return 0
        if kind < 0.4:
            return chunk * draw.randint(15, 30) + draw.randint(0, chunk)
        return max(0, chunk * draw.randint(0, 5) + draw.randint(-2, 2))

    return [[one() for _ in range(size)] for _ in range(size)]


def _random(seed: int, cases: int) -> list[tuple[int, int, Sizes]]:
    """Cases that went wrong."""
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


def _case(sizes: Sizes, chunk: int, rounds: int) -> bool:
    p2p, rank = make_p2p(), dist.get_rank()
    host = make_host(p2p, chunk)
    right = True
    for number in range(rounds):
        transfer = make_transfer(sizes, rank, number)
        host.move(transfer, lambda: None)
        right = right and all_arrived(transfer, sizes, rank, range(p2p.size))
    return right


UNEQUAL: dict[str, Sizes] = {
    "one gives much to all and gets from one": [[0, 900, 900, 900], [0, 0, 5, 0], [0, 0, 0, 5], [900, 0, 0, 0]],
    "a ring of long parts with short ones back": [[0, 900, 0, 1], [1, 0, 900, 0], [0, 1, 0, 900], [900, 0, 1, 0]],
    "each has one long part for another": [[9, 5, 0, 900], [900, 9, 5, 0], [0, 900, 9, 5], [5, 0, 900, 9]],
    "all for one": [[3, 0, 0, 0], [900, 3, 0, 0], [901, 0, 3, 0], [1, 0, 0, 3]],
    "one for all": [[900, 901, 899, 1], [0] * 4, [0] * 4, [0] * 4],
    "stairs": [[10, 20, 40, 80], [160, 320, 640, 1280], [1280, 640, 320, 160], [80, 40, 20, 10]],
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_very_unequal_parts_do_not_hang(case: str) -> None:
    assert run_distributed(_case, 4, UNEQUAL[case], 3, 3, timeout=60) == [True] * 4


def _subsets() -> bool:
    """First who is in the other pair, then the own pair; what is not asked for is not touched."""
    p2p, rank, right = make_p2p(), dist.get_rank(), True
    host = make_host(p2p, 10)
    draw = random.Random(5)
    for number in range(0, 60, 2):
        sizes = draw_sizes(draw, 4, 10)
        transfer, pair = make_transfer(sizes, rank, number), {0, 1} if rank < 2 else {2, 3}
        others = {0, 1, 2, 3} - pair
        host.move(transfer, lambda: None, ranks=others)
        right = right and all_arrived(transfer, sizes, rank, others)
        host.move(transfer, lambda: None, ranks=pair)
        right = right and all_arrived(transfer, sizes, rank, range(4))
    return right


def test_some_ranks_only() -> None:
    assert run_distributed(_subsets, 4, timeout=60) == [True] * 4


def _in_place() -> Any:
    """A part given and taken in the same memory, as in an all-gather into its own output."""
    p2p, rank = make_p2p(), dist.get_rank()
    sizes = [[40, 40], [40, 40]]
    transfer = make_transfer(sizes, rank, 0)
    transfer.outgoing = [content(rank, rank, 40, 0)] * 2
    transfer.incoming[rank] = transfer.outgoing[rank]
    make_host(p2p, 16).move(transfer, lambda: None)
    return [torch.equal(part, content(peer, peer, 40, 0)) for peer, part in enumerate(transfer.incoming)]


def test_an_own_part_may_be_where_it_is_to_go() -> None:
    assert run_distributed(_in_place, 2) == [[True, True]] * 2
