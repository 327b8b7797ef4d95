"""Copy engines and waits in memory, on a device made of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.transports.peer import transport as peer
from lightning_freescale.comm.transports.peer.symmetric_buffer import SymmetricBuffer, allocate_symmetric_buffer
from lightning_freescale.comm.transports.peer.transport import PeerTransport
from tests.helpers.fake_gpu import FakeDriver, FakeEvent, FakeStream, end_streams, on_ranks
from tests.helpers.host_peers import UNTOUCHED, lengths, transfer, transports, wrong


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    end_streams()


def _receiving(transport: PeerTransport) -> FakeStream:
    """The second stream that a link makes."""
    return transport._driver.streams[1]


def _nothing() -> None:
    """No lane wants to go first."""


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 5])
@pytest.mark.parametrize(("size", "chunk"), [(2, 1), (2, 64), (3, 7), (4, 16)])
def test_all_bytes_arrive(size: int, chunk: int, start: int, serial: bool) -> None:
    ranks = transports(list(range(size)), chunk, start, seed=size, serial=serial)
    tables = [lengths(size, 9 * chunk, seed) for seed in range(4)]

    def run(rank: int) -> list[list[int]]:
        found = []
        for seed, table in enumerate(tables):
            mine = transfer(rank, table, seed)
            ranks[rank].move(mine, _nothing)
            found.append(wrong(rank, mine, table, seed))
        return found

    assert on_ranks(size, run) == [[[]] * len(tables)] * size


@pytest.mark.parametrize("size", [2, 5])
def test_a_round_takes_as_many_calls_with_any_number_of_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait, chunks and counts each way, and the own part; at the end a look whether a peer has given up."""
    calls: list[str] = []
    for name in ("copy", "wait_words"):
        call = getattr(FakeDriver, name)

        def counted(driver: FakeDriver, *args: Any, name: str = name, call: Any = call) -> None:
            calls.append(name)
            call(driver, *args)

        monkeypatch.setattr(FakeDriver, name, counted)
    ranks, table = transports(list(range(size)), 8), [[24] * size] * size
    assert on_ranks(size, lambda rank: ranks[rank].move(transfer(rank, table, 1), _nothing)) == [None] * size
    assert (calls.count("wait_words"), calls.count("copy")) == (size * 3 * 2, size * (3 * 5 + 1))


def test_two_chunks_are_sent_before_the_first_is_read() -> None:
    pair, table = transports([0, 1], 8), [[0, 16], [0, 0]]
    _receiving(pair[1]).hold.set()
    pair[0].move(transfer(0, table, 1), _nothing)
    assert int(pair[0]._link.buffer.arrived(1, 0)) == 2


def test_a_slow_reader_is_not_overwritten() -> None:
    """The reader's copies take longer than all of the writer's; every slot is used several times."""
    pair = transports([0, 1], 8)
    pair[1]._driver._slow = 4e-3
    table = [[0, 100], [0, 0]]

    def run(rank: int) -> list[int]:
        mine = transfer(rank, table, 5)
        pair[rank].move(mine, _nothing)
        return wrong(rank, mine, table, 5)

    assert on_ranks(2, run) == [[], []]


def test_a_slow_writer_is_waited_for() -> None:
    pair = transports([0, 1], 8)
    pair[0]._driver._slow = 4e-3
    table = [[0, 100], [0, 0]]

    def run(rank: int) -> list[int]:
        mine = transfer(rank, table, 6)
        pair[rank].move(mine, _nothing)
        return wrong(rank, mine, table, 6)

    assert on_ranks(2, run) == [[], []]


def test_some_of_the_ranks_of_a_group() -> None:
    near = [1, 3]
    pair, table = transports(near, 5), lengths(4, 40, 3)

    def run(place: int) -> bool:
        mine = transfer(near[place], table, 8)
        pair[place].move(mine, _nothing)
        far = [rank for rank in range(4) if rank not in near]
        assert all((mine.incoming[rank] == UNTOUCHED).all() for rank in far)
        return set(wrong(near[place], mine, table, 8)) <= set(far)

    assert on_ranks(2, run) == [True, True]


def test_one_rank_copies_its_own_part_and_nothing_is_left_in_place() -> None:
    (alone,), table = transports([0], 4), [[30]]
    mine = transfer(0, table, 1)
    alone.move(mine, _nothing)
    assert wrong(0, mine, table, 1) == []
    same = transfer(0, table, 2, late=False)
    same.incoming[0] = same.outgoing[0]
    alone.move(same, _nothing)
    assert wrong(0, same, table, 2) == []


def test_it_pauses_between_rounds_and_keeps_few_on_the_streams() -> None:
    (alone,), table = transports([0], 1), [[40]]
    seen = []
    with alone.start_transfer(mine := transfer(0, table, 1)) as progress:
        alone.complete_transfer(progress, mine.timeout, lambda: seen.append(progress._started))
    assert len(seen) >= 5
    assert seen[0] <= 8


