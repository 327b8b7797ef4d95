"""Transports between GPUs: copy engines and waits in memory, and two levels. Threads stand in for the devices."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.transports import peer
from lightning_freescale.comm.transports.host import HostTransport
from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.transports.peer import PeerTransport, TwoLevelTransport
from lightning_freescale.comm.transports.peer_link import SymmetricBuffer, allocate_symmetric_buffer
from lightning_freescale.testing import run_distributed
from tests.helpers.fake_gpu import FakeDriver, FakeEvent, FakeStream, keep, on_ranks, signed
from tests.helpers.gpu_transfers import UNTOUCHED, lengths, moved, transfer, wrong


def transports(ranks: list[int], chunk: int, start: int = 0, seed: int = 0, **driver: Any) -> list[PeerTransport]:
    """Return a transport per rank, with memory mapped on all ranks. The other arguments go to the drivers."""
    length = SymmetricBuffer.size_bytes(len(ranks), chunk)
    buffers = [keep(torch.full((length,), UNTOUCHED, dtype=torch.uint8)) for _ in ranks]
    mapped = [SymmetricBuffer(rank, buffers, chunk) for rank in range(len(ranks))]
    for rank, buffer in enumerate(mapped):
        buffer.signal_pad(rank).fill_(signed(start))
        buffer.failed(rank).zero_()
    global_ranks = [100 + rank for rank in range(max(ranks) + 1)]
    return [PeerTransport(FakeDriver(100 * seed + one.rank, **driver), one, ranks, global_ranks, start) for one in mapped]


def _receiving(transport: PeerTransport) -> FakeStream:
    return transport._driver.streams[1]


@pytest.mark.parametrize(
    ("size", "chunk", "start", "serial"),
    [
        *((2, 1, 0, True), (3, 7, 2**32 - 5, False), (4, 16, 2**31 - 3, False)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(2, 64, 2**32 - 5, False), (3, 7, 0, True), (4, 16, 0, True)]
        ),
    ],
)
def test_all_bytes_arrive_over_peers(size: int, chunk: int, start: int, serial: bool) -> None:
    ranks = transports(list(range(size)), chunk, start, seed=size, serial=serial)
    tables = [lengths(size, 9 * chunk, seed) for seed in range(4)]
    assert moved(ranks, tables) == [[[]] * len(tables)] * size


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_reader_is_not_overwritten_and_a_slow_writer_is_waited_for(slow: int) -> None:
    """Move a transfer in which one rank is slow. It uses every slot several times."""
    pair = transports([0, 1], 8)
    pair[slow]._driver._slow = 4e-3
    assert moved(pair, [[[0, 100], [0, 0]]]) == [[[]], [[]]]


def test_one_rank_copies_its_own_part_and_nothing_is_left_in_place() -> None:
    (alone,), table = transports([0], 4), [[30]]
    mine = transfer(0, table, 1)
    alone.move(mine, lambda: None)
    assert wrong(0, mine, table, 1) == []
    same = transfer(0, table, 2, late=False)
    same.incoming[0] = same.outgoing[0]
    alone.move(same, lambda: None)
    assert wrong(0, same, table, 2) == []


def test_some_of_the_ranks_of_a_group_leave_the_parts_of_the_others_alone() -> None:
    near, table = [1, 3], lengths(4, 40, 3)
    pair = transports(near, 5)

    def run(place: int) -> list[int]:
        mine = transfer(near[place], table, 8)
        pair[place].move(mine, lambda: None)
        assert all((mine.incoming[rank] == UNTOUCHED).all() for rank in (0, 2))
        return [rank for rank in wrong(near[place], mine, table, 8) if rank in near]

    assert on_ranks(2, run) == [[], []]


def test_it_pauses_between_rounds_and_keeps_few_on_the_streams() -> None:
    (alone,), table, seen = transports([0], 1), [[40]], []
    with alone.start_transfer(mine := transfer(0, table, 1)) as progress:
        alone.complete_transfer(progress, mine.timeout, lambda: seen.append(progress._started))
    assert len(seen) >= 5 and seen[0] <= 8


@pytest.mark.parametrize("start", [0, 2**32 - 2])
def test_a_peer_that_does_not_come_is_named_and_the_streams_drain(start: int) -> None:
    ranks, table = transports([0, 1, 2], 4, start), [[20] * 3] * 3

    def run(rank: int) -> None:
        ranks[rank].move(transfer(rank, table, 1, timeout=0.3), lambda: None)

    begun = time.monotonic()
    errors = on_ranks(2, run)
    assert time.monotonic() - begun < 15
    assert all(isinstance(error, dist.DistBackendError) for error in errors)
    assert "rank 102 did not respond within the timeout of 0.3 s" in str(errors[0])
    assert all(stream.idle() for rank in ranks for stream in rank._driver.streams)
    assert not any(rank._stuck for rank in ranks)
    with pytest.raises(dist.DistBackendError, match=r"closed: rank 10[12]"):
        ranks[0].move(transfer(0, table, 2), lambda: None)


@pytest.mark.parametrize(("bytes_", "look"), [(16, 60.0), (60, 0.1)])
def test_what_a_rank_copies_after_it_gave_up_is_not_taken_for_good(
    bytes_: int, look: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make rank 1 so late that rank 0 gives up and overwrites its slots, with all or only some of the expected bytes."""
    monkeypatch.setattr(peer, "_CHECK_AFTER", look)
    pair, table = transports([0, 1], 4), [[0, bytes_], [0, 0]]
    reader = _receiving(pair[1])
    reader.hold.set()
    threading.Timer(1.2, reader.hold.clear).start()

    def run(rank: int) -> None:
        pair[rank].move(transfer(rank, table, 1, timeout=(0.2, 20.0)[rank], late=False), lambda: None)

    writer, late = on_ranks(2, run)
    assert "rank 101 did not respond" in str(writer)
    assert "given up" in str(late)
    assert all(stream.idle() for rank in pair for stream in rank._driver.streams)


