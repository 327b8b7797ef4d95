"""Copy engines inside a host and the network between hosts, with fake GPUs and real messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_freescale.comm import LaneOptions
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.host.transport import HostTransport
from lightning_freescale.comm.transports.two_level import TwoLevelTransport
from lightning_freescale.testing import run_distributed
from tests.helpers.fake_gpu import end_streams, on_ranks
from tests.helpers.host_peers import lengths, transfer, transports, wrong


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    end_streams()


def _ranks(hosts: list[list[int]], chunk: int) -> list[TwoLevelTransport]:
    size, store = sum(map(len, hosts)), dist.HashStore()
    limit = timedelta(seconds=20)
    near = {rank: peer for host in hosts for rank, peer in zip(host, transports(host, chunk))}
    options = LaneOptions(chunk_bytes=chunk)

    def one(rank: int) -> TwoLevelTransport:
        p2p = GlooP2P(store, rank, size, limit, [100 + each for each in range(size)])
        return TwoLevelTransport(near[rank], HostTransport(p2p, options), size)

    made = on_ranks(size, one)
    assert all(isinstance(each, TwoLevelTransport) for each in made), made
    return made


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]]])
def test_all_bytes_arrive(hosts: list[list[int]]) -> None:
    tables = [lengths(4, 150, seed) for seed in range(4)]

    def every_rank() -> list[list[list[int]]]:
        ranks = _ranks(hosts, 16)

        def run(rank: int) -> list[list[int]]:
            found = []
            for seed, table in enumerate(tables):
                mine = transfer(rank, table, seed, late=False)
                ranks[rank].move(mine, lambda: None)
                found.append(wrong(rank, mine, table, seed))
            return found

        return on_ranks(4, run)

    assert run_distributed(every_rank, 1, init=False) == [[[[]] * len(tables)] * 4]  # threads of gloo stay in that process


class _Far:
    """A host transport that is at work until the near part is done, as far as it can be before :meth:`finish`."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.done = False

    def move(self, transfer: Transfer, pause: Callable[[], None], ranks: list[int]) -> None:
        self.ranks = ranks
        end = time.monotonic() + 20
        while not (self.done or self.failed) and time.monotonic() < end:
            pause()
            time.sleep(1e-3)
            self.done = not wrong(0, transfer, [[40, 0], [0, 0]], 1)
        if self.failed:
            raise dist.DistBackendError("rank 101 is gone")

    failed = False


def test_both_parts_are_at_work_at_the_same_time() -> None:
    (near,), far, pauses = transports([0], 2), _Far(), []
    TwoLevelTransport(near, far, 2).move(transfer(0, [[40, 0], [0, 0]], 1), lambda: pauses.append(far.done))
    assert far.done and far.ranks == [1]
    assert False in pauses


def test_a_failure_of_the_far_part_releases_the_gpu() -> None:
    pair = transports([0, 1], 4)
    far = _Far()
    far.failed = True
    with pytest.raises(dist.DistBackendError, match="rank 101 is gone"):
        TwoLevelTransport(pair[0], far, 3).move(transfer(0, [[9] * 3] * 3, 1), lambda: None)
    assert all(stream.idle() for stream in pair[0]._driver.streams)
    assert int(pair[1]._link.buffer.failed(1)) == 1


def test_it_closes_what_is_near() -> None:
    (near,) = transports([0], 4)
    two = TwoLevelTransport(near, _Far(), 2)
    two.close()
    assert near._driver.closed
    assert two.far == [1]
