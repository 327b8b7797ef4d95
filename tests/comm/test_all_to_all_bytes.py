"""Bytes arrive at the rank they are for, whatever their number, or there is an error."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.all_to_all_bytes import exchange_bytes
from lightning_freescale.testing import RankFailed, run_distributed


def _part(source: int, target: int) -> bytes:
    return b"" if (source + target) % 3 == 0 else bytes([source, target]) * (1 + 1000 * source)


def _pairs() -> list[bytes]:
    group, rank = dist.group.WORLD, dist.get_rank()
    for _ in range(3):
        arrived = exchange_bytes([_part(rank, target) for target in range(3)], group)
    return [bytes(part.numpy()) for part in arrived]


def test_every_part_arrives() -> None:
    assert run_distributed(_pairs, 3) == [[_part(source, rank) for source in range(3)] for rank in range(3)]


def _big() -> bool:
    rank = dist.get_rank()
    time.sleep(0.2 * rank)
    outgoing = [torch.full((3_000_000 + target,), 10 * rank + target, dtype=torch.uint8) for target in range(3)]
    arrived = exchange_bytes(outgoing, dist.group.WORLD)
    own = arrived[rank].data_ptr() == outgoing[rank].data_ptr()
    return own and all(torch.equal(part, torch.full((3_000_000 + rank,), 10 * k + rank)) for k, part in enumerate(arrived))


def test_big_tensors_also_when_a_rank_is_late() -> None:
    assert run_distributed(_big, 3) == [True] * 3


def _subgroup() -> list[bytes] | None:
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank == 0:
        return None
    return [bytes(part.numpy()) for part in exchange_bytes([b"to first", memoryview(b"to second")], group)]


def test_ranks_are_those_of_the_group() -> None:
    assert run_distributed(_subgroup, 3) == [None, [b"to first"] * 2, [b"to second"] * 2]


def _killed() -> str:
    group = dist.new_group(timeout=timedelta(seconds=20))
    exchange_bytes([b"all are here"] * 3, group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        exchange_bytes([b"x" * 1000] * 3, group)
    print("the others got an error", flush=True)
    return "error"


@pytest.mark.usefixtures("patient")
def test_a_killed_rank_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match="rank 1: died"):
        run_distributed(_killed, 3, timeout=60)
    assert capfd.readouterr().out.count("the others got an error") == 2


def test_bad_input() -> None:
    def attempt() -> None:
        group = dist.group.WORLD
        with pytest.raises(ValueError, match="has 2 parts for 1 ranks"):
            exchange_bytes([b"", b""], group)
        with pytest.raises(ValueError, match=r"float32 tensor of shape \(2,\)"):
            exchange_bytes([torch.zeros(2)], group)

    run_distributed(attempt, 1)