def test_the_last_count_of_a_peer_that_dies_cannot_stop_the_streams_from_draining() -> None:
    """Check a late count that is below the count that was written for it."""
    pair, table = transports([0, 1], 1), [[0, 0], [4, 0]]
    buffer = pair[0]._link.buffer
    pair[0]._driver._slow = 0.05

    def die() -> None:
        while not int(buffer.failed(1)):
            time.sleep(1e-3)
        while int(buffer.arrived(0, 1)) < 4:
            time.sleep(1e-5)
        buffer.arrived(0, 1).fill_(1)

    threading.Thread(target=die, daemon=True).start()
    with pytest.raises(dist.DistBackendError, match="rank 101 did not respond"):
        pair[0].move(transfer(0, table, 1, timeout=0.1, late=False), lambda: None)
    assert not pair[0]._stuck


def test_peers_are_told_before_their_slots_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rank 1 read after the last chunk, which overwrote another, has arrived, without any later signal."""
    pair, table = transports([0, 1], 4), [[0, 16], [0, 0]]
    link, reader = pair[1]._link, _receiving(pair[1])
    reader.hold.set()
    release, urgent = pair[0]._link.release_streams, pair[0]._driver.streams[2]

    def release_and_say_no_more() -> FakeEvent:
        monkeypatch.undo()
        event = release()
        urgent.put(urgent.hold.set)
        return event

    def run(rank: int) -> None:
        try:
            pair[rank].move(transfer(rank, table, 1, (0.1, 20.0)[rank], late=False), lambda: None)
        finally:
            if rank == 1:
                urgent.hold.clear()

    monkeypatch.setattr(pair[0]._link, "release_streams", release_and_say_no_more)

    def read() -> None:
        while int(link.buffer.arrived(1, 0)) < 4:
            time.sleep(1e-4)
        reader.hold.clear()

    threading.Thread(target=read, daemon=True).start()
    _, late = on_ranks(2, run)
    assert "given up" in str(late)


def test_closing_ends_what_is_in_flight() -> None:
    first, _ = transports([0, 1], 4)
    threading.Timer(0.2, first.close).start()
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="closed"):
        first.move(transfer(0, [[9, 9], [9, 9]], 1), lambda: None)
    assert time.monotonic() - begun < 15
    first.close()
    assert first._driver.closed
    with pytest.raises(dist.DistBackendError, match="closed"):
        first.move(transfer(0, [[9, 9], [9, 9]], 1), lambda: None)


def _fails_at(transport: PeerTransport, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def copy(*args: object) -> None:
        copies.append(args)
        if len(copies) == last:
            raise RuntimeError("cuMemcpyBatchAsync failed")
        FakeDriver.copy(transport._driver, *args)

    monkeypatch.setattr(transport._driver, "copy", copy)


@pytest.mark.parametrize("last", [5, 6, 7, 8])
def test_a_gpu_that_fails_in_the_middle_is_drained_and_the_peer_told(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at a chunk to the peer, at its count, at a chunk from the peer, or at its count."""
    pair, table = transports([0, 1], 4), [[0, 40], [40, 0]]
    _fails_at(pair[0], last, monkeypatch)
    first, second = on_ranks(2, lambda rank: pair[rank].move(transfer(rank, table, 1, timeout=5), lambda: None))
    assert str(first) == "cuMemcpyBatchAsync failed"
    assert "given up" in str(second)
    assert not any(rank._stuck for rank in pair)
    assert all(stream.pending == 0 for stream in pair[0]._driver.streams)  # nothing is touched after the error


