"""Transfers between fake GPUs: what every rank sends and expects, and whether it came."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch

from lightning_freescale.comm.transports.transport import Transfer
from tests.helpers.fake_gpu import FakeDriver, FakeEvent, keep, on_ranks

UNTOUCHED = 255


class OnDevice(Transfer):
    def fits_in_header(self, part: torch.Tensor) -> bool:
        return False


def lengths(size: int, most: int, seed: int) -> list[list[int]]:
    """Bytes from every rank to every rank, of which some are 0."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randint(0, most + 1, (size, size), generator=draw)
    return (table * (torch.rand(size, size, generator=draw) < 0.8)).tolist()


def part(source: int, target: int, length: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1_000_000 * seed + 1000 * source + target)
    return torch.randint(0, 250, (length,), generator=draw, dtype=torch.uint8)


def transfer(rank: int, table: list[list[int]], seed: int, timeout: float = 30.0, late: bool = True) -> Transfer:
    """One rank's side; if ``late``, the caller's stream writes what it sends later, and its outputs are in use till then."""
    size = len(table)
    incoming = [torch.full((table[source][rank],), UNTOUCHED, dtype=torch.uint8) for source in range(size)]
    true = [part(rank, target, table[rank][target], seed) for target in range(size)]
    outgoing, issued = [torch.zeros_like(each) if late else each for each in true], FakeEvent() if late else None

    def issue() -> None:
        time.sleep(2e-3)
        for each, value in zip(outgoing, true):
            each.copy_(value)
        for each in incoming:
            each.fill_(UNTOUCHED)
        issued.set()

    if late:
        threading.Thread(target=issue, daemon=True).start()
    for each in (*outgoing, *incoming):
        keep(each)
    limit, largest = timedelta(seconds=timeout), max(map(max, table))
    return OnDevice("all_to_all", outgoing, incoming, 0, FakeDriver.device, limit, seed, largest, issued)


def wrong(rank: int, done: Transfer, table: list[list[int]], seed: int) -> list[int]:
    expected = [part(source, rank, table[source][rank], seed) for source in range(len(table))]
    return [source for source, each in enumerate(expected) if not torch.equal(done.incoming[source], each)]


def moved(ranks: list[Any], tables: list[list[list[int]]], **options: Any) -> list[Any]:
    """Move what the tables say between transports, one per rank, one table after the other.

    Return by rank and table the sources whose bytes are wrong, or the error of the rank.
    """

    def run(rank: int) -> list[list[int]]:
        found = []
        for seed, table in enumerate(tables):
            mine = transfer(rank, table, seed, **options)
            ranks[rank].move(mine, lambda: None)
            found.append(wrong(rank, mine, table, seed))
        return found

    return on_ranks(len(ranks), run)