@pytest.mark.parametrize("start", [0, 2**32 - 2])
def test_a_peer_that_does_not_come_is_named_and_the_streams_drain(start: int) -> None:
    ranks, table = transports([0, 1, 2], 4, start), [[20] * 3] * 3

    def run(rank: int) -> None:
        ranks[rank].move(transfer(rank, table, 1, timeout=0.3), _nothing)

    begun = time.monotonic()
    errors = on_ranks(2, run)
    assert time.monotonic() - begun < 15
    assert all(isinstance(error, dist.DistBackendError) for error in errors)
    assert "rank 102 did not come within the timeout of 0.3 s" in str(errors[0])
    assert all(stream.idle() for rank in ranks for stream in rank._driver.streams)
    assert not any(rank._stuck for rank in ranks)
    with pytest.raises(dist.DistBackendError, match=r"is closed: rank 10[12]"):
        ranks[0].move(transfer(0, table, 2), _nothing)


@pytest.mark.parametrize(("bytes_", "look"), [(16, 60.0), (60, 0.1)])
def test_what_a_rank_copies_after_it_gave_up_is_not_taken_for_good(
    bytes_: int, look: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 reads so late that rank 0 gives up and overwrites its slots; all that it expects comes, or not all."""
    monkeypatch.setattr(peer, "_CHECK_AFTER", look)
    pair, table = transports([0, 1], 4), [[0, bytes_], [0, 0]]
    reader = _receiving(pair[1])
    reader.hold.set()
    threading.Timer(1.2, reader.hold.clear).start()

    def run(rank: int) -> None:
        pair[rank].move(transfer(rank, table, 1, timeout=(0.2, 20.0)[rank], late=False), _nothing)

    writer, late = on_ranks(2, run)
    assert "rank 101 did not come" in str(writer)
    assert "a peer has given up" in str(late)
    assert all(stream.idle() for rank in pair for stream in rank._driver.streams)


def test_the_last_count_of_a_peer_that_dies_cannot_stop_the_streams_from_draining() -> None:
    """It is below what has been written for it."""
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
    with pytest.raises(dist.DistBackendError, match="rank 101 did not come"):
        pair[0].move(transfer(0, table, 1, timeout=0.1, late=False), _nothing)
    assert not pair[0]._stuck


def test_peers_are_told_before_their_slots_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 begins to read when the last chunk, which overwrote another, has arrived; it hears nothing more after that."""
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
            pair[rank].move(transfer(rank, table, 1, (0.1, 20.0)[rank], late=False), _nothing)
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
    assert "a peer has given up" in str(late)


def test_closing_ends_what_is_in_flight() -> None:
    first, _ = transports([0, 1], 4)
    threading.Timer(0.2, first.close).start()
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="closed"):
        first.move(transfer(0, [[9, 9], [9, 9]], 1), _nothing)
    assert time.monotonic() - begun < 15
    first.close()
    assert first._driver.closed
    with pytest.raises(dist.DistBackendError, match="is closed: it has been shut down"):
        first.move(transfer(0, [[9, 9], [9, 9]], 1), _nothing)


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
    """At a chunk to the peer, its count, a chunk from the peer, its count."""
    pair, table = transports([0, 1], 4), [[0, 40], [40, 0]]
    _fails_at(pair[0], last, monkeypatch)
    first, second = on_ranks(2, lambda rank: pair[rank].move(transfer(rank, table, 1, timeout=5), _nothing))
    assert str(first) == "cuMemcpyBatchAsync failed"
    assert "a peer has given up" in str(second)
    assert not any(rank._stuck for rank in pair)


@pytest.mark.parametrize("last", [5, 6, 7, 8])
def test_nothing_is_touched_after_an_error(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a round that was enqueued only in part."""
    first, _ = transports([0, 1], 4, slow=0.05)
    _fails_at(first, last, monkeypatch)
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed"):
        first.move(transfer(0, [[0, 40], [40, 0]], 1), _nothing)
    assert not first._stuck
    assert all(stream.pending == 0 for stream in first._driver.streams)


def test_tensors_of_another_device_are_refused() -> None:
    (alone,) = transports([0], 4)
    mine = transfer(0, [[4]], 1)
    mine.device = torch.device("meta")
    with pytest.raises(dist.DistBackendError, match=r"on meta, the group was made on cpu: call torch.cuda.set_device"):
        alone.move(mine, _nothing)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it can be had")
def test_symmetric_memory_that_cannot_be_had_is_an_error() -> None:
    ours = "symmetric memory has backend None: call torch's symm_mem.set_backend"
    said = "CUDA driver|NVIDIA driver" if torch.version.cuda else ours  # torch's build for CUDA has it and misses the driver
    with pytest.raises(RuntimeError, match=said):
        allocate_symmetric_buffer(0, 2, 16, torch.device("cuda", 0), dist.HashStore())


def test_a_rank_alone_needs_no_symmetric_memory() -> None:
    buffer = allocate_symmetric_buffer(0, 1, 16, torch.device("cpu"), dist.HashStore())
    assert len(buffer.buffers) == 1 and int(buffer.signal_pad(0).abs().sum()) == 0