def test_tensors_of_another_device_are_refused() -> None:
    (alone,) = transports([0], 4)
    mine = transfer(0, [[4]], 1)
    mine.device = torch.device("meta")
    with pytest.raises(dist.DistBackendError, match=r"on meta.* on cpu.*torch.cuda.set_device"):
        alone.move(mine, lambda: None)


@pytest.mark.parametrize(("ranks", "chunk"), [(1, 1), (2, 64), (3, 300), (8, 256)])
def test_the_parts_of_a_symmetric_buffer_do_not_overlap(ranks: int, chunk: int) -> None:
    buffer = SymmetricBuffer(
        0, [torch.zeros(SymmetricBuffer.size_bytes(ranks, chunk), dtype=torch.uint8) for _ in range(ranks)], chunk
    )
    views = [word(0, rank).view(torch.uint8) for word in (buffer.arrived, buffer.consumed) for rank in range(ranks)]
    views += [buffer.failed(0).view(torch.uint8)]
    views += [buffer.slot(0, rank, number) for rank in range(1, ranks) for number in range(2)]
    for view in views:
        view += 1
    assert buffer.buffers[0].max() == 1
    assert buffer.buffers[0].sum() == 4 * (2 * ranks + 1) + 2 * (ranks - 1) * chunk
    assert all(len(view) == chunk for view in views[2 * ranks + 1 :])


def test_a_rank_alone_needs_no_symmetric_memory_and_others_fail_without_it() -> None:
    buffer = allocate_symmetric_buffer(0, 1, 16, torch.device("cpu"), dist.HashStore())
    assert len(buffer.buffers) == 1 and int(buffer.signal_pad(0).abs().sum()) == 0
    if not torch.cuda.is_available():  # torch's build for CUDA has it and misses the driver
        with pytest.raises(
            RuntimeError, match="CUDA driver|NVIDIA driver" if torch.version.cuda else "symmetric memory .*None"
        ):
            allocate_symmetric_buffer(0, 2, 16, torch.device("cuda", 0), dist.HashStore())


def _ranks(hosts: list[list[int]], chunk: int) -> list[TwoLevelTransport]:
    size, store = sum(map(len, hosts)), dist.HashStore()
    limit = timedelta(seconds=20)
    near = {rank: peer for host in hosts for rank, peer in zip(host, transports(host, chunk))}
    options = ProcessGroupFreeScaleOptions(chunk_bytes=chunk)

    def one(rank: int) -> TwoLevelTransport:
        p2p = GlooP2P(store, rank, size, limit, [100 + each for each in range(size)])
        return TwoLevelTransport(near[rank], HostTransport(p2p, options), size)

    made = on_ranks(size, one)
    assert all(isinstance(each, TwoLevelTransport) for each in made), made
    return made


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]]])
def test_all_bytes_arrive_on_two_levels(hosts: list[list[int]]) -> None:
    tables = [lengths(4, 150, seed) for seed in range(4)]

    def every_rank() -> list[Any]:
        return moved(_ranks(hosts, 16), tables, late=False)

    assert run_distributed(every_rank, 1, init=False) == [[[[]] * len(tables)] * 4]  # threads of gloo stay in that process


def test_a_failure_of_the_far_part_releases_the_gpu_and_closing_closes_what_is_near() -> None:
    pair, far = transports([0, 1], 4), Mock()
    far.move.side_effect = dist.DistBackendError("rank 101 is gone")
    two = TwoLevelTransport(pair[0], far, 3)
    with pytest.raises(dist.DistBackendError, match="rank 101 is gone"):
        two.move(transfer(0, [[9] * 3] * 3, 1), lambda: None)
    assert all(stream.idle() for stream in pair[0]._driver.streams)
    assert int(pair[1]._link.buffer.failed(1)) == 1 and two.far == [2]
    two.close()
    assert pair[0]._driver.closed
