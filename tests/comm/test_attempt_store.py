"""Attempts that share the store of torchrun do not read the entries of an earlier attempt."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_freescale.comm.attempt_store import attempt_store
from lightning_freescale.testing import RankFailed, run_distributed


def _meet(port: int, attempt: int, late: int | None) -> tuple[str, float]:
    """Return the value that rank 0 has written in this attempt, and the sum over all ranks."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == late:
        time.sleep(1.2)
    store = attempt_store("127.0.0.1", port, rank, ranks, timedelta(seconds=60))
    if rank == 0:
        store.set("attempt", str(attempt))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    total = torch.ones(1)
    dist.all_reduce(total)
    return store.get("attempt").decode(), total.item()


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store in another process. A rank forked from the store's process could wait for a lock of the resolver."""
    here, there = mp.get_context("fork").Pipe()
    process = mp.get_context("fork").Process(target=_lend_store, args=(there,))
    process.start()
    yield here.recv()
    process.kill()
    process.join()


def _lend_store(end: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    end.send(store.port)
    time.sleep(600)


def test_an_attempt_has_a_store_of_its_own(port: int) -> None:
    """Check also that a late rank works if the others have already read the entries of the previous attempt."""
    for attempt, late in enumerate((None, 0, 2)):
        assert run_distributed(_meet, 3, port, attempt, late, init=False) == [(str(attempt), 3.0)] * 3


def _waits_for_the_other(port: int) -> None:
    rank = int(os.environ["RANK"])
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(60)
    attempt_store("127.0.0.1", port, rank, 3, timedelta(seconds=2))


@pytest.mark.usefixtures("patient")
def test_a_rank_that_does_not_come_is_named(port: int) -> None:
    with pytest.raises(RankFailed, match=r"rank 0: (?s:.*)RuntimeError: rank 2 .* 2 s"):
        run_distributed(_waits_for_the_other, 3, port, timeout=15)
